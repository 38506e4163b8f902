"""How far the forecasts are from the papers: memory (peaks and savings) and step time. Nothing here is fitted."""

from __future__ import annotations

from typing import Any

from ..axes import command, display
from ..collection import Collection
from ..published import paper
from . import format as fmt
from .confront import EXPERIMENTS, Pair, find, median, rows, setup, statement_value
from .spec import Block, Cell, Custom, Header, Table

MEMORY_SOURCES = ("Table 1", "Table 3", "Table 6", "Table 8")
PEAKS = ("peak_allocated_gb", "peak_reserved_gb")


def _heads(*texts: str, labels: int) -> list[Header]:
    return [Header(t, kind="label" if i < labels else "ours") for i, t in enumerate(texts)]


def _summary(name: str, errors: list[float], unit: str, goal: float, decimals: int) -> str:
    within = sum(abs(e) <= goal for e in errors)
    worst = max(errors, key=abs)
    return (
        f"{name}: {len(errors)} printed numbers compared, median |error| {fmt.fixed(median(errors), decimals)}{unit},"
        f" largest {fmt.signed(worst, decimals)}{unit}, {within} of {len(errors)} within {fmt.fixed(goal, 1)}{unit}."
    )


def memory(table: Table, scale: str, origins: list[Collection]) -> None:
    """Forecast peaks against every printed one: Tables 1, 3, 6 and 8, and the savings of sections 5.2, 5.5 and 5.6."""
    pairs = [p for p in rows("sonar", scale, origins, MEMORY_SOURCES) if p.metric in PEAKS and not _shared(p)]
    lines: dict[tuple, dict[str, Pair]] = {}
    for p in pairs:
        lines.setdefault((p.source, p.axes["model"], p.axes["backend"], setup(p.axes)), {})[p.metric] = p
    heads = _heads("Printed in", "Model", "Backend", "Set-up", labels=4)
    for name in ("Peak alloc. GB", "Peak res. GB"):
        heads += [
            Header(name, "", "memory", "ours"),
            Header(name, "paper", "memory", "published"),
            Header(name, "error", "memory", "error"),
        ]
    block, last = Block(None, heads), None
    for (source, model, backend, what), found in lines.items():
        if source != last:
            block.groups.append(len(block.rows))
            last = source
        row = [Cell(t, kind="label") for t in (source, display("model", model), display("backend", backend), what)]
        raw: dict[str, Any] = {"source": source, "model": model, "backend": backend, "setup": what}
        for name in PEAKS:
            row += _pair_cells(found.get(name))
            pair = found.get(name)
            raw |= {
                name: pair and pair.ours,
                f"{name}.published": pair and pair.published,
                f"{name}.error_pct": pair and pair.error,
            }
        block.rows.append(row)
        table.raw.append(raw)
    table.blocks.append(block)
    table.has_records = any(p.ours is not None for p in pairs)
    table.notes.append(
        "GB = 1e9 bytes. Error: (forecast − printed) / printed. No constant is fitted to printed numbers."
    )
    for name, title in zip(PEAKS, ("Peak allocated", "Peak reserved")):
        errors = [p.error for p in pairs if p.metric == name and p.error is not None]
        if errors:
            table.notes.append(_summary(title, errors, "%", 1.0 if name == PEAKS[0] else 2.0, 2))
    _savings(table, scale, origins)
    missing = dict.fromkeys(EXPERIMENTS[p.source] for p in pairs if p.ours is None)
    table.commands += [command(name, scale, [])[0] for name in missing]  # what is recorded is not run again


def _shared(p: Pair) -> bool:
    """Table 8 prints one peak for both standard variants: it is counted once."""
    return p.source == "Table 8" and p.axes["method"] == "standard_no_expert_clip"


def _pair_cells(pair: Pair | None) -> list[Cell]:
    if pair is None:
        return [Cell(), Cell(kind="published"), Cell(kind="error")]
    ours = Cell(fmt.fixed(pair.ours, 2)) if pair.ours is not None else Cell("missing", kind="status")
    if pair.ours is None and pair.reason and not pair.reason.startswith("no "):
        ours = Cell(fmt.DASH, reasons=[pair.reason])
    if pair.origin and "reference" in pair.origin:
        ours.reasons.append(pair.origin)
    return [ours, Cell(fmt.fixed(pair.published, 2), kind="published"), Cell(fmt.percent(pair.error, 2), kind="error")]


