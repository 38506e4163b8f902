"""A claim: a sentence of a paper as a predicate over records. Each holds, fails, or is not measured, with its
figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..axes import display
from ..collection import KNOWN, Arm, Collection, paired_change, same_device
from ..metrics import metric
from ..records import Record
from ..tables import format as fmt

HOLDS, FAILS, NOT_MEASURED = "holds", "fails", "not measured"

# Which scales can show a kind of claim, best first. Smoke scale on a CPU shows neither speed nor absolute memory.
MEMORY = ("paper", "forecast")
SPEED = ("paper", "forecast")
QUALITY = ("paper",)
EXACT = ("paper", "smoke")
COUNT = ("paper", "forecast", "smoke")
# Experiments within which a claim is tried first: their arms ran equally long.
WITHIN = ("table1", "table6", "table8", "figure4", "figure3", "mesh_table1")


class Missing(Exception):
    """A number that the claim needs is not there; the text says which."""


@dataclass
class Verdict:
    """What the records say. ``figures`` are the numbers; ``evidence`` names scale, source and reference set."""

    status: str
    figures: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class Claim:
    """One sentence. ``check(look)`` returns (whether it holds, figures) or raises :class:`Missing`."""

    name: str
    paper: str
    section: str
    sentence: str
    scales: tuple[str, ...]
    check: Callable[[Look], tuple[bool, str]]


@dataclass
class Look:
    """Numbers of one origin at one scale, for a check. Every number asked for is noted, with its source and device."""

    origin: Collection
    scale: str
    experiment: str | None = None  # compare within one experiment (and its family); None: whatever has the number
    from_scratch: bool = False  # the paper starts from random weights itself
    sources: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    timed: bool = False  # a time was asked for

    def arm(self, **axes: Any) -> Arm:
        """The arm of the paper's usual set-up with these axes; at smoke scale with the smoke backend."""
        usual = {
            "model": "olmoe",
            "backend": "grouped_mm" if self.scale == "smoke" else "sonicmoe",
            "optimizer": "adamw",
        }
        usual |= {"batch_size": 2, "accumulation": 1, "checkpointing": False, "memory_cap_gb": None}
        return self.bare(**{**usual, **axes})

    def bare(self, **axes: Any) -> Arm:
        """The arm with exactly these axes."""
        return self.origin.arm(axes, self.scale, self.experiment)

    def holding(self, arm: Arm, name: str) -> Arm:
        """The arm itself if it has the metric; without a fixed experiment, the same arm of another one that has it."""
        if arm.value(name).mean is None and self.experiment is None:
            others = (self.origin.arm(arm.axes, self.scale, e) for e in sorted(KNOWN))
            return next((other for other in others if other.value(name).mean is not None), arm)
        return arm

    def value(self, arm: Arm, name: str) -> float:
        """Mean over seeds. Raises Missing."""
        arm = self.holding(arm, name)
        self.timed |= metric(name).same_device
        found = arm.value(name)
        if found.mean is None:
            raise Missing(f"{metric(name).label} of {describe(arm)}")
        if (
            metric(name).needs_weights
            and not self.from_scratch
            and any(r.get("model.weights") == "random" for r in arm.ok)
        ):
            raise Missing(f"{metric(name).label} of {describe(arm)} from pretrained weights")
        self._note(arm, found.source)
        return found.mean

    def change(self, arm: Arm, base: Arm, name: str) -> float:
        """Percent against ``base``, over the seeds of both. Raises Missing, also for times of different devices."""
        arm, base = self.holding(arm, name), self.holding(base, name)
        self.value(arm, name), self.value(base, name)
        if metric(name).same_device and not same_device(arm, base):
            raise Missing(f"{metric(name).label} of {describe(arm)} and {describe(base)} on one device")
        change = paired_change(arm, base, metric(name))
        if change is None:
            raise Missing(f"a common seed of {describe(arm)} and {describe(base)}")
        return change

    def status(self, arm: Arm) -> str:
        """ok or oom. Raises Missing for anything else."""
        if arm.status not in ("ok", "oom"):
            raise Missing(describe(arm))
        self._note(arm, arm.records[0].get("memory.source"))
        return arm.status

    def records(self, test: Callable[[Record], bool]) -> list[Record]:
        """Ok records of this scale that pass a test."""
        return [r for r in self.origin.records if r.scale == self.scale and r.readable and r.status == "ok" and test(r)]

    def _note(self, arm: Arm, source: str | None) -> None:
        self.sources.add("forecast" if self.scale == "forecast" else "computed" if source == "computed" else "measured")
        self.devices |= {str(r.get("environment.device_name")) for r in arm.ok if r.get("environment.device_name")}

    @property
    def evidence(self) -> str:
        """Scale, source, device and reference set, in words."""
        parts = [self.scale + (" (tiny model)" if self.scale == "smoke" else "")]
        parts += ["/".join(sorted(self.sources))] if self.sources != {self.scale} else []
        if self.devices and self.scale == "paper":
            parts.append(", ".join(sorted(self.devices)))
        parts += [f"reference: {self.origin.label}"] if self.origin.label else []
        return "; ".join(p for p in parts if p)


