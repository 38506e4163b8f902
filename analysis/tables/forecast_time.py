"""Forecast step time against the paper, and how it moves when a constant of the time model is off by a fifth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import conf
from .. import format as fmt
from ..axes import display
from ..collection import Collection
from ..published import Row, paper
from ..records import Record
from .coverage import find
from .forecast_memory import summary
from .spec import Cell, Custom, Field, Table, labels, triple

BASE = "standard_global_clip"
PLACE = ("model", "backend", "method")


@dataclass(frozen=True)
class Step:
    """One row of Table 1: our step and change, the printed ones. Times in ms, changes in percent."""

    row: Row
    ours: float | None
    change: float | None

    @property
    def place(self) -> tuple[str, str]:
        return self.row.axes["model"], self.row.axes["backend"]

    @property
    def points(self) -> float | None:
        """Error of the change in percentage points."""
        printed = self.row.changes_pct.get("step_ms")
        return None if self.change is None or printed is None else self.change - printed

    @property
    def error(self) -> float | None:
        """Error of the step itself in percent."""
        printed = self.row.values["step_ms"]
        return None if self.ours is None else 100 * (self.ours - printed) / printed


def steps(scale: str, origins: list[Collection]) -> list[Step]:
    """The 16 rows of Table 1 with our step times."""

    def ms(axes: dict[str, Any]) -> float | None:
        return find(axes, "step_ms", scale, origins, "Table 1")[0].value("step_ms").mean

    out = []
    for row in (r for r in paper("sonar").rows if r.source == "Table 1"):
        ours, base = ms(row.axes), ms({**row.axes, "method": BASE})
        change = 100 * (ours - base) / base if ours and base and row.axes["method"] != BASE else None
        out.append(Step(row, ours, change))
    return out


def step_time(table: Table, scale: str, origins: list[Collection]) -> None:
    """Table 1's changes (error in percentage points), its steps (error in percent), and the order of its methods."""
    found = steps(scale, origins)
    made = []
    for s in found:
        numbers = {"step_ms": s.ours, "step_ms.published": s.row.values["step_ms"], "change_pct": s.change}
        numbers |= {"change_pct.published": s.row.changes_pct.get("step_ms"), "_points": s.points, "_error": s.error}
        missing = {"step_ms": Cell("missing", kind="status")} if s.ours is None else {}
        made.append({**s.row.axes, **numbers, "cells": missing})
    points = Field("_points", "Δ step", "error", lambda v: fmt.signed(v, 1), "error (points)", "time")
    error = Field("_error", "Step ms", "error", fmt.percent, "error", "time")
    changes = triple("change_pct", "Δ step", 1, points, "time")
    changes[:2] = [Field(f.key, f.heading, f.kind, fmt.percent, f.sub, f.panel) for f in changes[:2]]
    fields = (
        labels(model="Model", backend="Backend", method="Method") + changes + triple("step_ms", "Step ms", 1, error)
    )
    table.add(None, fields, made, group=("model", "backend"))
    table.has_records = any(s.ours is not None for s in found)
    for name, errors, unit, goal in (
        ("Δ step time", [s.points for s in found if s.points is not None], " points", 3.0),
        ("Absolute step time", [s.error for s in found if s.error is not None], "%", 25.0),
    ):
        table.notes += [summary(name, errors, unit, goal, 1)] if errors else []
    first = [r for s in found[:1] for r in find(s.row.axes, "step_ms", scale, origins, "Table 1")[0].ok[:1]]
    table.notes += [
        f"Forecast for {r.get('time.forecast.gpu')} with the measured host {r.get('time.forecast.host')}"
        f" ({r.get('time.forecast.host_cpu')}), at the median of the drawn batch lengths."
        for r in first
        if r.get("time.forecast.host_cpu")
    ]
    for place in dict.fromkeys(s.place for s in found):
        members = [s for s in found if s.place == place]
        if all(s.ours is not None for s in members):
            table.notes.append(_order(f"{display('model', place[0])} with {display('backend', place[1])}", members))


