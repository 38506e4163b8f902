"""Why steps take as long as they do: what the paper says of its step times against the forecast, by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..axes import display
from ..collection import Collection
from ..published import paper
from . import format as fmt
from .accuracy import heads_of, triple
from .confront import EXPERIMENTS, find, setup, statement_value
from .spec import Block, Cell, Custom, Table
from .speed import curve

BASE, NO_CLIP, SONAR, PER_EXPERT = "standard_global_clip", "standard_no_expert_clip", "sonar", "sonar_per_expert"
#: Optimizer calls that per-expert hooks add to batched ones: 2EL - 2L (section 4.3).
EXTRA_CALLS = {"olmoe": 2048 - 32, "granite": 2560 - 64}
HOST_BOUND = "granite"  # "on Granite the GPU is idle for much of the step" (section 5.3)


def _step(axes: dict[str, Any], scale: str, origins: list[Collection], source: str) -> float | None:
    return find({**paper("sonar").defaults, **axes}, "step_ms", scale, origins, source)[0].value("step_ms").mean


def kernel_times(scale: str, origins: list[Collection]) -> list[tuple]:
    """Figure 3: (source, what, ours, printed, unit)."""
    out = []
    for row in (r for r in paper("sonar").rows if r.source == "Figure 3"):
        for name, printed in row.values.items():
            ours = find(row.axes, name, scale, origins, "Figure 3")[0].value(name).mean
            what = {"clipping_ms": "clipping kernels", "busy_ms": "GPU busy", "idle_ms": "GPU idle (profiled)"}[name]
            where = f"{display('model', row.axes['model'])}, {display('method', row.axes['method'])}"
            out.append((row.source, f"{where}: {what}", ours, printed, "ms"))
            if name == "busy_ms":
                out.append(_not_busy(row.axes, where, ours, printed, scale, origins))
    return out


def _not_busy(axes: dict[str, Any], where: str, busy: float | None, printed: float, scale: str, origins: Any) -> tuple:
    """What is left of the unprofiled step (Table 1) beside the GPU's busy time."""
    step, theirs = _step(axes, scale, origins, "Table 1"), paper("sonar").find("Table 1", axes).values["step_ms"]
    ours = None if step is None or busy is None else step - busy
    return ("Figure 3", f"{where}: step of Table 1 less GPU busy", ours, theirs - printed, "ms")


def calls(scale: str, origins: list[Collection]) -> list[tuple]:
    """Table 3: microseconds of one extra optimizer call, from the steps with and without them."""
    rows = [r for r in paper("sonar").rows if r.source == "Table 3"]
    steps = {(r.axes["model"], r.axes["method"]): r.values["step_ms"] for r in rows}
    out = []
    for model in EXTRA_CALLS:
        one, batched = (_step({"model": model, "method": m}, scale, origins, "Table 3") for m in (PER_EXPERT, SONAR))
        ours = None if one is None or batched is None else 1e3 * (one - batched) / EXTRA_CALLS[model]
        printed = 1e3 * (steps[model, PER_EXPERT] - steps[model, SONAR]) / EXTRA_CALLS[model]
        out.append(("Table 3", f"{display('model', model)}: an extra optimizer call", ours, printed, "µs"))
    return out


def updates(scale: str, origins: list[Collection]) -> list[tuple]:
    """Table 8: what a micro-batch adds to Sonar beyond what it adds to standard training, and the printed slowdowns."""
    out = []
    printed_rows = {(r.axes["method"], r.axes["accumulation"]): r for r in paper("sonar").rows if r.source == "Table 8"}
    for count in (2, 4, 8):
        ours = {m: _step({"model": "olmoe", "method": m, "accumulation": count}, scale, origins, "Table 8")
                for m in (BASE, NO_CLIP, SONAR)}  # fmt: skip
        theirs = {m: printed_rows[m, count].values["step_ms"] for m in ours}
        known = all(v is not None for v in ours.values())
        per_update = [(t[SONAR] - t[NO_CLIP]) / (count - 1) for t in ((ours,) if known else ()) + (theirs,)]
        slower = [100 * (t[SONAR] / t[BASE] - 1) for t in ((ours,) if known else ()) + (theirs,)]
        for label, found, unit in (("an extra update", per_update, "ms"), ("Sonar against global clip", slower, "%")):
            out.append(("Table 8", f"A = {count}: {label}", found[0] if known else None, found[-1], unit))
    return out


def batches(scale: str, origins: list[Collection]) -> list[tuple]:
    """Figure 4 and section 5.5: printed changes and costs over the batch size."""
    out = []
    for s in paper("sonar").statements:
        if s.metric != "step_ms" or s.source != "§5.5" or s.arm.get("checkpointing"):
            continue
        ours = statement_value(s, scale, origins)[0]
        relation = "clipping expert gradients costs" if s.relation == "saving" else None
        relation = relation or f"{display('method', s.arm['method'])} against {display('method', s.against['method'])}"
        unit = "ms" if s.relation == "saving" else "%"
        out.append((s.source, f"{setup({**s.arm, 'method': None}) or 'batch 2'}: {relation}", ours, s.value, unit))
    return out


