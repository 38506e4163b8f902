"""The evaluator of claims: value, saving, difference, change, order and runs; then the verdict over all scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .. import format as fmt
from ..axes import display
from ..collection import Arm, Collection
from ..metrics import metric
from ..published import Claim, Test, paper, relate, unit_of
from . import checks
from .evidence import (
    DISAGREES,
    FAILS,
    HOLDS,
    HOLDS_FORECAST,
    NOT_MEASURED,
    Evidence,
    Missing,
    Verdict,
    describe,
)  # fmt: skip

# Which scales can show a kind of claim, best first. Smoke scale on a CPU shows neither speed nor absolute memory.
SCALES = {
    "memory": ("paper", "forecast"),
    "speed": ("paper", "forecast"),
    "quality": ("paper",),
    "exact": ("paper", "smoke"),
    "order": ("paper", "smoke"),
    "count": ("paper", "forecast", "smoke"),
}
# Experiments within which a claim is tried first: their arms ran equally long.
WITHIN = ("table1", "table6", "table8", "figure4", "figure3", "mesh_table1")


def met(test: Test, value: float) -> bool:
    """Whether a number is what the test asks for."""
    low, high = test.value if isinstance(test.value, list) else (test.value, test.value)
    edge = 1e-9 * max(abs(value), 1.0) if test.within else 0.0  # a printed bound is met by its own digits
    return (
        (low is None or low - test.within - edge <= value <= high + test.within + edge)
        and (test.at_most is None or value <= test.at_most)
        and (test.at_least is None or value >= test.at_least)
    )


def _label(test: Test, arm: Arm) -> str:
    """What stands before the number: the test's own words, or the arm where several are compared."""
    if test.label is not None:
        made = test.label.format_map({k: display(k, v) for k, v in test.arm.items()})
        return made + " " if made else ""
    return "" if test.relation == "saving" else f"{describe(arm)} "


def evaluate(test: Test, evidence: Evidence) -> tuple[bool, str]:
    """(whether it holds, its figures). Raises Missing."""
    if test.relation == "order":
        return _order(test, evidence)
    arm = evidence.arm(test.arm)
    if test.relation == "runs":
        found = evidence.status(arm)
        return found == test.value, f"{display('method', test.arm['method'])} {checks.RAN[found]}"
    if test.against is None:
        value: float | None = evidence.value(arm, test.metric)
    elif test.relation == "change":
        value = evidence.change(arm, evidence.arm(test.against), test.metric)
    else:
        arm, base = evidence.comparable(arm, evidence.arm(test.against), test.metric)
        more = evidence.value(arm, test.per) - evidence.value(base, test.per) if test.per else 1.0
        value = relate(replace(test, per=None), arm, base)
        value = value / more if value is not None and more else None
    if value is None:
        raise Missing(f"a difference of {describe(arm)} to what it is held against")
    return met(test, value), _label(test, arm) + _figure(test, value)


def _figure(test: Test, value: float) -> str:
    m, unit = metric(test.metric), unit_of(test)
    if test.scientific:
        return f"{value:.1e}"
    if test.relation == "change":
        return fmt.percent(value, test.decimals or 1)
    if m.name.endswith("parameters"):
        return f"{fmt.count(value)} parameters"
    decimals = m.decimals if test.decimals is None else test.decimals
    shown = fmt.signed(value, decimals) if test.relation == "difference" else fmt.fixed(value, decimals)
    printed = "" if isinstance(test.value, list) or test.value is None else f" (printed {test.value:g})"
    return shown + (unit if unit == "%" else f" {unit}" if unit else "") + printed


def _order(test: Test, evidence: Evidence) -> tuple[bool, str]:
    arms = [evidence.arm(axes) for axes in test.arms]
    values = [evidence.value(arm, test.metric) for arm in arms]
    decimals = metric(test.metric).decimals
    names = (display("optimizer", arm.axes.get("optimizer")) for arm in arms)
    figures = ", ".join(f"{name} {v:.{decimals}f}" for name, v in zip(names, values))
    return all(a < b - test.margin for a, b in zip(values, values[1:])), figures


def decide(claim: Claim, evidence: Evidence) -> tuple[bool, str]:
    """All tests of a claim, and its check if it has one. Raises Missing."""
    found = [evaluate(test, evidence) for test in claim.tests]
    if claim.check:
        name, *arguments = claim.check.split()
        found.append(getattr(checks, name)(evidence, *arguments))
    return all(holds for holds, _ in found), "; ".join(figures for _, figures in found)


def judge(claim: Claim, origins: Sequence[Collection]) -> Verdict:
    """Try the claim's scales in order, the user's records before reference sets, one experiment before a mixture.

    The first that has the numbers decides; a forecast's verdict is called one.
    """
    lacking: dict[str, str] = {}
    for scale in SCALES[claim.scales]:
        for origin in origins:
            for experiment in (*WITHIN, None):
                evidence = Evidence(origin, scale, paper(claim.paper), experiment)
                try:
                    holds, figures = decide(claim, evidence)
                except Missing as missing:
                    if experiment is None:
                        lacking.setdefault(scale, str(missing))
                    continue
                yes, no = (HOLDS_FORECAST, DISAGREES) if scale == "forecast" else (HOLDS, FAILS)
                return Verdict(yes if holds else no, figures, evidence.words)
    needs = "; ".join(f"at {scale} scale: {what}" for scale, what in lacking.items())
    return Verdict(NOT_MEASURED, f"needs {needs}" if needs else "needs records")