def _order(where: str, members: list[Step]) -> str:
    by_ours = sorted(members, key=lambda s: s.ours or 0.0)
    by_printed = sorted(members, key=lambda s: s.row.values["step_ms"])
    ours, theirs = ([display("method", s.row.axes["method"]) for s in found] for found in (by_ours, by_printed))
    if ours == theirs:
        return f"{where}: the order of the four methods is the paper's."
    noise = paper("sonar").about["same_seed_noise"]["step_ms_pct"]
    swapped = [
        (a.row.values["step_ms"], b.row.values["step_ms"])
        for i, a in enumerate(by_printed)
        for b in by_printed[i + 1 :]
        if by_ours.index(a) > by_ours.index(b)
    ]
    if all(100 * abs(a - b) / a <= noise for a, b in swapped):
        pairs = " and ".join(f"{fmt.fixed(a, 1)} and {fmt.fixed(b, 1)} ms" for a, b in swapped)
        return (
            f"{where}: the order of the four methods is the paper's, but for {pairs}, which differ by less than its own"
            f" same-seed noise ({noise:g}%)."
        )
    return f"{where}: ours {' < '.join(ours)}; the paper {' < '.join(theirs)}."


def curve(record: Record) -> list[tuple[float, float]]:
    """(host speed relative to the measured host, step in ms) of a forecast; empty if there is none."""
    points = [(p.get("host_speed"), p.get("step_ms")) for p in record.get("time.forecast.host_curve", []) if p]
    return sorted((float(x), float(y)) for x, y in points if x is not None and y is not None)


def sensitivity(table: Table, scale: str, origins: list[Collection]) -> None:
    """Change of step time against global clipping when one constant of the time model is 20% lower and higher.

    From ``time.forecast.sensitivity``: {constant: {"low": step in ms, "high": step in ms}}. Rows in Table 1's order.
    """
    swept = conf.arms("table1", scale)
    for origin in origins:
        moved: dict[tuple, dict[str, Any]] = {}
        for r in origin.of("table1", scale):
            key = tuple(r.arm.get(k) for k in PLACE)
            if isinstance(found := r.get("time.forecast.sensitivity"), dict):
                moved.setdefault(key, found)
        names = list(dict.fromkeys(name for value in moved.values() for name in value))
        place = [(m, b, k) for m in swept["model"] for b in swept["backend"] for k in swept["method"]]
        order = [*place, *(key for key in moved if key not in place)]
        keys = [k for k in order if k in moved and k[2] != BASE and (*k[:2], BASE) in moved]
        if not keys:
            continue
        made = [
            dict(zip(PLACE, key)) | {n: str(_shift(moved[key].get(n), moved[*key[:2], BASE].get(n))) for n in names}
            for key in keys
        ]
        for key, row in zip(keys, made):
            both = {n: _shift(moved[key].get(n), moved[*key[:2], BASE].get(n)) for n in names}
            row["cells"] = {n: Cell(" / ".join(fmt.percent(v) for v in ends)) for n, ends in both.items()}
        fields = labels(model="Model", backend="Backend", method="Method")
        fields += [Field(n, n.replace("_", " ")) for n in names]
        table.add(f"reference: {origin.label}" if origin.label else None, fields, made, group=PLACE[:2])
        table.has_records = True
        table.notes.append("Δ step time against global clipping with the constant 20% lower / 20% higher.")
        return


def _shift(arm: Any, base: Any) -> list[float | None]:
    """Percent change at the low and the high end."""
    out: list[float | None] = []
    for end in ("low", "high"):
        a, b = (x.get(end) if isinstance(x, dict) else None for x in (arm, base))
        out.append(100 * (a - b) / b if a is not None and b else None)
    return out


TABLES = (
    Custom("forecast_time", "Forecast accuracy: step time of Table 1", ("table1",), ("forecast",), step_time),
    Custom("forecast_sensitivity", "Forecast step time: sensitivity", ("table1",), ("forecast",), sensitivity),
)