def _savings(table: Table, scale: str, origins: list[Collection]) -> None:
    heads = _heads("Printed in", "Saving of Sonar-MoE", labels=2)
    name = "Saved GB"
    heads += [
        Header(name, "", "memory", "ours"),
        Header(name, "paper", "memory", "published"),
        Header(name, "error", "memory", "error"),
    ]
    block, errors = Block("Savings", heads, groups=[0]), []
    for s in paper("sonar").statements:
        if s.relation != "saving" or s.metric not in PEAKS:
            continue
        value, _, _ = statement_value(s, scale, origins)
        error = None if value is None else value - s.value
        errors += [error] if error is not None and s.metric == PEAKS[0] else []
        kind = "reserved" if s.metric == PEAKS[1] else "allocated"
        varied = setup({k: v for k, v in s.arm.items() if k != "method"}) or "batch 2"
        what = f"{display('model', s.arm['model'])}, {varied}, {kind}"
        ours = Cell(fmt.fixed(value, 2)) if value is not None else Cell("missing", kind="status")
        printed = [Cell(fmt.fixed(s.value, 1), kind="published"), Cell(fmt.signed(error, 2), kind="error")]
        block.rows.append([Cell(s.source, kind="label"), Cell(what, kind="label"), ours, *printed])
        table.raw.append(
            {
                "source": s.source,
                "setup": what,
                "saving_gb": value,
                "saving_gb.published": s.value,
                "saving_gb.error": error,
            }
        )
    table.blocks.append(block)
    if errors:
        table.notes.append(_summary("Saving in peak allocated", errors, " GB", 0.5, 2))


def step_time(table: Table, scale: str, origins: list[Collection]) -> None:
    """Forecast step time against the paper: Table 1's changes (in percentage points) and absolute steps (in
    percent).
    """
    heads = _heads("Model", "Backend", "Method", labels=3)
    heads += [
        Header("Δ step %", "", "time", "ours"),
        Header("Δ step %", "paper", "time", "published"),
        Header("Δ step %", "error (points)", "time", "error"),
    ]
    heads += [
        Header("Step ms", "", "time", "ours"),
        Header("Step ms", "paper", "time", "published"),
        Header("Step ms", "error", "time", "error"),
    ]
    block, points, relative = Block(None, heads), [], []
    orders: dict[tuple, list[tuple[str, float, float]]] = {}
    for row in paper("sonar").rows:
        if row.source != "Table 1":
            continue
        axes, key = row.axes, (row.axes["model"], row.axes["backend"])
        arm, _ = find(axes, "step_ms", scale, origins, "Table 1")
        base, _ = find({**axes, "method": "standard_global_clip"}, "step_ms", scale, origins, "Table 1")
        ours, against = arm.value("step_ms").mean, base.value("step_ms").mean
        printed, printed_change = row.values["step_ms"], row.changes_pct.get("step_ms")
        change = 100 * (ours - against) / against if ours and against and printed_change is not None else None
        point = None if change is None else change - printed_change
        error = None if ours is None else 100 * (ours - printed) / printed
        points += [] if point is None else [point]
        relative += [] if error is None else [error]
        if ours is not None:
            orders.setdefault(key, []).append((axes["method"], ours, printed))
        if not block.groups or block.rows[block.groups[-1]][:2] != [
            Cell(display("model", key[0]), kind="label"),
            Cell(display("backend", key[1]), kind="label"),
        ]:
            block.groups.append(len(block.rows))
        labels = [Cell(display(n, axes[n]), kind="label") for n in ("model", "backend", "method")]
        missing = Cell("missing", kind="status")
        block.rows.append(
            labels
            + [Cell(fmt.percent(change)), Cell(fmt.percent(printed_change), kind="published"), Cell(fmt.signed(point,
            1), kind="error")] + [Cell(fmt.fixed(ours, 1)) if ours is not None else missing, Cell(fmt.fixed(printed,
            1), kind="published"), Cell(fmt.percent(error), kind="error")]
        )  # fmt: skip
        table.raw.append(
            {
                **axes,
                "step_ms": ours,
                "step_ms.published": printed,
                "change_pct": change,
                "change_pct.published": printed_change,
            }
        )
    table.blocks.append(block)
    table.has_records = bool(relative)
    if points:
        table.notes.append(_summary("Δ step time", points, " points", 3.0, 1))
    if relative:
        table.notes.append(_summary("Absolute step time", relative, "%", 25.0, 1))
    for (model, backend), members in orders.items():
        if len(members) == 4:
            table.notes.append(_order_note(f"{display('model', model)} with {display('backend', backend)}", members))


def _order_note(where: str, members: list[tuple[str, float, float]]) -> str:
    ours, theirs = ([m[0] for m in sorted(members, key=lambda m: m[i])] for i in (1, 2))
    if ours == theirs:
        return f"{where}: the order of the four methods is the paper's."
    named = " < ".join(display("method", m) for m in ours)
    printed = " < ".join(display("method", m) for m in theirs)
    return f"{where}: ours {named}; the paper {printed}."


TABLES = (
    Custom("forecast_memory", "Forecast accuracy: peak memory against every printed peak",
           ("table1", "table3", "table6", "table8", "figure4"), ("forecast",), memory),
    Custom("forecast_time", "Forecast accuracy: step time of Table 1", ("table1",), ("forecast",), step_time),
)  # fmt: skip
