"""How far the memory forecasts are from the papers: peaks and savings. Nothing here is fitted."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from .. import format as fmt
from ..axes import command, display
from ..collection import Collection
from ..published import paper
from .coverage import Pair, rows, setup, statement_value
from .spec import Cell, Custom, Field, Table, labels, triple

MEMORY_SOURCES = ("Table 1", "Table 3", "Table 6", "Table 8")
PEAKS = {"peak_allocated_gb": "Peak allocated", "peak_reserved_gb": "Peak reserved"}


def summary(name: str, errors: Sequence[float], unit: str, goal: float, decimals: int, distinct: int = 0) -> str:
    """How many compared, the median and the largest error, how many within the goal.

    ``distinct`` is how many forecasts they are: several tables print the peak of one arm.
    """
    within = sum(abs(e) <= goal for e in errors)
    worst = max(errors, key=abs)
    middle = median(abs(e) for e in errors)
    several = f" ({distinct} distinct forecasts)" if 0 < distinct < len(errors) else ""
    return (
        f"{name}: {len(errors)} printed numbers compared{several}, median |error| {fmt.fixed(middle, decimals)}{unit},"
        f" largest {fmt.signed(worst, decimals)}{unit}, {within} of {len(errors)} within {fmt.fixed(goal, 1)}{unit}."
    )


def memory(table: Table, scale: str, origins: list[Collection]) -> None:
    """Forecast peaks against every printed one: Tables 1, 3, 6 and 8, and the savings of sections 5.2, 5.5 and 5.6."""
    pairs = [p for p in rows("sonar", scale, origins, MEMORY_SOURCES) if p.metric in PEAKS and not _shared(p)]
    lines: dict[tuple, dict[str, Any]] = {}
    for p in pairs:
        key = (p.source, p.axes["model"], p.axes["backend"], setup(p.axes))
        row = lines.setdefault(key, {**dict(zip(("source", "model", "backend", "setup"), key)), "cells": {}})
        row |= {p.metric: p.ours, f"{p.metric}.published": p.published, f"{p.metric}.error_pct": p.error}
        row["cells"][p.metric] = _ours(p)
    fields = labels(source="Printed in", model="Model", backend="Backend", setup="Set-up")
    fields += triple("peak_allocated_gb", "Peak alloc. GB", 2) + triple("peak_reserved_gb", "Peak res. GB", 2)
    empty = {f.key: None for f in fields}  # every row has every key, in the order of the columns
    table.add(None, fields, [{**empty, **row} for row in lines.values()], group=("source",))
    table.has_records = any(p.ours is not None for p in pairs)
    table.notes.append(
        "GB = 1e9 bytes. Error: (forecast − printed) / printed. No constant is fitted to printed numbers."
    )
    for name, title in PEAKS.items():
        known = [p for p in pairs if p.metric == name and p.error is not None]
        if known:
            distinct = len({repr(sorted(p.axes.items(), key=str)) for p in known})
            errors = [p.error for p in known if p.error is not None]
            table.notes.append(summary(title, errors, "%", 1.0 if name == "peak_allocated_gb" else 2.0, 2, distinct))
    _savings(table, scale, origins)
    experiments = paper("sonar").experiments
    missing = dict.fromkeys(experiments[p.source] for p in pairs if p.ours is None)
    table.commands += [command(name, scale, [])[0] for name in missing]  # what is recorded is not run again


def _shared(p: Pair) -> bool:
    """Table 8 prints one peak for both standard variants: it is counted once."""
    return p.source == "Table 8" and p.axes["method"] == "standard_no_expert_clip"


def _ours(pair: Pair) -> Cell:
    if pair.ours is not None:
        origin = [pair.origin] if pair.origin and "reference" in pair.origin else []
        return Cell(fmt.fixed(pair.ours, 2), reasons=origin)
    if pair.reason and not pair.reason.startswith("no "):
        return Cell(reasons=[pair.reason])
    return Cell("missing", kind="status")


def _savings(table: Table, scale: str, origins: list[Collection]) -> None:
    book = paper("sonar")
    made: list[dict[str, Any]] = []
    printed = [s for s in book.statements if s.relation == "saving" and s.metric in PEAKS]
    for s in sorted(printed, key=lambda s: s.source not in book.experiments):  # those of Table 1's arms come last
        value, _ = statement_value(s, scale, origins)
        varied = setup({k: v for k, v in s.arm.items() if k != "method"}) or "batch 2"
        kind = PEAKS[s.metric].split()[1]
        row: dict[str, Any] = {"source": s.source, "setup": f"{display('model', s.arm['model'])}, {varied}, {kind}"}
        row |= {"saving_gb": value, "saving_gb.published": s.value}
        row |= {"saving_gb.error": None if value is None else value - s.value, "_allocated": kind == "allocated"}
        missing = {"saving_gb": Cell("missing", kind="status")} if value is None else {}
        made.append({**row, "cells": missing})
    fields = labels(source="Printed in", setup="Saving of Sonar-MoE") + triple("saving_gb", "Saved GB", 2)
    fields[-2] = Field("saving_gb.published", "Saved GB", "published", lambda v: fmt.fixed(v, 1), "paper")
    fields[-1] = Field("saving_gb.error", "Saved GB", "error", lambda v: fmt.signed(v, 2), "error")
    table.add("Savings", fields, made)
    errors = [r["saving_gb.error"] for r in made if r["_allocated"] and r["saving_gb.error"] is not None]
    if errors:
        table.notes.append(summary("Saving in peak allocated", errors, " GB", 0.5, 2))


TABLES = (
    Custom(
        "forecast_memory",
        "Forecast accuracy: peak memory against every printed peak",
        ("table1", "table3", "table6", "table8", "figure4"),
        ("forecast",),
        memory,
    ),
)
