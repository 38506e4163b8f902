"""Why steps take as long as they do: what the paper says of its step times against the forecast, by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import format as fmt
from ..axes import command, display
from ..collection import Collection
from ..published import paper
from .coverage import find, setup, statement_value
from .forecast_time import curve
from .spec import Cell, Custom, Field, Table, labels, number, triple

BASE, NO_CLIP, SONAR, PER_EXPERT = "standard_global_clip", "standard_no_expert_clip", "sonar", "sonar_per_expert"
HOST_BOUND = "granite"  # "on Granite the GPU is idle for much of the step" (section 5.3)
DIVIDED = "Our division of the printed step times: the paper prints about 12 µs for OLMoE and none for Granite."
Line = tuple[str, str, float | None, Any, str]  # source, what, ours, printed, unit


def _step(axes: dict[str, Any], scale: str, origins: list[Collection], source: str) -> float | None:
    return find({**paper("sonar").defaults, **axes}, "step_ms", scale, origins, source)[0].value("step_ms").mean


def kernel_times(scale: str, origins: list[Collection]) -> list[Line]:
    """Figure 3: (source, what, ours, printed, unit)."""
    out: list[Line] = []
    for row in (r for r in paper("sonar").rows if r.source == "Figure 3"):
        for name, printed in row.values.items():
            ours = find(row.axes, name, scale, origins, "Figure 3")[0].value(name).mean
            what = {"clipping_ms": "clipping kernels", "busy_ms": "GPU busy", "idle_ms": "GPU idle (profiled)"}[name]
            where = f"{display('model', row.axes['model'])}, {display('method', row.axes['method'])}"
            out.append((row.source, f"{where}: {what}", ours, printed, "ms"))
            if name == "busy_ms":
                out.append(_not_busy(row.axes, where, ours, printed, scale, origins))
    return out


def _not_busy(axes: dict[str, Any], where: str, busy: float | None, printed: float, scale: str, origins: Any) -> Line:
    """What is left of the unprofiled step (Table 1) beside the GPU's busy time."""
    row = paper("sonar").find("Table 1", axes)
    step, theirs = _step(axes, scale, origins, "Table 1"), row.values["step_ms"] if row else 0.0
    ours = None if step is None or busy is None else step - busy
    return ("Figure 3", f"{where}: step of Table 1 less GPU busy", ours, theirs - printed, "ms")


def calls(scale: str, origins: list[Collection]) -> list[Line]:
    """Table 3: microseconds of one extra optimizer call, from the steps with and without them."""
    rows = {(r.axes["model"], r.axes["method"]): r.values for r in paper("sonar").rows if r.source == "Table 3"}
    out: list[Line] = []
    for model in dict.fromkeys(model for model, _ in rows):
        one, batched = (_step({"model": model, "method": m}, scale, origins, "Table 3") for m in (PER_EXPERT, SONAR))
        single, whole = rows[model, PER_EXPERT], rows[model, SONAR]
        extra = single["expert_optimizer_calls"] - whole["expert_optimizer_calls"]  # 2EL - 2L (section 4.3)
        ours = None if one is None or batched is None else 1e3 * (one - batched) / extra
        printed = 1e3 * (single["step_ms"] - whole["step_ms"]) / extra
        out.append(("Table 3", f"{display('model', model)}: an extra optimizer call", ours, printed, "µs"))
    return out


def updates(scale: str, origins: list[Collection]) -> list[Line]:
    """Table 8: what a micro-batch adds to Sonar beyond what it adds to standard training, and the printed slowdowns."""
    out: list[Line] = []
    printed_rows = {(r.axes["method"], r.axes["accumulation"]): r for r in paper("sonar").rows if r.source == "Table 8"}
    for count in (2, 4, 8):
        arms = {m: {"model": "olmoe", "method": m, "accumulation": count} for m in (BASE, NO_CLIP, SONAR)}
        ours = {m: _step(axes, scale, origins, "Table 8") for m, axes in arms.items()}
        theirs = {m: printed_rows[m, count].values["step_ms"] for m in ours}
        known = {m: v for m, v in ours.items() if v is not None}
        for label, derived, unit in (
            ("an extra update", lambda t, more=count - 1: (t[SONAR] - t[NO_CLIP]) / more, "ms"),
            ("Sonar against global clip", lambda t, _=0: 100 * (t[SONAR] / t[BASE] - 1), "%"),
        ):
            value = derived(known) if len(known) == len(ours) else None
            out.append(("Table 8", f"A = {count}: {label}", value, derived(theirs), unit))
    return out


