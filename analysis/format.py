"""Numbers as they are printed: true minus signs, three significant digits at least, mean ± spread (n)."""

from __future__ import annotations

import math
from collections.abc import Iterable

MINUS = "\u2212"
DASH = "–"


def fixed(value: float | None, decimals: int) -> str:
    """A number with a true minus sign and thousands separated; a dash for None; never a negative zero."""
    if value is None:
        return DASH
    text = f"{abs(value):,.{decimals}f}"
    negative = value < 0 and float(text.replace(",", "")) != 0
    return (MINUS if negative else "") + text


def percent(value: float | None, decimals: int = 1, *, plus: bool = True) -> str:
    """A signed percentage: −21.6%, +0.3%, 0.0%."""
    if value is None:
        return DASH
    text = fixed(value, decimals)
    sign = "+" if plus and not text.startswith(MINUS) and float(text.replace(",", "")) != 0 else ""
    return f"{sign}{text}%"


def signed(value: float | None, decimals: int) -> str:
    """A signed absolute difference."""
    if value is None:
        return DASH
    text = fixed(value, decimals)
    return text if text.startswith(MINUS) or float(text.replace(",", "")) == 0 else f"+{text}"


def spread(mean: float | None, deviation: float | None, n: int, decimals: int) -> str:
    """mean ± sample standard deviation (n); the mean alone for one value."""
    if mean is None or deviation is None:
        return fixed(mean, decimals)
    return f"{fixed(mean, decimals)} ± {fixed(deviation, decimals)} ({n})"


def count(value: float | None) -> str:
    """A count: exact below ten million, else in millions or billions with three digits (3.04B)."""
    if value is None:
        return DASH
    if abs(value) < 1e7:
        return fixed(value, 0)
    unit, letter = (1e9, "B") if abs(value) >= 1e9 else (1e6, "M")
    return f"{fixed(value / unit, 2 if letter == 'B' else 1)}{letter}"


def decimals_for(values: Iterable[float | None], least: int) -> int:
    """Decimals with which the smallest non-zero value keeps three significant digits, between ``least`` and 6."""
    sizes = [abs(v) for v in values if v]
    if not sizes or min(sizes) <= 0:
        return least
    return max(least, min(6, 2 - math.floor(math.log10(min(sizes)))))
