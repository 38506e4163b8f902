"""Random choices that stay the same on every Python version."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """Seeded choices built on ``random.Random.random`` alone, the one method whose sequence Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._uniform = random.Random(seed).random

    def integer(self, low: int, high: int) -> int:
        """An integer in ``[low, high]``, both ends included."""
        return low + int(self._uniform() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._uniform() < probability

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[int(self._uniform() * len(options))]

    def weighted(self, options: Sequence[tuple[int, T]]) -> T:
        """One of the options, in proportion to the integer weight in front of it."""
        target = self._uniform() * sum(weight for weight, _ in options)
        for weight, option in options:
            target -= weight
            if target < 0:
                return option
        return options[-1][1]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in random order (Fisher-Yates)."""
        items = list(items)
        for last in range(len(items) - 1, 0, -1):
            other = self.integer(0, last)
            items[last], items[other] = items[other], items[last]
        return items

    def sample(self, items: Sequence[T], k: int) -> list[T]:
        """``k`` different items in random order."""
        return self.shuffled(items)[:k]
