"""The sentences of the MESH paper as predicates. Order and quality may be shown by a tiny model, and then say so.

Margins: 0.02 for "close" (the paper reads gaps of 0.01–0.02 as suggestive), 0.01 for "better". Bytes to three decimals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..collection import Arm
from ..tables import format as fmt
from ..tables.mesh import ADAMW, ADDITIONAL, DIRECT, MESH, MESH_B, NAMES
from .base import MEMORY, QUALITY, Claim, Look, Missing

ORDER = ("paper", "smoke")
CLOSE, BETTER = 0.02, 0.01
CONTROLS = ("mesh_v_only", "mesh_sign_only", "mesh_factored_v")
CLAIMS: list[Claim] = []
Check = Callable[[Look], tuple[bool, str]]


def claim(name: str, section: str, scales: tuple[str, ...], sentence: str) -> Callable[[Check], Check]:
    """Register the decorated check as one sentence's predicate."""

    def register(check: Check) -> Check:
        CLAIMS.append(Claim(name, "mesh", section, sentence, scales, check))
        return check

    return register


def arm(look: Look, optimizer: str, **axes: Any) -> Arm:
    """A nanowhale arm."""
    return look.bare(model="nanowhale", optimizer=optimizer, **axes)


def losses(look: Look, *optimizers: str, **axes: Any) -> list[float]:
    """Mean evaluation losses."""
    return [look.value(arm(look, o, **axes), "heldout_loss") for o in optimizers]


def listed(optimizers: tuple[str, ...], values: list[float]) -> str:
    """Names with their losses."""
    return ", ".join(f"{NAMES[o]} {v:.4f}" for o, v in zip(optimizers, values))


@claim(
    "state_bytes",
    "Memory",
    MEMORY,
    "Optimizer state: AdamW 0.883, direct, MESH and MESH-B 0.331, MESH-B-Full 0.430 GB.",
)
def state_bytes(look: Look) -> tuple[bool, str]:
    printed = {ADAMW: 0.883, DIRECT: 0.331, MESH: 0.331, MESH_B: 0.331, "mesh_b_full": 0.430}
    found = {o: look.value(arm(look, o), "optimizer_state_gb") for o in printed}
    text = ", ".join(f"{NAMES[o]} {v:.4f}" for o, v in found.items())
    return all(abs(round(found[o], 3) - p) < 5e-4 for o, p in printed.items()), text + " GB"


@claim("hidden_bytes", "Memory", MEMORY, "The hidden buffer of MESH is 0.098 GB, outside optimizer state.")
def hidden_bytes(look: Look) -> tuple[bool, str]:
    size = look.value(arm(look, MESH), "hidden_buffer_gb")
    return abs(round(size, 3) - 0.098) < 5e-4, f"{size:.4f} GB"


@claim("state_saving", "Table 1", MEMORY, "MESH-B reduces optimizer-state memory by 62.5%.")
def state_saving(look: Look) -> tuple[bool, str]:
    change = look.change(arm(look, MESH_B), arm(look, ADAMW), "optimizer_state_gb")
    return abs(change + 62.5) <= 0.05, fmt.percent(change, 2)


@claim("peak_saving", "Table 1", MEMORY, "MESH-B reduces peak CUDA allocation by about 12.6% (1 point).")
def peak_saving(look: Look) -> tuple[bool, str]:
    change = look.change(arm(look, MESH_B), arm(look, ADAMW), "peak_allocated_gb")
    return abs(change + 12.6) <= 1.0, fmt.percent(change)


@claim("loss_gap", "Table 1", QUALITY, "MESH-B trails AdamW by about 0.049 evaluation loss (0.02).")
def loss_gap(look: Look) -> tuple[bool, str]:
    a, b = losses(look, MESH_B, ADAMW)
    return abs(a - b - 0.049) <= CLOSE, fmt.signed(a - b, 4)


@claim("below_adamw", "Table 1", ORDER, "In the additional seeds MESH-B does not outperform AdamW.")
def below_adamw(look: Look) -> tuple[bool, str]:
    found = losses(look, ADAMW, MESH_B, seed=ADDITIONAL)
    return found[0] < found[1], listed((ADAMW, MESH_B), found)


@claim("close", "Table 1", ORDER, "MESH without the block multiplier is close to MESH-B (0.02).")
def close(look: Look) -> tuple[bool, str]:
    found = losses(look, MESH, MESH_B)
    return abs(found[0] - found[1]) <= CLOSE, listed((MESH, MESH_B), found)


@claim(
    "first_moment", "Table 4", ORDER, "A temporal first moment is the major improvement over direct Sinkhorn (0.01)."
)
def first_moment(look: Look) -> tuple[bool, str]:
    found = losses(look, MESH, DIRECT)
    return found[0] < found[1] - BETTER, listed((MESH, DIRECT), found)


@claim(
    "full_state",
    "Table 2",
    ORDER,
    "In seed 42 MESH-B-Full reaches AdamW-like quality (0.02) with about half its state.",
)
def full_state(look: Look) -> tuple[bool, str]:
    both = ("mesh_b_full", ADAMW)
    found = losses(look, *both, seed=42)
    sizes = [look.value(arm(look, o), "optimizer_state_gb") for o in both]
    share = 100 * sizes[0] / sizes[1]
    return found[0] - found[1] <= CLOSE and 40 <= share <= 60, f"{listed(both, found)}; state {share:.0f}%"


