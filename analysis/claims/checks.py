"""Checks behind the Sonar-MoE claims: each takes a :class:`Look` and returns (holds, figures).

Slack: half a unit of the last printed digit for rounded percentages, 1.4% for "as fast as" (the paper's own same-seed
noise, section 5.1), 0.5 GB for savings. Where a sentence has no number, the threshold stands in its check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..axes import display
from ..tables import format as fmt
from ..tables.sonar import COMPARISONS
from .base import Look, Missing, within

G, N, ALL = "standard_global_clip", "standard_no_expert_clip", "optimizer_in_backward"
SONAR, PER_EXPERT = "sonar", "sonar_per_expert"
MODELS, BACKENDS = ("olmoe", "granite"), ("sonicmoe", "scattermoe")
NOISE = 1.4  # percent of step time, section 5.1
GRID = [{"model": m, "backend": b} for m in MODELS for b in BACKENDS]
RAN = {"ok": "runs", "oom": "runs out of memory"}
Check = Callable[[Look], tuple[bool, str]]


def pairs(arm: str, base: str, grid: list[dict[str, Any]] = GRID) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(arm, base) axes for each model and backend of the grid."""
    return [({**axes, "method": arm}, {**axes, "method": base}) for axes in grid]


def sonic(*models: str) -> list[dict[str, Any]]:
    """Axes of the SonicMoE backend for some models, or for both."""
    return [{"model": m, "backend": "sonicmoe"} for m in models or MODELS]


def expert_share(look: Look) -> tuple[bool, str]:
    arm = look.arm(method=G)
    expert, total = look.value(arm, "expert_parameters"), look.value(arm, "parameters")
    holds = within(expert, 6.44e9, 6.44e9, 5e6) and within(total, 6.92e9, 6.92e9, 5e6)
    return holds, f"{fmt.count(expert)} of {fmt.count(total)} parameters"


def floor(look: Look) -> tuple[bool, str]:
    a, b = (look.value(look.arm(model=m, method=G), "m_floor_gb") for m in MODELS)
    return within(a, 12.9, 12.9, 0.05) and within(b, 6.0, 6.0, 0.05), f"{a:.2f} GB and {b:.2f} GB"


def floor_bound(look: Look) -> tuple[bool, str]:
    """At most one layer: the bound equals M_floor / L, and a timeline (if recorded) stays under it."""
    arm = look.arm(method=SONAR)
    whole, bound = look.value(arm, "m_floor_gb"), look.value(arm, "m_floor_bound_gb")
    layers = next(iter(arm.ok)).number("model.layers")
    figures = f"M_floor {whole:.3g} GB, one layer {bound:.3g} GB"
    holds = bool(layers) and abs(bound - whole / layers) <= 1e-6 * whole
    peak = _timeline_peak(look)
    if peak is not None:
        figures += f"; expert gradients in the timeline at most {peak:.3g} GB"
        holds = holds and peak <= bound * 1.001
    return holds, figures


def _timeline_peak(look: Look) -> float | None:
    from ..figures.timeline import parse  # numpy is loaded only if there is a timeline

    for r in look.records(lambda r: r.arm.get("method") == SONAR and r.data.get("timeline") is not None):
        found = parse(r.data["timeline"])
        if found and "expert_gradients" in found.owners:
            return float(found.live[found.owners.index("expert_gradients")].max()) / 1e9
    return None


def buffer_minus_layer(look: Look) -> tuple[bool, str]:
    out, holds = [], True
    for model in MODELS:
        base, arm = look.arm(model=model, method=G), look.arm(model=model, method=SONAR)
        saved = look.value(base, "peak_allocated_gb") - look.value(arm, "peak_allocated_gb")
        predicted = look.value(arm, "m_floor_gb") - look.value(arm, "m_floor_bound_gb")
        holds = holds and abs(saved - predicted) <= 0.03 * predicted
        out.append(f"{model} {saved:.2f} GB saved, {predicted:.2f} GB predicted")
    return holds, "; ".join(out)


def losses(look: Look) -> tuple[bool, str]:
    worst = []
    for axes in GRID:
        sonar = look.value(look.arm(**axes, method=SONAR), "heldout_loss")
        others = [look.value(look.arm(**axes, method=m), "heldout_loss") for m in (G, N, ALL)]
        worst.append(max(abs(sonar - o) for o in others))
    return max(worst) <= 0.003, "largest gap " + ", ".join(fmt.fixed(w, 4) for w in worst)


def calls(look: Look) -> tuple[bool, str]:
    """2L and 2EL from the record's own layers and experts; at full size also the printed counts."""
    out, holds = [], True
    printed = {"olmoe": (32, 2048), "granite": (64, 2560)}
    for model in MODELS:
        for method, which in ((SONAR, 0), (PER_EXPERT, 1)):
            arm = look.arm(model=model, method=method)
            found = look.value(arm, "expert_optimizer_calls")
            record = arm.ok[0]
            layers, experts = record.number("model.layers"), record.number("model.experts")
            if not layers or not experts:
                raise Missing(f"layers and experts of {model}")
            expected = 2 * layers * (experts if which else 1)
            holds = holds and found == expected and (look.scale == "smoke" or found == printed[model][which])
            out.append(f"{model} {'per-expert' if which else 'batched'} {found:g}")
    return holds, "; ".join(out)


