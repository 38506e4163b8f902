"""Claims that are no plain relation: each takes :class:`Evidence` and returns (holds, figures), or raises Missing.

Where a sentence has no number, the threshold stands in its check.
"""

from __future__ import annotations

from dataclasses import replace

from .. import format as fmt
from ..axes import display
from .evidence import Evidence, Missing

GLOBAL, SONAR, PER_EXPERT = "standard_global_clip", "sonar", "sonar_per_expert"
MODELS = ("olmoe", "granite")
PRINTED_CALLS = {"olmoe": (32, 2048), "granite": (64, 2560)}
RAN = {"ok": "runs", "oom": "runs out of memory"}
CUT = "direct_fused"  # the optimizer of the diagnosis that does not split gate from up
BETTER = 0.01  # of evaluation loss
Found = tuple[bool, str]


def floor_bound(evidence: Evidence) -> Found:
    """At most one layer: the bound equals M_floor / L, and a timeline (if recorded) stays under it."""
    arm = evidence.usual(method=SONAR)
    whole, bound = evidence.value(arm, "m_floor_gb"), evidence.value(arm, "m_floor_bound_gb")
    layers = next(iter(arm.ok)).number("model.layers")
    figures = f"M_floor {whole:.3g} GB, one layer {bound:.3g} GB"
    holds = bool(layers) and abs(bound - whole / layers) <= 1e-6 * whole if layers else False
    peak = _timeline_peak(evidence)
    if peak is not None:
        figures += f"; expert gradients in the timeline at most {peak:.3g} GB"
        holds = holds and peak <= bound * 1.001
    return holds, figures


def _timeline_peak(evidence: Evidence) -> float | None:
    from ..figures.timeline import parse  # numpy is loaded only if there is a timeline

    for r in evidence.records(lambda r: r.arm.get("method") == SONAR and r.data.get("timeline") is not None):
        found = parse(r.data["timeline"])
        if found and "expert_gradients" in found.owners:
            return float(found.live[found.owners.index("expert_gradients")].max()) / 1e9
    return None


def buffer_minus_layer(evidence: Evidence) -> Found:
    """The saving is the buffer of expert gradients less one layer of it, to 3%."""
    out, holds = [], True
    for model in MODELS:
        base, arm = (evidence.usual(model=model, method=m) for m in (GLOBAL, SONAR))
        saved = evidence.value(base, "peak_allocated_gb") - evidence.value(arm, "peak_allocated_gb")
        predicted = evidence.value(arm, "m_floor_gb") - evidence.value(arm, "m_floor_bound_gb")
        holds = holds and abs(saved - predicted) <= 0.03 * predicted
        out.append(f"{model} {saved:.2f} GB saved, {predicted:.2f} GB predicted")
    return holds, "; ".join(out)


def calls(evidence: Evidence) -> Found:
    """2L and 2EL from the record's own layers and experts; at full size also the printed counts."""
    out, holds = [], True
    for model in MODELS:
        for method, printed in zip((SONAR, PER_EXPERT), PRINTED_CALLS[model]):
            arm = evidence.usual(model=model, method=method)
            found = evidence.value(arm, "expert_optimizer_calls")
            layers, experts = (arm.ok[0].number(f"model.{k}") for k in ("layers", "experts"))
            if not layers or not experts:
                raise Missing(f"layers and experts of {model}")
            expected = 2 * layers * (experts if method == PER_EXPERT else 1)
            holds = holds and found == expected and (evidence.scale == "smoke" or found == printed)
            out.append(f"{model} {'per-expert' if method == PER_EXPERT else 'batched'} {found:g}")
    return holds, "; ".join(out)


def same_order(evidence: Evidence) -> Found:
    """One data hash for each seed over all records of Table 1 on one model."""
    found: dict[tuple, set[str]] = {}
    for r in evidence.records(lambda r: r.experiment == "table1" and bool(r.get("data.sha256"))):
        found.setdefault((r.arm.get("model"), r.seed), set()).add(r.get("data.sha256"))
    if not found:
        raise Missing("data hashes of Table 1")
    evidence.sources.add("measured")
    figures = f"{len(found)} groups of arms, {sum(map(len, found.values()))} hashes"
    return all(len(v) == 1 for v in found.values()), figures