@claim("v_of_h", "Block scaling", QUALITY, "In seed 42 MESH-B-Full reaches 3.6187 and the V(H) variant 3.6102 (0.02).")
def v_of_h(look: Look) -> tuple[bool, str]:
    both = ("mesh_b_full", "mesh_b_full_vh")
    found = losses(look, *both, seed=42)
    return abs(found[0] - 3.6187) <= CLOSE and abs(found[1] - 3.6102) <= CLOSE, listed(both, found)


@claim(
    "routed",
    "Table 3",
    ORDER,
    "Routed experts on AdamW recover most of the gap to AdamW; the shared expert on AdamW helps less.",
)
def routed(look: Look) -> tuple[bool, str]:
    direct, adamw, a, b = losses(look, DIRECT, ADAMW, "direct_routed_adamw", "direct_shared_adamw")
    if direct <= adamw:
        return False, f"no gap: direct {direct:.4f}, AdamW {adamw:.4f}"
    first, second = ((direct - v) / (direct - adamw) for v in (a, b))
    return first >= 0.5 and first > second, f"routed closes {100 * first:.0f}%, shared {100 * second:.0f}% of the gap"


@claim("sage_experts", "Table 3", ORDER, "SAGE on all experts worsens training.")
def sage_experts(look: Look) -> tuple[bool, str]:
    both = ("direct_experts_sage", DIRECT)
    found = losses(look, *both)
    return found[0] > found[1], listed(both, found)


@claim(
    "controls",
    "Table 4",
    ORDER,
    "V-only, sign-only and factored-v are poor: none is better than direct Sinkhorn (0.01).",
)
def controls(look: Look) -> tuple[bool, str]:
    direct, *found = losses(look, DIRECT, *CONTROLS)
    return all(v > direct - BETTER for v in found), f"{NAMES[DIRECT]} {direct:.4f}, {listed(CONTROLS, found)}"


@claim("vocabulary", "Discussion", MEMORY, "Embedding and untied head hold about 75% of the 110.37M parameters.")
def vocabulary(look: Look) -> tuple[bool, str]:
    base = arm(look, ADAMW)
    total = look.value(base, "parameters")
    roles = base.ok[0].get("roles")
    sizes = [r.get("parameters") for r in roles if r.get("role") == "vocabulary"] if isinstance(roles, list) else []
    if not sizes or not sizes[0]:
        raise Missing("parameters by role")
    share = 100 * sizes[0] / total
    return abs(share - 75) <= 0.5 and abs(
        total - 110.37e6
    ) <= 5e3, f"{fmt.count(sizes[0])} of {total:,.0f} ({share:.1f}%)"


@claim(
    "lifecycle",
    "Implementation",
    ("paper", "smoke"),
    "About one prepare call a step, buffer–shadow cosine near one, error near 1e-8.",
)
def lifecycle(look: Look) -> tuple[bool, str]:
    shadowed = look.records(lambda r: r.arm.get("optimizer") == MESH and r.number("hidden_momentum.cosine") is not None)
    record = next(iter(shadowed), None)
    keys = ("prepare_calls_per_step", "cosine", "relative_error")
    calls, cosine, error = ((record.number(f"hidden_momentum.{k}") if record else None) for k in keys)
    if calls is None or cosine is None or error is None:
        raise Missing("hidden-momentum diagnostics of MESH")
    look.sources.add("measured")
    return abs(
        calls - 1
    ) <= 0.05 and cosine >= 0.9999 and error <= 1e-6, f"{calls:g} calls, cosine {cosine:.6f}, error {error:.1e}"


@claim(
    "ruled_out",
    "Diagnosis",
    ORDER,
    "Route-count sparsity, gate skew, semantic routing and partitioning do not explain the failure.",
)
def ruled_out(look: Look) -> tuple[bool, str]:
    """Ours to define: no idle expert, weights worth nine tenths of the tokens, and a cut that moves the loss by less
    than half of what MESH gains. Semantic routing is shown, not judged: no figure rules it out."""
    found = look.records(lambda r: r.arm.get("optimizer") == DIRECT and isinstance(r.get("diagnosis"), dict))
    if not found:
        raise Missing("the diagnosis of direct Sinkhorn (mesh_diagnosis)")
    keys = ("load.idle", "gate.effective_share_of_tokens", "semantic.information_of_token_id", "semantic.shuffled")
    idle, effective, information, chance = (mean([r.number(f"diagnosis.{key}") for r in found], key) for key in keys)
    direct, mesh, fused = losses(replace(look, experiment="mesh_diagnosis"), DIRECT, MESH, "direct_fused")
    gain, cut = direct - mesh, abs(fused - direct)
    figures = (
        f"idle experts {100 * idle:.1f}%, effective share of tokens {effective:.3f}, token id tells"
        f" {100 * information:.1f}% of the expert (by chance {100 * chance:.1f}%), fused against split"
        f" {fmt.signed(fused - direct, 4)}, MESH against direct {fmt.signed(mesh - direct, 4)}"
    )
    if gain < BETTER:
        raise Missing(f"a failure to explain: MESH is not better than direct Sinkhorn here ({figures})")
    return idle < 0.01 and effective > 0.9 and cut < gain / 2, figures


def mean(values: list[float | None], name: str) -> float:
    """Mean of a diagnosis figure over records. Raises Missing if one has none."""
    known = [v for v in values if v is not None]
    if not known or len(known) < len(values):
        raise Missing(f"diagnosis.{name}")
    return sum(known) / len(known)
