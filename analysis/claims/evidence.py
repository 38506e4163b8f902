"""Numbers of one origin at one scale, for a claim: each with its source, or the word for what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..axes import display
from ..collection import KNOWN, Arm, Collection, paired_change, same_device
from ..metrics import metric
from ..published import STAND_INS, Paper
from ..records import Record

HOLDS, FAILS, NOT_MEASURED = "holds", "fails", "not measured"
HOLDS_FORECAST, DISAGREES = "holds (forecast)", "forecast disagrees"
STATUSES = (HOLDS, HOLDS_FORECAST, DISAGREES, FAILS, NOT_MEASURED)


class Missing(Exception):
    """A number that the claim needs is not there; the text says which."""


@dataclass
class Verdict:
    """What the records say. ``figures`` are the numbers; ``evidence`` names scale, source and reference set."""

    status: str
    figures: str = ""
    evidence: str = ""


@dataclass
class Evidence:
    """Numbers of one origin at one scale. Every number asked for is noted, with its source and device."""

    origin: Collection
    scale: str
    paper: Paper
    experiment: str | None = None  # compare within one experiment (and its family); None: whatever has the number
    sources: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)

    def arm(self, axes: Mapping[str, Any]) -> Arm:
        """The arm with these axes; at smoke scale with the smoke backend in place of the paper's fast one."""
        backends = {theirs: ours for ours, theirs in STAND_INS.items()} if self.scale == "smoke" else {}
        made = {k: backends.get(v, v) if k == "backend" else v for k, v in axes.items()}
        return self.origin.arm(made, self.scale, self.experiment)

    def usual(self, **axes: Any) -> Arm:
        """The arm of the paper's usual set-up with these axes."""
        return self.arm({**self.paper.defaults, **axes})

    def holding(self, arm: Arm, name: str) -> Arm:
        """The arm itself if it has the metric; without a fixed experiment, the same arm of another one that has it."""
        if arm.value(name).mean is None and self.experiment is None:
            others = (self.origin.arm(arm.axes, self.scale, e) for e in sorted(KNOWN))
            return next((other for other in others if other.value(name).mean is not None), arm)
        return arm

    def value(self, arm: Arm, name: str) -> float:
        """Mean over seeds. Raises Missing."""
        arm = self.holding(arm, name)
        m, found = metric(name), arm.value(name)
        if found.mean is None:
            raise Missing(f"{m.label} of {describe(arm)}")
        from_scratch = self.paper.name == "mesh"  # the paper starts from random weights itself
        if m.needs_weights and not from_scratch and any(r.get("model.weights") == "random" for r in arm.ok):
            raise Missing(f"{m.label} of {describe(arm)} from pretrained weights")
        self._note(arm, found.source)
        return found.mean

    def change(self, arm: Arm, base: Arm, name: str) -> float:
        """Percent against ``base``, over the seeds of both. Raises Missing, also for times of different devices."""
        arm, base = self.comparable(arm, base, name)
        change = paired_change(arm, base, metric(name))
        if change is None:
            raise Missing(f"a common seed of {describe(arm)} and {describe(base)}")
        return change

    def comparable(self, arm: Arm, base: Arm, name: str) -> tuple[Arm, Arm]:
        """Both arms with the metric, on one device where that matters. Raises Missing."""
        arm, base = self.holding(arm, name), self.holding(base, name)
        self.value(arm, name), self.value(base, name)
        if metric(name).same_device and not same_device(arm, base):
            raise Missing(f"{metric(name).label} of {describe(arm)} and {describe(base)} on one device")
        return arm, base

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
    def words(self) -> str:
        """Scale, source, device and reference set."""
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