def same_order(look: Look) -> tuple[bool, str]:
    """One data hash for each seed over all records of Table 1 on one model."""
    found: dict[tuple, set[str]] = {}
    for r in look.records(lambda r: r.experiment == "table1" and r.get("data.sha256")):
        found.setdefault((r.arm.get("model"), r.seed), set()).add(r.get("data.sha256"))
    if not found:
        raise Missing("data hashes of Table 1")
    look.sources.add("measured")
    return all(
        len(v) == 1 for v in found.values()
    ), f"{len(found)} groups of arms, {sum(map(len, found.values()))} hashes"


def same_seed_noise(look: Look) -> tuple[bool, str]:
    step, loss = [], []
    arms = [look.arm(**axes, method=m) for axes in GRID for m in (G, N, ALL, SONAR)]
    for arm in arms:
        for other in arm.repeats:
            first = arm.by_seed[other.seed]
            a, b = first.number("time.median_s"), other.number("time.median_s")
            c, d = first.number("loss.heldout"), other.number("loss.heldout")
            step += [abs(a - b) / a * 100] if a and b else []
            loss += [abs(c - d)] if c is not None and d is not None else []
    if not step or not loss:
        raise Missing("two runs of one arm with one seed")
    look.sources.add("measured")
    return max(step) <= 1.4 and max(
        loss
    ) <= 0.0016, f"at most {max(step):.1f}% in step time and {max(loss):.4f} in loss"


def compared(*names: str) -> Check:
    """Zero expert weights differ in each of the named comparisons; other weights at most by the printed noise of 6."""

    def check(look: Look) -> tuple[bool, str]:
        out, holds = [], True
        for name in names:
            arm = look.bare(method=name, task="compare_weights")
            expert, other = look.value(arm, "expert_differ"), look.value(arm, "other_differ")
            holds = holds and expert == 0 and other <= (0 if look.scale == "smoke" else 6)
            out.append(f"{COMPARISONS[name]}: {expert:g} expert, {other:g} other")
        return holds, "; ".join(out)

    return check


def clip_changes_weights(look: Look) -> tuple[bool, str]:
    arm = look.bare(method="standard_global_clip_vs_standard_no_expert_clip", task="compare_weights")
    shares = [100 * look.value(arm, f"{k}_differ") / look.value(arm, f"{k}_total") for k in ("expert", "other")]
    return within(shares[0], 47, 47, 5) and within(
        shares[1], 19, 19, 5
    ), f"{shares[0]:.0f}% expert, {shares[1]:.0f}% other"


def clip_changes_loss(look: Look) -> tuple[bool, str]:
    gap = look.value(look.arm(method=N), "heldout_loss") - look.value(look.arm(method=G), "heldout_loss")
    return abs(gap) <= 0.0014 + 0.0016, f"{fmt.signed(gap, 4)} (printed +0.0014, same-seed noise 0.0016)"


def shares_changed(look: Look) -> tuple[bool, str]:
    found = {
        (m, k): look.value(look.arm(method=m), f"{k}_changed_pct") for m in (G, SONAR) for k in ("expert", "other")
    }
    same = all(abs(found[G, k] - found[SONAR, k]) <= 0.2 for k in ("expert", "other"))
    text = "; ".join(f"{'standard' if m == G else 'Sonar'} {k} {v:.1f}%" for (m, k), v in found.items())
    return same and all(v < 50 for v in found.values()), text


def downstream(look: Look) -> tuple[bool, str]:
    tasks = ("arc_challenge", "hellaswag", "mmlu")
    found = {
        c: [look.value(look.bare(model="olmoe", task="downstream", method=c), t) for t in tasks]
        for c in ("start", G, SONAR)
    }
    gains = [100 * (found[c][0] - found["start"][0]) for c in (G, SONAR)]
    others = [abs(found[c][i] - found["start"][i]) for c in (G, SONAR) for i in (1, 2)]
    apart = [abs(found[G][i] - found[SONAR][i]) for i in range(3)]
    holds = (
        all(within(g, 3, 5, 0.5) for g in gains)
        and max(others) <= 0.01
        and apart[0] <= 0.03
        and max(apart[1:]) <= 0.005
    )
    gained = f"ARC-C gains {gains[0]:.1f} and {gains[1]:.1f} points"
    return holds, f"{gained}; others move by at most {max(others):.3f}; methods apart by {max(apart):.3f}"


def clip_kernels(look: Look) -> tuple[bool, str]:
    a, b = (look.value(look.arm(method=m), "clipping_ms") for m in (G, SONAR))
    gain = look.value(look.arm(method=G), "step_ms") - look.value(look.arm(method=SONAR), "step_ms")
    holds = within(a - b, 25, 25, 3) and (a - b) / gain >= 0.8
    return holds, f"{a:.1f} against {b:.1f} ms of clipping kernels; steps differ by {fmt.fixed(gain, 1)} ms"


