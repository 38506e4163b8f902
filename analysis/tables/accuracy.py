"""How far the memory forecasts are from the papers: peaks and savings. Nothing here is fitted."""

from __future__ import annotations

from typing import Any

from ..axes import command, display
from ..collection import Collection
from ..published import paper
from . import format as fmt
from .confront import EXPERIMENTS, Pair, median, rows, setup, statement_value
from .spec import Block, Cell, Custom, Header, Table

MEMORY_SOURCES = ("Table 1", "Table 3", "Table 6", "Table 8")
PEAKS = ("peak_allocated_gb", "peak_reserved_gb")


def heads_of(*texts: str, labels: int) -> list[Header]:
    """Plain headings, the first ``labels`` of them row labels."""
    return [Header(t, kind="label" if i < labels else "ours") for i, t in enumerate(texts)]


def triple(name: str, panel: str, error: str = "") -> list[Header]:
    """Headings of one quantity: ours, the paper's, the error (in ``error``, if it is not a percentage)."""
    said = f"error ({error})" if error else "error"
    kinds = (("", "ours"), ("paper", "published"), (said, "error"))
    return [Header(name, sub, panel, kind) for sub, kind in kinds]


def summary(name: str, errors: list[float], unit: str, goal: float, decimals: int) -> str:
    """How many compared, the median and the largest error, how many within the goal."""
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
    heads = heads_of("Printed in", "Model", "Backend", "Set-up", labels=4)
    heads += triple("Peak alloc. GB", "memory") + triple("Peak res. GB", "memory")
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
            table.notes.append(summary(title, errors, "%", 1.0 if name == PEAKS[0] else 2.0, 2))
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
    heads = heads_of("Printed in", "Saving of Sonar-MoE", labels=2)
    heads += triple("Saved GB", "memory")
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