def describe(arm: Arm) -> str:
    """An arm in words, for what is missing."""
    axes = arm.axes
    words = [display(k, axes[k]) for k in ("model", "backend", "method") if axes.get(k)]
    words += [str(axes["optimizer"])] if axes.get("optimizer") not in (None, "adamw") else []
    words += ["GC"] if axes.get("checkpointing") else []
    words += [f"A={axes['accumulation']}"] if axes.get("accumulation", 1) != 1 else []
    words += [f"batch {axes['batch_size']}"] if axes.get("batch_size", 2) != 2 else []
    words += [f"cap {axes['memory_cap_gb']} GB"] if axes.get("memory_cap_gb") else []
    return " ".join(words)


def judge(claim: Claim, origins: Sequence[Collection]) -> Verdict:
    """Try the claim's scales in order, the user's records before reference sets, one experiment before a mixture.

    The first that has the numbers decides.
    """
    lacking: dict[str, str] = {}
    forecast = None  # what a forecast of time says
    for scale in claim.scales:
        for origin in origins:
            for experiment in (*WITHIN, None):
                look = Look(origin, scale, experiment, from_scratch=claim.paper == "mesh")
                try:
                    holds, figures = claim.check(look)
                except Missing as missing:
                    if experiment is None:
                        lacking.setdefault(scale, str(missing))
                    continue
                if look.timed and scale == "forecast":
                    # A model of the hardware cannot refute a stopwatch, nor confirm it.
                    says = f"the forecast of time {'agrees' if holds else 'does not agree'}: {figures}"
                    forecast = forecast or says  # the user's own records come first
                    break
                return Verdict(HOLDS if holds else FAILS, figures, look.evidence)
    if forecast:
        lacking.pop("forecast", None)
    needs = "; ".join(f"at {scale} scale: {what}" for scale, what in lacking.items())
    needs = f"needs {needs}" if needs else "needs records"
    return Verdict(NOT_MEASURED, f"{forecast}; {needs}" if forecast else needs)


# -- shapes that many claims share -----------------------------------------------------------------------------------


def within(value: float, low: float, high: float, slack: float = 0.0) -> bool:
    """low − slack ≤ value ≤ high + slack."""
    return low - slack <= value <= high + slack


def changes(
    name: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], low: float, high: float, slack: float
) -> Callable[[Look], tuple[bool, str]]:
    """All changes of a metric, arm against base, lie between low and high percent; ``slack`` is the printed
    rounding.
    """

    def check(look: Look) -> tuple[bool, str]:
        found = [(look.arm(**a), look.change(look.arm(**a), look.arm(**b), name)) for a, b in pairs]
        figures = "; ".join(f"{describe(arm)} {fmt.percent(value)}" for arm, value in found)
        return all(within(value, low, high, slack) for _, value in found), figures

    return check


def savings(
    name: str, arm: Mapping[str, Any], base: Mapping[str, Any], printed: float, slack: float
) -> Callable[[Look], tuple[bool, str]]:
    """base − arm in the metric's unit is the printed number, give or take ``slack``."""

    def check(look: Look) -> tuple[bool, str]:
        a, b = (look.value(look.arm(**axes), name) for axes in (arm, base))
        return abs(b - a - printed) <= slack, f"{fmt.fixed(b - a, 2)} {metric(name).unit} (printed {printed:g})"

    return check


def every(*checks: Callable[[Look], tuple[bool, str]]) -> Callable[[Look], tuple[bool, str]]:
    """All of several checks hold; their figures one after another."""

    def check(look: Look) -> tuple[bool, str]:
        found = [c(look) for c in checks]
        return all(holds for holds, _ in found), "; ".join(figures for _, figures in found)

    return check