def granite_idle(look: Look) -> tuple[bool, str]:
    arms = [look.arm(model="granite", method=m) for m in (N, SONAR)]
    busy, idle = ([look.value(a, k) for a in arms] for k in ("busy_ms", "idle_ms"))
    holds = abs(busy[0] - busy[1]) <= 0.03 * busy[0] and idle[1] < 0.8 * idle[0]
    return holds, f"busy {busy[0]:.1f} and {busy[1]:.1f} ms, idle {idle[0]:.1f} to {idle[1]:.1f} ms"


def cost_per_call(look: Look) -> tuple[bool, str]:
    arms = [look.arm(method=m) for m in (SONAR, PER_EXPERT)]
    steps, made = ([look.value(a, k) for a in arms] for k in ("step_ms", "expert_optimizer_calls"))
    cost = 1e3 * (steps[1] - steps[0]) / (made[1] - made[0])
    return within(
        cost, 12, 12, 3
    ), f"{fmt.fixed(steps[1] - steps[0], 1)} ms over {made[1] - made[0]:g} calls, {fmt.fixed(cost, 1)} µs each"


def clip_cost(look: Look) -> tuple[bool, str]:
    found = []
    for size in (2, 4, 8, 16, 32):
        a, b = (look.value(look.arm(method=m, batch_size=size), "step_ms") for m in (G, N))
        found.append(a - b)
    return all(within(v, 22, 29, 0.5) for v in found), ", ".join(
        fmt.fixed(v, 1) for v in found
    ) + " ms at batch 2 to 32"


def batch_savings(look: Look) -> tuple[bool, str]:
    printed, out = {2: 12.0, 8: 9.4, 16: 5.2, 32: 0.0}, {}
    for size in printed:
        a, b = (look.value(look.arm(method=m, batch_size=size), "peak_allocated_gb") for m in (G, SONAR))
        out[size] = a - b
    holds = all(abs(out[s] - p) <= 0.5 for s, p in printed.items())
    return holds, "; ".join(f"batch {s}: {v:.1f} GB (printed {printed[s]:g})" for s, v in out.items())


def cap(gb: float, **expected: str) -> Check:
    """Which methods run under an allocator cap: ``method="ok"`` or ``"oom"``, with AdamW at 46 GB, 8-bit at 30.5 GB."""

    def check(look: Look) -> tuple[bool, str]:
        optimizer = "adamw" if gb == 46 else "adamw8bit"
        found = {m: look.status(look.arm(method=m, optimizer=optimizer, memory_cap_gb=gb)) for m in expected}
        text = "; ".join(f"{display('method', m)} {RAN[s]}" for m, s in found.items())
        return found == expected, text

    return check


def eight_bit_total(look: Look) -> tuple[bool, str]:
    a, b = (look.value(look.arm(method=m, optimizer="adamw8bit"), "peak_allocated_gb") for m in (SONAR, ALL))
    return within(a, 30, 30, 0.5) and abs(a - b) <= 0.5, f"Sonar-MoE {a:.1f} GB, all parameters {b:.1f} GB"


def eight_bit_quality(look: Look) -> tuple[bool, str]:
    base = look.value(look.arm(method=G), "heldout_loss")
    gaps = [look.value(look.arm(method=m, optimizer="adamw8bit"), "heldout_loss") - base for m in (G, SONAR)]
    return all(abs(g) <= 0.003 for g in gaps), ", ".join(fmt.signed(g, 4) for g in gaps)


def accumulation(look: Look) -> tuple[bool, str]:
    printed, out = {2: 5, 4: 23, 8: 35}, {}
    for a in printed:
        out[a] = look.change(look.arm(method=SONAR, accumulation=a), look.arm(method=G, accumulation=a), "step_ms")
    return all(within(out[a], p, p, 1.5) for a, p in printed.items()), "; ".join(
        f"A={a} {fmt.percent(v)}" for a, v in out.items()
    )


def update_cost(look: Look) -> tuple[bool, str]:
    found = []
    for a in (2, 4, 8):
        s, n = (look.value(look.arm(method=m, accumulation=a), "step_ms") for m in (SONAR, N))
        found.append((s - n) / (a - 1))
    return all(within(v, 37, 37, 2) for v in found), ", ".join(
        fmt.fixed(v, 1) for v in found
    ) + " ms an extra update at A = 2, 4, 8"


def accumulation_savings(look: Look) -> tuple[bool, str]:
    found = []
    for a in (2, 4, 8):
        g, s = (look.value(look.arm(method=m, accumulation=a), "peak_allocated_gb") for m in (G, SONAR))
        found.append(g - s)
    return all(abs(v - 12.9) <= 0.5 for v in found), ", ".join(fmt.fixed(v, 1) for v in found) + " GB at A = 2, 4, 8"
