"""Every printed number held against the records: ours, the error, or why there is none yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .. import conf
from ..axes import command, display
from ..collection import Arm, Collection
from ..metrics import METRICS, Metric, metric
from ..published import Test, paper, relate
from .cells import why


@dataclass(frozen=True)
class Pair:
    """One printed number and ours. ``error`` is in percent, or absolute where the metric says so."""

    source: str
    what: str
    metric: str
    axes: dict[str, Any]
    published: float
    ours: float | None
    error: float | None
    origin: str | None  # measured | forecast, with the reference set's name
    reason: str | None  # why there is no number of ours
    command: str | None = None


def setup(axes: Mapping[str, Any]) -> str:
    """An arm in words: its method, then what differs from the paper's usual set-up."""
    parts = [display("method", axes["method"])] if axes.get("method") else []
    if axes.get("optimizer") not in (None, "adamw"):
        parts.append(display("optimizer", axes["optimizer"]))
    parts += ["GC"] if axes.get("checkpointing") else []
    parts += [f"A = {axes['accumulation']}"] if axes.get("accumulation", 1) != 1 else []
    parts += [f"batch {axes['batch_size']}"] if axes.get("batch_size", 2) != 2 else []
    parts += [f"cap {axes['memory_cap_gb']} GB"] if axes.get("memory_cap_gb") else []
    return ", ".join(parts)


def find(
    axes: Mapping[str, Any], name: str, scale: str, origins: Iterable[Collection], source: str, book: str = "sonar"
) -> tuple[Arm, str | None]:
    """The first origin whose arm has the metric, else the first arm with a record, else an empty one."""
    experiment = paper(book).experiments.get(source)
    task = conf.tasks().get(experiment or "")
    wanted = {**axes, "task": task} if task else dict(axes)
    fallback: tuple[Arm, str | None] | None = None
    for origin in origins:
        arm = origin.arm(wanted, scale, experiment)
        if arm.value(name).mean is not None:
            return arm, origin.label
        if arm.by_seed and fallback is None:
            fallback = arm, origin.label
    return fallback or (Arm(dict(wanted)), None)


def _reason(arm: Arm, m: Metric, scale: str) -> str:
    if not arm.by_seed:
        return f"no {scale} record yet"
    if arm.status != "ok":
        return why(next(r for r in arm.records if r.status == arm.status))
    return "; ".join(arm.value(m).notes) or f"the {scale} record does not hold it"


def _origin(arm: Arm, m: Metric, label: str | None) -> str:
    source = arm.value(m).source
    name = source if source in ("forecast", "computed") else "measured"
    return f"{name} (reference: {label})" if label else name


def rows(name: str, scale: str, origins: list[Collection], sources: Iterable[str] | None = None) -> list[Pair]:
    """A pair for each value of each printed row, at one scale (forecast or paper)."""
    out = []
    for row in paper(name).rows:
        if sources is not None and row.source not in sources:
            continue
        for key, printed in row.values.items():
            if scale not in metric(key).comparable:
                continue
            m = metric(key)
            arm, label = find(row.axes, key, scale, origins, row.source, name)
            random = m.needs_weights and name == "sonar" and any(r.get("model.weights") == "random" for r in arm.ok)
            ours = None if random else arm.value(m).mean
            error = None
            if ours is not None:
                error = 100 * (ours - printed) / printed if m.difference == "percent" and printed else ours - printed
            reason = None if ours is not None else "random weights" if random else _reason(arm, m, scale)
            made = None if ours is not None else _command(name, row.source, scale, row.axes)
            origin = _origin(arm, m, label) if ours is not None else None
            what = _what(row.axes, row.stated)
            out.append(Pair(row.source, what, key, row.axes, printed, ours, error, origin, reason, made))
    return out


def _what(axes: Mapping[str, Any], stated: Mapping[str, Any]) -> str:
    model = display("model", axes.get("model"))
    if "_vs_" in str(axes.get("method")):
        return " vs. ".join(display("method", side) for side in axes["method"].split("_vs_"))
    if "method" not in axes:
        return f"{model}, {axes.get('optimizer')}" + (f", seed {axes['seed']}" if "seed" in stated else "")
    backend = f", {display('backend', axes['backend'])}" if axes.get("backend") else ""
    return f"{model}{backend}, {setup(axes)}"


def _command(name: str, source: str, scale: str, axes: Mapping[str, Any]) -> str:
    experiment = paper(name).experiments.get(source, "table1")
    if experiment in conf.tasks() or name == "mesh":
        return command(experiment, scale, [])[0]
    usual = {**paper(name).defaults, "model": None, "method": None}  # only what differs from it is named
    return command(experiment, scale, [axes], [axes, usual])[0]


def statement_value(
    s: Test, scale: str, origins: Iterable[Collection], book: str = "sonar"
) -> tuple[float | None, str | None]:
    """Our number of a printed relation and its origin, from the first origin that has both arms."""
    experiment = paper(book).experiments.get(s.source)
    for origin in origins:
        arm = origin.arm(s.arm, scale, experiment)
        base = origin.arm(s.against, scale, experiment) if s.against else None
        value = relate(s, arm, base)
        if value is not None:
            return value, _origin(arm, metric(s.metric), origin.label)
    return None, None


def coverage(name: str, origins: list[Collection]) -> list[Pair]:
    """Every printed number of a paper once: measured at paper scale, else forecast, else why there is neither."""
    by_scale = [{(p.source, p.what, p.metric): p for p in rows(name, s, origins)} for s in ("paper", "forecast")]
    out = []
    for where in dict.fromkeys(key for pairs in by_scale for key in pairs):
        found = [pairs[where] for pairs in by_scale if where in pairs]
        best = next((p for p in found if p.ours is not None), None)
        if best is None:  # the cheapest way to a value comes first: a forecast needs no GPU
            reasons = "; ".join(dict.fromkeys(p.reason for p in reversed(found) if p.reason))
            best = replace(found[-1], reason=reasons)
        out.append(best)
    return out


def covered_statements(name: str, origins: list[Collection]) -> list[tuple[Test, float | None, str | None]]:
    """Every printed relation with our value and its origin, measured before forecast."""
    out = []
    for s in (s for s in paper(name).statements if s.metric in METRICS):
        value: float | None = None
        origin: str | None = None
        for scale in metric(s.metric).comparable[::-1]:  # paper before forecast
            if value is None:
                value, origin = statement_value(s, scale, origins, name)
        out.append((s, value, origin))
    return out
