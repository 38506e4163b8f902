"""Task families of the embedded instructions: functions from a :class:`Draw` to ``(instruction, input, output)``."""

from __future__ import annotations

from collections.abc import Callable

from .draw import Draw

Row = tuple[str, str, str]
Family = Callable[[Draw], Row]


def families() -> list[tuple[int, Family]]:
    """Every family with its weight: how often it is drawn, in parts of the sum of weights."""
    from . import code, knowledge, language, longform, numbers, writing

    return [entry for module in (numbers, language, knowledge, writing, code, longform) for entry in module.FAMILIES]
