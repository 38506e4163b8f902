"""Sentences computed under a table: what the paper's text derives from it, ours beside the printed number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..axes import display
from . import format as fmt

if TYPE_CHECKING:
    from .build import Remarks

G, N, SONAR, PER_EXPERT = "standard_global_clip", "standard_no_expert_clip", "sonar", "sonar_per_expert"


def _paper(seen: Remarks, name: str, unit: str = "", decimals: int = 1) -> str:
    """The printed number in brackets; nothing at smoke scale is said to be comparable, so it is only called the
    paper's.
    """
    value = seen.paper.statement(name).value if seen.paper else None
    if value is None:
        return ""
    text = " to ".join(fmt.fixed(v, decimals) for v in value) if isinstance(value, list) else fmt.fixed(value, decimals)
    return f" (paper: {text}{unit})"


def _fixed(seen: Remarks, *drop: str) -> list[dict[str, Any]]:
    """Axes of the block's rows without some of them, each once."""
    found = {
        tuple((k, v) for k, v in line.axes.items() if k not in drop): line for line in seen.lines if not line.extra
    }
    return [dict(key) for key in found]


def cost_per_call(seen: Remarks) -> list[str]:
    """Table 3, section 5.3: (per-expert step − batched step) over the extra optimizer calls, in µs."""
    out = []
    for axes in _fixed(seen, "method"):
        batched, single = ({**axes, "method": m} for m in (SONAR, PER_EXPERT))
        steps = [seen.value(a, "step_ms") for a in (batched, single)]
        calls = [seen.value(a, "expert_optimizer_calls") for a in (batched, single)]
        if None in steps or None in calls or calls[0] == calls[1]:
            continue
        extra = calls[1] - calls[0]
        cost = 1e3 * (steps[1] - steps[0]) / extra
        printed = (
            _paper(seen, f"per_call_{axes['model']}", " µs") if f"per_call_{axes['model']}" in _statements(seen) else ""
        )
        out.append(
            f"{display('model', axes['model'], seen.scale)}: an extra optimizer call costs {fmt.fixed(cost, 1)} µs"
            f" ({fmt.signed(steps[1] - steps[0], 1)} ms over {fmt.fixed(extra, 0)} calls){printed}."
        )
    return out


def _statements(seen: Remarks) -> set[str]:
    return {s.name for s in seen.paper.statements} if seen.paper else set()


def accumulation(seen: Remarks) -> list[str]:
    """Table 8, section 5.6: slower by 5 / 23 / 35%, an update about 37 ms, still saving 12.9 GB."""
    out = []
    for line in seen.lines:
        a = line.axes["accumulation"]
        g, n, s = (seen.value({**line.axes, "method": m}, "step_ms") for m in (G, N, SONAR))
        peak, sonar_peak = (seen.value({**line.axes, "method": m}, "peak_allocated_gb") for m in (G, SONAR))
        parts = []
        if a > 1 and g and s:
            parts.append(
                f"Sonar-MoE's step takes {fmt.percent(100 * (s - g) / g)}{_paper(seen, f'slowdown_A{a}', '%', 0)}"
            )
        if a > 1 and n and s:
            each = (s - n) / (a - 1)
            parts.append(f"{fmt.fixed(each, 1)} ms an extra update{_paper(seen, 'update_cost', ' ms', 0)}")
        if a > 1 and peak and sonar_peak and seen.scale != "smoke":
            parts.append(f"saves {fmt.fixed(peak - sonar_peak, 2)} GB{_paper(seen, f'saving_A{a}', ' GB')}")
        if parts:
            out.append(f"A = {a}: " + "; ".join(parts) + ".")
    return out


def batch_sizes(seen: Remarks) -> list[str]:
    """Section 5.5: what Sonar-MoE saves and what clipping costs at each batch size."""
    out = []
    known = _statements(seen)
    for axes in _fixed(seen, "method"):
        size = axes["batch_size"]
        arms = {m: {**axes, "method": m} for m in (G, N, SONAR)}
        peak, sonar_peak = (seen.value(arms[m], "peak_allocated_gb") for m in (G, SONAR))
        g, n, s = (seen.value(arms[m], "step_ms") for m in (G, N, SONAR))
        parts = []
        if peak and sonar_peak:
            printed = (
                _paper(seen, f"saving_bs{size}", " GB") if seen.scale != "smoke" and f"saving_bs{size}" in known else ""
            )
            saved = peak - sonar_peak
            parts.append(f"saves {fmt.fixed(saved, fmt.decimals_for([saved], 2))} GB{printed}")
        if g and n:
            parts.append(
                f"clipping expert gradients costs {fmt.fixed(g - n, 1)} ms"
                + _printed_time(seen, f"clip_cost_bs{size}", " ms", 0)
            )
        if s and n:
            name = f"same_rule_bs{size}"
            parts.append(
                f"step time against no expert clip {fmt.percent(100 * (s - n) / n)}" + _printed_time(seen, name, "%")
            )
        if parts:
            out.append(f"Batch {size}: " + "; ".join(parts) + ".")
    return out


def _printed_time(seen: Remarks, name: str, unit: str, decimals: int = 1) -> str:
    return _paper(seen, name, unit, decimals) if seen.scale != "smoke" and name in _statements(seen) else ""


def loss_gaps(seen: Remarks) -> list[str]:
    """Table 7: difference of held-out loss to standard training with AdamW."""
    out = []
    for axes in _fixed(seen, "method", "optimizer"):
        base = {**axes, "method": G, "optimizer": "adamw"}
        reference = seen.value(base, "heldout_loss")
        for line in seen.lines:
            value = seen.value(line.axes, "heldout_loss")
            if reference is None or value is None or line.axes == base or line.extra:
                continue
            name = f"{display('optimizer', line.axes['optimizer'])}, {display('method', line.axes['method'])}"
            out.append(
                f"{name}: {fmt.signed(value - reference, 4)} against standard AdamW (the paper stays within 0.003)."
            )
    return out


def standard_errors(seen: Remarks) -> list[str]:
    """Table 2: our standard errors by task, where the records hold them."""
    found: dict[str, set[str]] = {}
    for line in seen.lines:
        for arm in line.arms.values():
            for record in arm.ok:
                for task, result in (record.get("downstream.tasks") or {}).items():
                    error = result.get("stderr") if isinstance(result, dict) else None
                    if isinstance(error, (int, float)):
                        found.setdefault(task, set()).add(fmt.fixed(error, 3))
    return (
        ["Our standard errors: " + "; ".join(f"{t} {' / '.join(sorted(v))}" for t, v in found.items()) + "."]
        if found
        else []
    )
