"""Forecast step time against the paper, and how it moves when a constant of the time model is off by a fifth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..axes import display
from ..collection import Collection
from ..published import Row, paper
from . import format as fmt
from .accuracy import heads_of, summary, triple
from .confront import find
from .spec import Block, Cell, Custom, Table

BASE = "standard_global_clip"


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
    def printed_change(self) -> float | None:
        return self.row.changes_pct.get("step_ms")

    @property
    def points(self) -> float | None:
        """Error of the change in percentage points."""
        return None if self.change is None or self.printed_change is None else self.change - self.printed_change

    @property
    def error(self) -> float | None:
        """Error of the step itself in percent."""
        printed = self.row.values["step_ms"]
        return None if self.ours is None else 100 * (self.ours - printed) / printed


def steps(scale: str, origins: list[Collection]) -> list[Step]:
    """The 16 rows of Table 1 with our step times."""
    out = []
    for row in (r for r in paper("sonar").rows if r.source == "Table 1"):
        ours = find(row.axes, "step_ms", scale, origins, "Table 1")[0].value("step_ms").mean
        base = find({**row.axes, "method": BASE}, "step_ms", scale, origins, "Table 1")[0].value("step_ms").mean
        change = 100 * (ours - base) / base if ours and base and row.axes["method"] != BASE else None
        out.append(Step(row, ours, change))
    return out


def step_time(table: Table, scale: str, origins: list[Collection]) -> None:
    """Table 1's changes (error in percentage points), its steps (error in percent), and the order of its methods."""
    heads = (
        heads_of("Model", "Backend", "Method", labels=3)
        + triple("Δ step", "time", "points")
        + triple("Step ms", "time")
    )
    block, found = Block(None, heads), steps(scale, origins)
    for i, step in enumerate(found):
        if not i or step.place != found[i - 1].place:
            block.groups.append(i)
        ours = Cell(fmt.fixed(step.ours, 1)) if step.ours is not None else Cell("missing", kind="status")
        block.rows.append(
            [
                *(Cell(display(n, step.row.axes[n]), kind="label") for n in ("model", "backend", "method")),
                Cell(fmt.percent(step.change)),
                Cell(fmt.percent(step.printed_change), kind="published"),
                Cell(fmt.signed(step.points, 1), kind="error"),
                ours,
                Cell(fmt.fixed(step.row.values["step_ms"], 1), kind="published"),
                Cell(fmt.percent(step.error), kind="error"),
            ]
        )
        numbers = {"step_ms": step.ours, "step_ms.published": step.row.values["step_ms"], "change_pct": step.change}
        table.raw.append({**step.row.axes, **numbers, "change_pct.published": step.printed_change})
    table.blocks.append(block)
    table.has_records = any(s.ours is not None for s in found)
    for name, errors, unit, goal in (
        ("Δ step time", [s.points for s in found if s.points is not None], " points", 3.0),
        ("Absolute step time", [s.error for s in found if s.error is not None], "%", 25.0),
    ):
        table.notes += [summary(name, errors, unit, goal, 1)] if errors else []
    made = [r for s in found[:1] for r in find(s.row.axes, "step_ms", scale, origins, "Table 1")[0].ok[:1]]
    table.notes += [
        f"Forecast for {r.get('time.forecast.gpu')} with the measured host {r.get('time.forecast.host')}"
        f" ({r.get('time.forecast.host_cpu')}), at the median of the drawn batch lengths."
        for r in made
        if r.get("time.forecast.host_cpu")
    ]
    for place in dict.fromkeys(s.place for s in found):
        members = [s for s in found if s.place == place and s.ours is not None]
        if len(members) == 4:
            table.notes.append(_order(f"{display('model', place[0])} with {display('backend', place[1])}", members))


def _order(where: str, members: list[Step]) -> str:
    by_ours, by_printed = (sorted(members, key=key) for key in (lambda s: s.ours, lambda s: s.row.values["step_ms"]))
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


def curve(data: Any) -> list[tuple[float, float]]:
    """(host speed relative to the measured host, step in ms) from ``time.forecast.host_curve``; empty if there is
    none.
    """
    points = []
    for point in data if isinstance(data, list) else []:
        if isinstance(point, dict) and isinstance(point.get("host_speed"), (int, float)):
            step = point.get("step_ms")
            if isinstance(step, (int, float)):
                points.append((float(point["host_speed"]), float(step)))
    return sorted(points)


def sensitivity(table: Table, scale: str, origins: list[Collection]) -> None:
    """Change of step time against global clipping when one constant of the time model is 20% lower and higher.

    From ``time.forecast.sensitivity``: {constant: {"low": step in ms, "high": step in ms}}.
    """
    for origin in origins:
        records = {
            (r.arm.get("model"), r.arm.get("backend"), r.arm.get("method")): r for r in origin.of("table1", scale)
        }
        moved = {key: r.get("time.forecast.sensitivity") for key, r in records.items()}
        moved = {key: value for key, value in moved.items() if isinstance(value, dict)}
        names = list(dict.fromkeys(name for value in moved.values() for name in value))
        keys = [k for k in moved if k[2] != BASE and (*k[:2], BASE) in moved]
        if not keys:
            continue
        heads = heads_of("Model", "Backend", "Method", *(n.replace("_", " ") for n in names), labels=3)
        block, last = Block(f"reference: {origin.label}" if origin.label else None, heads), None
        for key in keys:
            if key[:2] != last:
                block.groups.append(len(block.rows))
                last = key[:2]
            shifts = {n: _shift(moved[key].get(n), moved[*key[:2], BASE].get(n)) for n in names}
            labels = [Cell(display(a, v), kind="label") for a, v in zip(("model", "backend", "method"), key)]
            block.rows.append(labels + [Cell(" / ".join(fmt.percent(v) for v in shifts[n])) for n in names])
            table.raw.append(dict(zip(("model", "backend", "method"), key)) | {n: str(v) for n, v in shifts.items()})
        table.blocks.append(block)
        table.has_records = True
        table.notes.append("Δ step time against global clipping with the constant 20% lower / 20% higher.")
        return


def _shift(arm: Any, base: Any) -> list[float | None]:
    """Percent change at the low and the high end."""
    out: list[float | None] = []
    for end in ("low", "high"):
        a, b = (x.get(end) if isinstance(x, dict) else None for x in (arm, base))
        known = isinstance(a, (int, float)) and isinstance(b, (int, float)) and b
        out.append(100 * (a - b) / b if known else None)
    return out


TABLES = (
    Custom("forecast_time", "Forecast accuracy: step time of Table 1", ("table1",), ("forecast",), step_time),
    Custom("forecast_sensitivity", "Forecast step time: sensitivity", ("table1",), ("forecast",), sensitivity),
)
