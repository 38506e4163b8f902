"""Every printed number held against the records: ours, the error, or why there is none yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..axes import command, display
from ..collection import Arm, Collection, paired_change
from ..metrics import METRICS, Metric, metric
from ..published import Statement, paper
from .cells import why
from .sonar import COMPARISONS

# Which experiment makes the arms of a printed source (conf/experiment).
EXPERIMENTS = {f"Table {n}": f"table{n}" for n in range(1, 9)}
EXPERIMENTS |= {"Figure 3": "figure3", "§5.5": "figure4", "§5.6": "table8", "§5.3": "table3", "§4.3": "table3"}
TASKS = {"Table 2": "downstream", "Table 4": "compare_weights"}


@dataclass(frozen=True)
class Pair:
    """One printed number and ours. ``error`` is in percent, or absolute where the metric says so; ``reason`` if no
    ours.
    """

    source: str
    what: str
    metric: str
    axes: dict[str, Any]
    published: float
    ours: float | None
    error: float | None
    origin: str | None  # measured | forecast, with the reference set's name
    reason: str | None
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
    axes: Mapping[str, Any], name: str, scale: str, origins: Iterable[Collection], source: str
) -> tuple[Arm, str | None]:
    """The first origin whose arm has the metric, else the first arm with a record, else an empty one."""
    task = TASKS.get(source)
    wanted = {**axes, "task": task} if task else dict(axes)
    fallback: tuple[Arm, str | None] | None = None
    for origin in origins:
        arm = origin.arm(wanted, scale, EXPERIMENTS.get(source))
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
    name = "forecast" if source == "forecast" else "computed" if source == "computed" else "measured"
    return f"{name} (reference: {label})" if label else name


def rows(name: str, scale: str, origins: list[Collection], sources: Iterable[str] | None = None) -> list[Pair]:
    """A pair for each value of each printed row, at one scale (forecast or paper)."""
    out = []
    for row in paper(name).rows:
        if sources is not None and row.source not in sources:
            continue
        for key, printed in row.values.items():
            if key not in METRICS or scale not in metric(key).comparable:
                continue
            m = metric(key)
            arm, label = find(row.axes, key, scale, origins, row.source)
            random = m.needs_weights and name == "sonar" and any(r.get("model.weights") == "random" for r in arm.ok)
            ours = None if random else arm.value(m).mean
            error = None
            if ours is not None:
                error = 100 * (ours - printed) / printed if m.difference == "percent" and printed else ours - printed
            reason = None if ours is not None else "random weights" if random else _reason(arm, m, scale)
            what = _what(row.axes, row.stated)
            made = None if ours is not None else _command(name, row.source, scale, row.axes)
            origin = _origin(arm, m, label) if ours is not None else None
            out.append(Pair(row.source, what, key, row.axes, printed, ours, error, origin, reason, made))
    return out


def _what(axes: Mapping[str, Any], stated: Mapping[str, Any]) -> str:
    model = display("model", axes.get("model"))
    if "_vs_" in str(axes.get("method")):
        return COMPARISONS[axes["method"]]
    if axes.get("model") == "nanowhale":
        return f"{model}, {axes.get('optimizer')}" + (f", seed {axes['seed']}" if "seed" in axes else "")
    backend = f", {display('backend', axes['backend'])}" if axes.get("backend") else ""
    return f"{model}{backend}, {setup(axes)}"


def _command(name: str, source: str, scale: str, axes: Mapping[str, Any]) -> str:
    number = source.split()[-1]
    experiment = f"mesh_table{number}" if name == "mesh" else EXPERIMENTS.get(source, "table1")
    if experiment in ("table2", "table4") or name == "mesh":
        return command(experiment, scale, [])[0]
    usual = {**paper(name).defaults, "model": None, "method": None}  # only what differs from it is named
    return command(experiment, scale, [axes], [axes, usual])[0]


def statement_value(
    s: Statement, scale: str, origins: Iterable[Collection]
) -> tuple[float | None, str | None, list[Arm]]:
    """Our value of a printed relation (saving, change_pct, difference, value) from the first origin that has both
    arms.
    """
    m = metric(s.metric)
    seen: list[Arm] = []
    for origin in origins:
        arm = origin.arm(s.arm, scale, EXPERIMENTS.get(s.source))
        base = origin.arm(s.against, scale, EXPERIMENTS.get(s.source)) if s.against else None
        a, b = arm.value(m).mean, base.value(m).mean if base else None
        value = None
        if s.relation == "value":
            value = a
        elif a is not None and b is not None:
            value = {"saving": b - a, "difference": a - b, "change_pct": paired_change(arm, base, m)}.get(s.relation)
        seen += [x for x in (arm, base) if x is not None]
        if value is not None:
            return value, _origin(arm, m, origin.label), [x for x in (arm, base) if x is not None]
    return None, None, seen


def median(values: list[float]) -> float:
    """Median of absolute values."""
    ordered = sorted(abs(v) for v in values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def coverage(name: str, origins: list[Collection]) -> list[Pair]:
    """Every printed number of a paper once: measured at paper scale, else forecast, else why there is neither."""
    by_scale = [{(p.source, p.what, p.metric): p for p in rows(name, s, origins)} for s in ("paper", "forecast")]
    out = []
    for row in paper(name).rows:
        for key in row.values:
            where = (row.source, _what(row.axes, row.stated), key)
            found = [pairs[where] for pairs in by_scale if where in pairs]
            best = next((p for p in found if p.ours is not None), None)
            if best is None and found:  # the cheapest way to a value comes first: a forecast needs no GPU
                reasons = "; ".join(dict.fromkeys(p.reason for p in reversed(found) if p.reason))
                best = replace(found[-1], reason=reasons)
            if best is not None:
                out.append(best)
    return out


def covered_statements(name: str, origins: list[Collection]) -> list[tuple[Statement, float | None, str | None]]:
    """Every printed relation with our value and its origin, measured before forecast."""
    out = []
    for s in paper(name).statements:
        if s.metric not in METRICS:
            continue
        value, origin = None, None
        for scale in metric(s.metric).comparable[::-1]:  # paper before forecast
            if value is None:
                value, origin, _ = statement_value(s, scale, origins)
        out.append((s, value, origin))
    return out