def batches(scale: str, origins: list[Collection]) -> list[Line]:
    """Figure 4 and section 5.5: printed changes and costs over the batch size."""
    out: list[Line] = []
    for s in paper("sonar").statements:
        if s.metric != "step_ms" or s.source != "§5.5" or s.arm.get("checkpointing") or s.against is None:
            continue
        ours, _ = statement_value(s, scale, origins)
        compared = f"{display('method', s.arm['method'])} against {display('method', s.against['method'])}"
        costs = s.relation == "saving"
        relation, unit = ("clipping expert gradients costs", "ms") if costs else (compared, "%")
        what = f"{setup({**s.arm, 'method': None}) or 'batch 2'}: {relation}"
        out.append((s.source, what, ours, s.value, unit))
    return out


def crossings(scale: str, origins: list[Collection]) -> list[tuple]:
    """At which host speed (1: the host measured) a model that is bound by its host would show the printed change."""
    out = []
    for row in (r for r in paper("sonar").rows if r.source == "Table 1" and r.axes["model"] == HOST_BOUND):
        if "step_ms" not in row.changes_pct:
            continue
        curves = [
            curve(r)
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
    made = []
    for make in (kernel_times, calls, updates, batches):
        for source, what, ours, printed, unit in make(scale, origins):
            low, high = printed if isinstance(printed, (list, tuple)) else (printed, printed)
            beyond = None if ours is None else min(ours - low, 0.0) + max(ours - high, 0.0)
            row = {"source": source, "quantity": what, "unit": unit, "ours": ours, "published.low": low}
            row |= {"published.high": high, "_printed": printed, "_error": beyond}
            row["cells"] = {"ours": Cell("missing", kind="status")} if ours is None else {}
            if make is calls:
                row["cells"]["_printed"] = Cell(number(1)(printed), kind="published", reasons=[DIVIDED])
            made.append(row)
    fields = labels(source="Printed in", quantity="Quantity", unit="Unit")
    fields += triple("ours", "Forecast", 1, panel="time")
    fields[-2] = Field("_printed", "Forecast", "published", number(1), "paper", "time")
    fields[-1] = Field("_error", "Forecast", "error", lambda v: fmt.signed(v, 1), "error (absolute)", "time")
    table.add(None, fields, made, group=("source",))
    table.has_records = any(row["ours"] is not None for row in made)
    _hosts(table, crossings(scale, origins))
    experiments = paper("sonar").experiments
    missing = dict.fromkeys(experiments.get(row["source"], "figure3") for row in made if row["ours"] is None)
    table.commands += [command(name, scale, [])[0] for name in sorted(missing)]
    table.notes += [
        "The paper's idle times come from a profiled step, which the profiler slows; ours from the schedule.",
        "An extra update is (Sonar − no expert clip) / (A − 1): AdamW over the experts less the gradient"
        " accumulation that Sonar does not do.",
    ]


def _hosts(table: Table, found: list[tuple]) -> None:
    if not found:
        return
    made = []
    for where, printed, changes, at in found:
        holds = " and ".join(dict.fromkeys(f"×{x:.2f}" for x in at)) or "no speed shown"
        made.append({"host_curve": where, **{f"x{x:.2g}": y for x, y in changes}, "holds_at": holds, "_paper": printed})
    fields = labels(host_curve="Granite")
    fields += [Field(f"x{x:.2g}", f"×{x:.2g}", show=fmt.percent) for x, _ in found[0][2][::2]]
    fields += [Field("_paper", "Paper", show=fmt.percent), Field("holds_at", "Holds at")]
    table.add("Δ step time against global clip, in percent, over the host's speed (1: the host measured)", fields, made)
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