def crossings(scale: str, origins: list[Collection]) -> list[tuple]:
    """At which host speed (1: the host measured) a model that is bound by its host would show the printed change."""
    out = []
    for row in (r for r in paper("sonar").rows if r.source == "Table 1" and r.axes["model"] == HOST_BOUND):
        if "step_ms" not in row.changes_pct:
            continue
        curves = [
            curve(r.get("time.forecast.host_curve"))
            for axes in (row.axes, {**row.axes, "method": BASE})
            for r in find(axes, "step_ms", scale, origins, "Table 1")[0].ok[:1]
        ]
        if len(curves) == 2 and all(curves):
            changes = [(x, 100 * (y / dict(curves[1])[x] - 1)) for x, y in curves[0] if x in dict(curves[1])]
            where = f"{display('backend', row.axes['backend'])}, {display('method', row.axes['method'])}"
            out.append((where, row.changes_pct["step_ms"], changes, crossing(changes, row.changes_pct["step_ms"])))
    return out


def crossing(points: Sequence[tuple[float, float]], wanted: float) -> list[float]:
    """Host speeds at which a curve takes the wanted value, linear between its points."""
    found = []
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if y0 != y1 and (y0 - wanted) * (y1 - wanted) <= 0:
            found.append(x0 + (x1 - x0) * (wanted - y0) / (y1 - y0))
    return list(dict.fromkeys(round(x, 3) for x in found))


def mechanisms(table: Table, scale: str, origins: list[Collection]) -> None:
    """Printed numbers that explain step times, ours beside them, and the host speeds at which Granite's would hold."""
    heads = heads_of("Printed in", "Quantity", "Unit", labels=3) + triple("Forecast", "time", "absolute")
    block, last = Block(None, heads), None
    for make in (kernel_times, calls, updates, batches):
        for source, what, ours, printed, unit in make(scale, origins):
            if source != last:
                block.groups.append(len(block.rows))
                last = source
            block.rows.append(_row(source, what, ours, printed, unit))
            low, high = printed if isinstance(printed, (list, tuple)) else (printed, printed)
            numbers = {"ours": ours, "published.low": low, "published.high": high}
            table.raw.append({"source": source, "quantity": what, "unit": unit, **numbers})
            table.has_records = table.has_records or ours is not None
    table.blocks.append(block)
    _hosts(table, crossings(scale, origins))
    missing = {row[0].text for row in block.rows if row[3].text == "missing"}
    table.commands += [f"python -m sonar_repro +experiment={e} scale={scale}" for e in
                       dict.fromkeys(EXPERIMENTS.get(m, "figure3") for m in sorted(missing))]  # fmt: skip
    table.notes += [
        "The paper's idle times come from a profiled step, which the profiler slows; ours from the schedule.",
        "An extra update is (Sonar − no expert clip) / (A − 1): AdamW over the experts less the gradient"
        " accumulation that Sonar does not do.",
    ]


def _row(source: str, what: str, ours: float | None, printed: Any, unit: str) -> list[Cell]:
    if isinstance(printed, (list, tuple)):
        low, high = printed
        text = f"{fmt.fixed(low, 1)} to {fmt.fixed(high, 1)}"
        error = None if ours is None else min(ours - low, 0.0) + max(ours - high, 0.0)
    else:
        text, error = fmt.fixed(printed, 1), None if ours is None else ours - printed
    value = Cell(fmt.fixed(ours, 1)) if ours is not None else Cell("missing", kind="status")
    labels = [Cell(t, kind="label") for t in (source, what, unit)]
    return [*labels, value, Cell(text, kind="published"), Cell(fmt.signed(error, 1), kind="error")]


def _hosts(table: Table, found: list[tuple]) -> None:
    if not found:
        return
    shown = [x for x, _ in found[0][2]][::2]
    speeds = [f"×{x:.2g}" for x in shown]
    heads = heads_of("Granite", *speeds, "Paper", "Holds at", labels=1)
    block = Block("Δ step time against global clip, in percent, over the host's speed (1: the host measured)", heads)
    for where, printed, changes, at in found:
        cells = [Cell(fmt.percent(y)) for x, y in changes if x in shown]
        holds = " and ".join(dict.fromkeys(f"×{x:.2f}" for x in at)) or "no speed shown"
        block.rows.append(
            [Cell(where, kind="label"), *cells, Cell(fmt.percent(printed), kind="published"), Cell(holds)]
        )
        table.raw.append({"host_curve": where, **{f"x{x:.2g}": y for x, y in changes}, "holds_at": holds})
    table.blocks.append(block)
    table.notes.append("No host is picked to fit: the paper does not name its host's speed.")


TABLES = (
    Custom(
        "forecast_mechanisms",
        "Forecast accuracy: what explains the step times",
        ("table1", "table3", "table8", "figure3", "figure4"),
        ("forecast",),
        mechanisms,
    ),
)