def same_seed_noise(evidence: Evidence) -> Found:
    """Runs of one arm with one seed: at most 1.4% in step time and 0.0016 in loss."""
    step: list[float] = []
    loss: list[float] = []
    rows = [r for r in evidence.paper.rows if r.source == "Table 1"]
    for arm in (evidence.arm(row.axes) for row in rows):
        for other in arm.repeats:
            first = arm.by_seed[other.seed]
            a, b = (r.number("time.median_s") for r in (first, other))
            c, d = (r.number("loss.heldout") for r in (first, other))
            step += [abs(a - b) / a * 100] if a and b else []
            loss += [abs(c - d)] if c is not None and d is not None else []
    if not step or not loss:
        raise Missing("two runs of one arm with one seed")
    evidence.sources.add("measured")
    figures = f"at most {max(step):.1f}% in step time and {max(loss):.4f} in loss"
    return max(step) <= 1.4 and max(loss) <= 0.0016, figures


def same_weights(evidence: Evidence, name: str) -> Found:
    """No expert weight differs in the named comparison; other weights at most by the printed noise of 6."""
    arm = evidence.arm({"method": name, "task": "compare_weights"})
    expert, other = evidence.value(arm, "expert_differ"), evidence.value(arm, "other_differ")
    holds = expert == 0 and other <= (0 if evidence.scale == "smoke" else 6)
    sides = " against ".join(display("method", side) for side in name.split("_vs_"))
    return holds, f"{sides}: {expert:g} expert, {other:g} other"


def clip_kernels(evidence: Evidence) -> Found:
    """25 ms of clipping kernels (3 ms), at least 80% of what the step gains."""
    arms = [evidence.usual(method=m) for m in (GLOBAL, SONAR)]
    a, b = (evidence.value(arm, "clipping_ms") for arm in arms)
    first, second = (evidence.value(arm, "step_ms") for arm in arms)
    gain = first - second
    figures = f"{a:.1f} against {b:.1f} ms of clipping kernels; steps differ by {fmt.fixed(gain, 1)} ms"
    return 22 <= a - b <= 28 and gain > 0 and (a - b) / gain >= 0.8, figures


# -- MESH --------------------------------------------------------------------------------------------------------------


def _losses(evidence: Evidence, *optimizers: str) -> list[float]:
    return [evidence.value(evidence.usual(optimizer=o), "heldout_loss") for o in optimizers]


def routed(evidence: Evidence) -> Found:
    """Routed experts on AdamW close at least half of the gap, and more than the shared expert does."""
    optimizers = ("direct", "mesh_adamw", "direct_routed_adamw", "direct_shared_adamw")
    direct, adamw, a, b = _losses(evidence, *optimizers)
    if direct <= adamw:
        return False, f"no gap: direct {direct:.4f}, AdamW {adamw:.4f}"
    first, second = ((direct - v) / (direct - adamw) for v in (a, b))
    return first >= 0.5 and first > second, f"routed closes {100 * first:.0f}%, shared {100 * second:.0f}% of the gap"


def ruled_out(evidence: Evidence) -> Found:
    """Ours to define: no idle expert, weights worth nine tenths of the tokens, and a cut that moves the loss by less
    than half of what MESH gains. Semantic routing is shown, not judged: no figure rules it out."""
    found = evidence.records(lambda r: r.arm.get("optimizer") == "direct" and isinstance(r.get("diagnosis"), dict))
    if not found:
        raise Missing("the diagnosis of direct Sinkhorn (mesh_diagnosis)")
    keys = ("load.idle", "gate.effective_share_of_tokens", "semantic.information_of_token_id", "semantic.shuffled")
    idle, effective, information, chance = (_mean([r.number(f"diagnosis.{key}") for r in found], key) for key in keys)
    within = replace(evidence, experiment="mesh_diagnosis")
    direct, mesh, fused = _losses(within, "direct", "mesh", CUT)
    gain, cut = direct - mesh, abs(fused - direct)
    figures = (
        f"idle experts {100 * idle:.1f}%, effective share of tokens {effective:.3f}, token id tells"
        f" {100 * information:.1f}% of the expert (by chance {100 * chance:.1f}%), fused against split"
        f" {fmt.signed(fused - direct, 4)}, MESH against direct {fmt.signed(mesh - direct, 4)}"
    )
    if gain < BETTER:
        raise Missing(f"a failure to explain: MESH is not better than direct Sinkhorn here ({figures})")
    return idle < 0.01 and effective > 0.9 and cut < gain / 2, figures


def _mean(values: list[float | None], name: str) -> float:
    """Mean of a diagnosis figure over records. Raises Missing if one has none."""
    known = [v for v in values if v is not None]
    if not known or len(known) < len(values):
        raise Missing(f"diagnosis.{name}")
    return sum(known) / len(known)
