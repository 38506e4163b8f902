"""The minutes of one check: what still fits is started, the rest is skipped with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Wall time against a budget.

    Args:
        minutes: of the whole check, from now.
        reserve_s: kept back for what must come at the end (forecasts, the tar file).
    """

    def __init__(self, minutes: float, reserve_s: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self.budget_s, self.reserve_s = now, minutes * 60, reserve_s
        self.started = now()
        self._seen: dict[str, float] = {}

    def spent(self) -> float:
        """Seconds since the start."""
        return self.now() - self.started

    def left(self) -> float:
        """Seconds until the reserve begins."""
        return self.budget_s - self.reserve_s - self.spent()

    def took(self, kind: str, seconds: float) -> None:
        """Remember how long an arm of a kind took: the next one is expected to take as long."""
        self._seen[kind] = max(seconds, self._seen.get(kind, 0.0))

    def why_skip(self, kind: str, expected_s: float) -> str | None:
        """Why an arm of this kind is not started any more, or None."""
        expected = 1.1 * self._seen.get(kind, expected_s)
        if expected <= self.left():
            return None
        return f"time: {max(self.left(), 0):.0f} s left and it takes about {expected:.0f} s"

    def release(self) -> None:
        """The reserve may be used now."""
        self.reserve_s = 0.0
