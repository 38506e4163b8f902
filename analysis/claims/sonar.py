"""The sentences of the Sonar-MoE paper, section by section, each with its check.

Slack: half a unit of the last printed digit for rounded percentages, 1.4% for "as fast as" (the paper's own same-seed
noise, section 5.1), 0.5 GB for savings. Where a sentence has no number, the threshold stands with it in brackets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import checks as c
from .base import COUNT, EXACT, MEMORY, QUALITY, SPEED, Claim, Look, changes, every, savings
from .checks import ALL, BACKENDS, NOISE, PER_EXPERT, SONAR, G, N, pairs, sonic

Axes = dict[str, Any]
CLAIMS: list[Claim] = []


def claim(
    name: str, section: str, scales: tuple[str, ...], sentence: str, check: Callable[[Look], tuple[bool, str]]
) -> None:
    """Add one sentence to ``CLAIMS``."""
    CLAIMS.append(Claim(name, "sonar", section, sentence, scales, check))


def peak(
    grid: list[tuple[Axes, Axes]], low: float, high: float, slack: float = 0.5
) -> Callable[[Look], tuple[bool, str]]:
    """Change of peak allocated memory in percent."""
    return changes("peak_allocated_gb", grid, low, high, slack)


def step(
    grid: list[tuple[Axes, Axes]], low: float, high: float, slack: float = 0.5
) -> Callable[[Look], tuple[bool, str]]:
    """Change of step time in percent."""
    return changes("step_ms", grid, low, high, slack)


def scatter(model: str) -> list[Axes]:
    """Axes of the ScatterMoE backend."""
    return [{"model": model, "backend": "scattermoe"}]


def batch(method: str, base: str, *sizes: int) -> list[tuple[Axes, Axes]]:
    """Arms of OLMoE at several batch sizes."""
    return [({"method": method, "batch_size": s}, {"method": base, "batch_size": s}) for s in sizes]


OLMOE_BOTH = [({"backend": b, "method": SONAR}, {"backend": b, "method": N}) for b in BACKENDS]
GRANITE_SAVING = ({"model": "granite", "method": SONAR}, {"model": "granite", "method": G})
WITH_GC = [
    ({"method": m, "optimizer": o, "checkpointing": True}, {"method": m, "optimizer": o})
    for m, o in ((G, "adamw"), (SONAR, "adamw"), (SONAR, "adamw8bit"))
]

# -- abstract and introduction -----------------------------------------------------------------------------------------

claim("expert_share", "§1", MEMORY, "The experts hold 6.44B of the 6.92B parameters of OLMoE-1B-7B.", c.expert_share)
claim("floor", "§1, §5.2", MEMORY, "The bf16 expert gradients take 12.9 GB on OLMoE and 6.0 GB on Granite.", c.floor)
claim(
    "memory",
    "Abstract",
    MEMORY,
    "Sonar-MoE lowers peak memory by 19% to 22% (two models, two backends).",
    peak(pairs(SONAR, G), -22, -19),
)
claim(
    "memory_exact",
    "§1",
    MEMORY,
    "Peak memory falls by 21.6% on OLMoE and 21.4% on Granite (SonicMoE).",
    every(peak(pairs(SONAR, G, sonic("olmoe")), -21.6, -21.6), peak(pairs(SONAR, G, sonic("granite")), -21.4, -21.4)),
)
claim(
    "no_clip_memory",
    "Table 1",
    MEMORY,
    "Leaving out expert clipping alone changes peak memory by 0.0%.",
    peak(pairs(N, G), 0, 0, 0.05),
)
claim(
    "speed",
    "Abstract",
    SPEED,
    "Each step takes 17% to 23% less time than with global-norm clipping.",
    step(pairs(SONAR, G), -23, -17),
)
claim(
    "speed_sonicmoe",
    "§1",
    SPEED,
    "Steps are 19% to 23% shorter than under global-norm clipping (SonicMoE).",
    step(pairs(SONAR, G, sonic()), -23, -19),
)
claim("loss", "Abstract, §5.2", QUALITY, "Held-out loss stays within 0.003 of all baselines.", c.losses)
claim(
    "matches_all_memory",
    "Abstract",
    MEMORY,
    "It matches optimizer-in-backward over all parameters in memory (1%).",
    peak(pairs(SONAR, ALL), -1, 1, 0),
)
claim(
    "matches_all_speed",
    "Abstract",
    SPEED,
    "It matches optimizer-in-backward over all parameters in speed (3%).",
    step(pairs(SONAR, ALL), -3, 3, 0),
)

# -- method ------------------------------------------------------------------------------------------------------------

claim(
    "one_layer", "§4.2", COUNT, "Retained expert-gradient memory is bounded by one layer, M_floor / L.", c.floor_bound
)
claim(
    "calls",
    "§4.3",
    COUNT,
    "Batched hooks make 2L optimizer calls a step, per-expert hooks 2EL (OLMoE: 32, 2,048).",
    c.calls,
)
claim(
    "per_expert_slow",
    "§4.3",
    SPEED,
    "Per-expert hooks make steps 20% to 72% slower.",
    step(pairs(PER_EXPERT, SONAR, sonic()), 20, 72),
)
claim(
    "per_expert_memory",
    "Table 3",
    MEMORY,
    "Per-expert and batched hooks hold the same memory (1.1%).",
    peak(pairs(PER_EXPERT, SONAR, sonic()), -1.1, 1.1, 0.05),
)

# -- main results ------------------------------------------------------------------------------------------------------

claim(
    "same_order", "§5.1", EXACT, "All arms use the same data order, checked by hashing the first batches.", c.same_order
)
claim(
    "noise",
    "§5.1",
    QUALITY,
    "Same-seed repeats vary by at most 1.4% in step time and 0.0016 in held-out loss.",
    c.same_seed_noise,
)
claim(
    "saving_gb",
    "§5.2",
    MEMORY,
    "With SonicMoE peak memory falls by 12.0 GB on OLMoE and 5.8 GB on Granite.",
    every(
        savings("peak_allocated_gb", {"method": SONAR}, {"method": G}, 12.0, 0.5),
        savings("peak_allocated_gb", *GRANITE_SAVING, 5.8, 0.5),
    ),
)
claim(
    "buffer",
    "§5.2",
    MEMORY,
    "The saving is the expert-gradient buffer minus the one layer still held (3%).",
    c.buffer_minus_layer,
)
claim(
    "olmoe_as_fast",
    "§5.2",
    SPEED,
    "On OLMoE training without expert clipping is as fast as Sonar-MoE, on both backends.",
    step(OLMOE_BOTH, -NOISE, NOISE, 0),
)
claim(
    "granite_faster",
    "§5.2",
    SPEED,
    "On Granite Sonar-MoE is a further 11.6% faster than without expert clipping (SonicMoE).",
    step(pairs(SONAR, N, sonic("granite")), -11.6, -11.6, NOISE),
)
claim(
    "granite_faster_scattermoe",
    "§5.2",
    SPEED,
    "With ScatterMoE it is 5.9% faster than that baseline on Granite.",
    step(pairs(SONAR, N, scatter("granite")), -5.9, -5.9, NOISE),
)
claim(
    "scattermoe_memory",
    "§5.2",
    MEMORY,
    "With ScatterMoE peak memory falls by 21.1% on OLMoE and 19.1% on Granite.",
    every(
        peak(pairs(SONAR, G, scatter("olmoe")), -21.1, -21.1), peak(pairs(SONAR, G, scatter("granite")), -19.1, -19.1)
    ),
)
claim(
    "downstream",
    "§5.2, Table 2",
    QUALITY,
    "Fine-tuning raises ARC-Challenge by 3–5 points and leaves HellaSwag and MMLU almost unchanged (0.01);"
    " the methods"
    " differ by about a standard error on ARC-Challenge and by at most 0.005 elsewhere.",
    c.downstream,
)

# -- sources of the speedup --------------------------------------------------------------------------------------------

claim(
    "clip_kernels",
    "§5.3",
    SPEED,
    "Clipping expert gradients costs about 25 ms of kernels on OLMoE and explains nearly all of the speedup (80%).",
    c.clip_kernels,
)
claim(
    "granite_idle",
    "§5.3",
    SPEED,
    "On Granite the GPU work is the same (3%), but idle time falls (65 to 42 ms).",
    c.granite_idle,
)
claim(
    "call_cost",
    "§5.3",
    SPEED,
    "Per-expert hooks add 23.6 ms on OLMoE, about 12 µs per extra optimizer call.",
    c.cost_per_call,
)

# -- exactness and quality ---------------------------------------------------------------------------------------------

claim(
    "bitwise",
    "§5.4",
    EXACT,
    "Sonar-MoE and training without expert clipping give exactly the same expert weights.",
    c.compared("sonar_vs_standard_no_expert_clip"),
)
claim(
    "bitwise_granularity",
    "§5.4",
    EXACT,
    "Per-expert and batched hooks give the same expert weights.",
    c.compared("sonar_per_expert_vs_sonar"),
)
claim(
    "bitwise_all",
    "§5.4",
    EXACT,
    "All-parameter optimizer-in-backward gives the weights of training without clipping.",
    c.compared("optimizer_in_backward_vs_standard_no_clip"),
)
claim(
    "run_to_run",
    "§5.4",
    EXACT,
    "Two runs of the same baseline give the same expert weights.",
    c.compared("standard_no_expert_clip_vs_standard_no_expert_clip"),
)
claim(
    "clip_weights",
    "§5.4",
    QUALITY,
    "Clipping the expert gradients changes 47% of the expert and 19% of"
    " the other weights"
    " after three steps (5 points).",
    c.clip_changes_weights,
)
claim("clip_loss", "§5.4", QUALITY, "Yet it changes held-out loss on OLMoE by only 0.0014.", c.clip_changes_loss)
claim(
    "bf16_shares",
    "§5.4",
    QUALITY,
    "Most weights still hold their pretrained values, and both methods change the same share.",
    c.shares_changed,
)

# -- batch size and memory composition ---------------------------------------------------------------------------------

claim("clip_cost", "§5.5", SPEED, "The cost of clipping expert gradients is fixed per step (22–29 ms).", c.clip_cost)
claim(
    "speedup_shrinks",
    "§5.5",
    SPEED,
    "The speedup shrinks from 18% at batch size 2 to 8% at batch size 32 (1.5 points).",
    every(step(batch(SONAR, G, 2), -18, -18, 1.5), step(batch(SONAR, G, 32), -8, -8, 1.5)),
)
claim(
    "same_rule",
    "§5.5",
    SPEED,
    "With the same update rule the two are within ±1.1% at batch sizes 2–16.",
    step(batch(SONAR, N, 2, 4, 8, 16), -1.1, 1.1, 0.05),
)
claim(
    "same_rule_32",
    "§5.5",
    SPEED,
    "At batch size 32 Sonar-MoE is 4.0% faster.",
    step(batch(SONAR, N, 32), -4.0, -4.0, NOISE),
)
claim(
    "batch_savings",
    "§5.5",
    MEMORY,
    "The saving is 12.0 GB at batch size 2, 9.4 GB at 8, 5.2 GB at 16 and none at 32.",
    c.batch_savings,
)
claim(
    "batch_reserved",
    "§5.5",
    MEMORY,
    "At batch size 32 only 2.2 GB of reserved memory is saved.",
    savings("peak_reserved_gb", *batch(SONAR, G, 32)[0], 2.2, 0.5),
)
claim(
    "gc_memory",
    "§5.5",
    MEMORY,
    "Gradient checkpointing does not lower peak memory at batch size 2 (1.2%).",
    peak(WITH_GC, -1.2, 0.1, 0),
)
claim("gc_time", "§5.5", SPEED, "Gradient checkpointing only costs time (+10–16%).", step(WITH_GC, 10, 16))
claim(
    "eight_bit",
    "§5.5",
    MEMORY,
    "8-bit AdamW and Sonar-MoE need about 30 GB; all-parameter hooks match (29.7, 29.9 GB).",
    c.eight_bit_total,
)
claim(
    "cap_46",
    "§5.5, §6",
    MEMORY,
    "Under a 46 GB cap Sonar-MoE and all-parameter hooks run, standard training does not.",
    c.cap(46, **{G: "oom", SONAR: "ok", ALL: "ok"}),
)
claim(
    "cap_30",
    "§5.5, §6",
    MEMORY,
    "Under a 30.5 GB cap 8-bit Sonar-MoE runs, 8-bit AdamW alone does not.",
    c.cap(30.5, **{G: "oom", SONAR: "ok"}),
)
claim(
    "eight_bit_slower",
    "§5.5",
    SPEED,
    "8-bit AdamW is slower per step (186 vs. 141 ms; by 10% at least).",
    step([({"method": G, "optimizer": "adamw8bit"}, {"method": G})], 10, 1000, 0),
)
claim(
    "eight_bit_quality",
    "§5.5, Table 7",
    QUALITY,
    "Held-out loss with 8-bit AdamW stays within 0.003 of standard training.",
    c.eight_bit_quality,
)

# -- gradient accumulation ---------------------------------------------------------------------------------------------

claim(
    "accumulation_one",
    "§5.6",
    SPEED,
    "At A = 1 Sonar-MoE is as fast as standard training without expert clipping.",
    step([({"method": SONAR}, {"method": N})], -NOISE, NOISE, 0),
)
claim(
    "accumulation",
    "§5.6",
    SPEED,
    "With accumulation it is slower than global clipping by 5, 23 and 35% at A = 2, 4, 8 (1.5 points).",
    c.accumulation,
)
claim("update_cost", "§5.6", SPEED, "Each extra update is about 37 ms at every A (2 ms).", c.update_cost)
claim("accumulation_saving", "§5.6", MEMORY, "With accumulation it still saves 12.9 GB.", c.accumulation_savings)
