"""Tables of the Sonar-MoE paper, each a spec."""

from __future__ import annotations

from typing import Any

from ..axes import product
from ..collection import Collection
from . import remarks
from .spec import Column, TableSpec

BACKENDS = {"smoke": ["grouped_mm", "eager"]}  # conf/scale/*.yaml; other scales run the paper's two
PAPER_BACKENDS = ["sonicmoe", "scattermoe"]
G, N, ALL, SONAR, PER_EXPERT = (
    "standard_global_clip",
    "standard_no_expert_clip",
    "optimizer_in_backward",
    "sonar",
    "sonar_per_expert",
)
FOLD = "sonar_fold"
CLIPPED = [f"sonar_{rule}_clip" for rule in ("exact", "tensor", "lagged", "delayed", "offload")]
BOUND_NOTE = (
    "Bound: −f(1−1/L)/4, the most that freeing expert gradients can save when weights, gradients and two"
    " moments share a"
    " dtype and gradients set the peak (f: expert share of the parameters, L: layers)."
)
METHOD = ("method", "Method")
MODEL = ("model", "Model")


def backends(scale: str) -> list[str]:
    """Backends that an experiment sweeps at one scale."""
    return BACKENDS.get(scale, PAPER_BACKENDS)


def plain(scale: str, **axes: Any) -> list[dict[str, Any]]:
    """Rows of one backend with the paper's fixed axes: batch of 2, AdamW, no accumulation, checkpointing or cap."""
    fixed = {"optimizer": "adamw", "batch_size": 2, "accumulation": 1, "checkpointing": False, "memory_cap_gb": None}
    fixed = {"model": "olmoe", "backend": backends(scale)[0], **fixed}
    return product(**{k: v for k, v in fixed.items() if k not in axes}, **axes)


TABLE1 = TableSpec(
    name="table1",
    title="Table 1: memory, step time and held-out loss by model, backend and method",
    source="Table 1",
    experiment="table1",
    rows=lambda scale: plain(scale, model=["olmoe", "granite"], backend=backends(scale), method=[G, N, ALL, SONAR]),
    labels=(MODEL, ("backend", "Backend"), METHOD),
    columns=(
        Column("peak_allocated_gb", delta=True, bold=True),
        Column(
            "saving_bound_pct",
            only=("smoke",),
            published=False,
            applies={"method": (SONAR, PER_EXPERT)},
            note=BOUND_NOTE,
        ),
        Column("peak_reserved_gb", bold=True),
        Column("step_ms", delta=True, bold=True, panel="time"),
        Column("tokens_per_s", panel="time", error=False),
        Column("heldout_loss", panel="quality"),
    ),
    notes=(
        "Δ is against standard training with global clipping on the same model and backend; bold is the lowest memory"
        " and step time of a model and backend.",
    ),
)

TABLE2 = TableSpec(
    name="table2",
    title="Table 2: downstream accuracy of the pretrained and the fine-tuned checkpoints",
    source="Table 2",
    experiment="table2",
    rows=lambda scale: product(model="olmoe", task="downstream", method=["start", G, SONAR]),
    labels=(("method", "Checkpoint"),),
    columns=lambda scale, origins: downstream_columns(scale, origins),
    group=(),
    scales=("smoke", "paper"),
    extras=False,
    whole=True,
    notes=("Standard errors in the paper: 0.015 for ARC-Challenge, 0.004 for HellaSwag and MMLU.",),
    remarks=remarks.standard_errors,
)


def downstream_columns(scale: str, origins: list[Collection]) -> tuple[Column, ...]:
    """The paper's three tasks; at smoke scale the local tasks that were recorded."""
    if scale == "paper":
        return (Column("arc_challenge"), Column("hellaswag"), Column("mmlu"))
    found = [r.get("downstream.tasks", {}) for o in origins for r in o.of("table2", scale)]
    tasks = list(dict.fromkeys(name for tasks in found for name in tasks)) or ["local"]
    return tuple(Column(f"downstream:{name}", published=False) for name in tasks)


TABLE3 = TableSpec(
    name="table3",
    title="Table 3: hook granularity, batched against per-expert",
    source="Table 3",
    experiment="table3",
    rows=lambda scale: plain(scale, model=["olmoe", "granite"], method=[SONAR, PER_EXPERT]),
    labels=(MODEL, ("method", "Hooks")),
    columns=(
        Column("expert_optimizer_calls", "Calls"),
        Column("peak_allocated_gb", delta=True),
        Column("step_ms", delta=True, bold=True, panel="time"),
        Column("heldout_loss", panel="quality"),
    ),
    group=("model",),
    baseline={"method": SONAR},
    names={"method": {SONAR: "batched", PER_EXPERT: "per-expert"}},
    notes=(
        "Calls are optimizer calls on expert tensors in a step (2L batched, 2EL per expert); Δ is against"
        " batched hooks.",
    ),
    remarks=remarks.cost_per_call,
)

COMPARISONS = {
    "standard_no_expert_clip_vs_standard_no_expert_clip": "Same baseline, run twice",
    "sonar_vs_standard_no_expert_clip": "Sonar-MoE vs. standard (no expert clip)",
    "sonar_per_expert_vs_sonar": "Sonar-MoE: per-expert vs. batched hooks",
    "optimizer_in_backward_vs_standard_no_clip": "Opt.-in-backward (all) vs. standard (no clip)",
    "standard_global_clip_vs_standard_no_expert_clip": "Standard: global clip vs. no expert clip",
}
TABLE4 = TableSpec(
    name="table4",
    title="Table 4: weights that differ between two runs after three steps",
    source="Table 4",
    experiment="table4",
    rows=lambda scale: product(model="olmoe", task="compare_weights", method=list(COMPARISONS)),
    labels=(("method", "Runs compared"),),
    columns=(Column("expert_differ"), Column("expert_total"), Column("other_differ"), Column("other_total")),
    group=(),
    scales=("smoke", "paper"),
    names={"method": COMPARISONS},
    extras=False,
    whole=True,
    notes=(
        "The paper's few differing other weights are its run-to-run noise; under deterministic algorithms"
        " ours are exact.",
    ),
)

TABLE5 = TableSpec(
    name="table5",
    title="Table 5: share of weights that differ from their starting values after bf16 training",
    source="Table 5",
    experiment="table5",
    rows=lambda scale: plain(scale, method=[G, SONAR]),
    labels=(METHOD,),
    columns=(Column("expert_changed_pct"), Column("other_changed_pct")),
    scales=("smoke", "paper"),
    notes=(
        "The share depends on the learning rate and the number of steps: at smoke scale it says only that all"
        " methods agree.",
    ),
)

TABLE6 = TableSpec(
    name="table6",
    title="Table 6: memory by method, optimizer and gradient checkpointing, and whether it runs under a cap",
    source="Table 6",
    experiment="table6",
    rows=lambda scale: plain(
        scale, optimizer=["adamw", "adamw8bit"], method=[G, SONAR, ALL], checkpointing=[False, True]
    ),
    labels=(("optimizer", "Optimizer"), METHOD, ("checkpointing", "GC")),
    columns=(
        Column("peak_allocated_gb", delta=True),
        Column("peak_reserved_gb", delta=True),
        Column("step_ms", delta=True, panel="time"),
        Column(
            "peak_reserved_gb",
            "Runs under 46 GB",
            {"memory_cap_gb": 46},
            status=True,
            only=("forecast", "paper"),
            panel="cap",
        ),
        Column(
            "peak_reserved_gb", "30.5 GB", {"memory_cap_gb": 30.5}, status=True, only=("forecast", "paper"), panel="cap"
        ),
    ),
    group=("optimizer",),
    baseline={"method": G, "optimizer": "adamw", "checkpointing": False},
    names={"checkpointing": {True: "yes", False: "no"}},
    notes=(
        "Δ is against standard training with AdamW and no gradient checkpointing (GC). The paper leaves some"
        " setups out.",
    ),
)

TABLE7 = TableSpec(
    name="table7",
    title="Table 7: held-out loss with 8-bit AdamW",
    source="Table 7",
    experiment="table7",
    rows=lambda scale: plain(scale, optimizer=["adamw", "adamw8bit"], method=[G, SONAR]),
    labels=(("optimizer", "Optimizer"), METHOD),
    columns=(Column("heldout_loss", panel="quality"),),
    scales=("smoke", "paper"),
    remarks=remarks.loss_gaps,
)

TABLE8 = TableSpec(
    name="table8",
    title="Table 8: gradient accumulation, A micro-batches a step",
    source="Table 8",
    experiment="table8",
    rows=lambda scale: [
        {k: v for k, v in row.items() if k != "method"} for row in plain(scale, accumulation=[1, 2, 4, 8])
    ],
    labels=(("accumulation", "A"),),
    columns=(
        Column("step_ms", "Std. (global) ms", {"method": G}, panel="time"),
        Column("step_ms", "Std. (no exp.) ms", {"method": N}, panel="time", delta=True),
        Column("step_ms", "Sonar-MoE ms", {"method": SONAR}, panel="time", delta=True),
        Column("peak_allocated_gb", "Std. peak GB", {"method": G}),
        Column("peak_allocated_gb", "Sonar peak GB", {"method": SONAR}, delta=True),
        Column("updates_per_step", "Sonar updates", {"method": SONAR}, published=False),
        Column("step_ms", "Fold ms", {"method": FOLD}, panel="time", delta=True, published=False),
        Column("peak_allocated_gb", "Fold peak GB", {"method": FOLD}, delta=True, published=False),
        Column("updates_per_step", "Fold updates", {"method": FOLD}, published=False),
    ),
    group=(),
    notes=(
        "Δ is against standard training with global clipping at the same A.",
        "Fold is ours: micro-batch gradients go into the moments as they are freed, and the update is one a step.",
    ),
    remarks=remarks.accumulation,
)

FIGURE3 = TableSpec(
    name="kernel_time",
    title="Figure 3 as a table: kernel time of one step by kind",
    source="Figure 3",
    experiment="figure3",
    rows=lambda scale: plain(scale, model=["olmoe", "granite"], method=[G, N, SONAR]),
    labels=(MODEL, METHOD),
    columns=tuple(
        Column(name, panel="time")
        for name in ("forward_backward_ms", "clipping_ms", "optimizer_ms", "busy_ms", "idle_ms")
    ),
    group=("model",),
    scales=("smoke", "forecast", "paper"),
)

FIGURE4 = TableSpec(
    name="batch_size",
    title="Figure 4 as a table: step time and memory saving by batch size",
    source=None,
    experiment="figure4",
    rows=lambda scale: plain(scale, batch_size=[2, 4, 8, 16, 32], method=[G, N, SONAR]),
    labels=(("batch_size", "Batch"), METHOD),
    columns=(
        Column("peak_allocated_gb", delta=True, bold=True),
        Column("peak_reserved_gb", delta=True),
        Column("step_ms", delta=True, bold=True, panel="time"),
        Column("tokens_per_s", panel="time"),
    ),
    group=("batch_size",),
    notes=("Δ is against standard training with global clipping at the same batch size.",),
    remarks=remarks.batch_sizes,
)

CLIPPING = TableSpec(
    name="clipping",
    title="Clipping the experts although their gradients are freed in backward (ours)",
    source=None,
    experiment="clipping",
    rows=lambda scale: plain(scale, method=[G, SONAR, *CLIPPED]),
    labels=(METHOD,),
    columns=(
        Column("peak_allocated_gb", delta=True, bold=True),
        Column("step_ms", delta=True, bold=True, panel="time"),
        Column("heldout_loss", panel="quality"),
    ),
    notes=(
        "Δ is against standard training with global clipping. Exact clipping gives its weights bit for bit, and pays"
        " with a second forward and backward pass: worth it where the memory is needed and the clip of all"
        " gradients by one norm is, too. Delayed and offloaded clipping keep the gradients, on the card or the host.",
        "Tensor: by each expert tensor's own norm; lagged: by the global norm of the step before.",
    ),
)

ALL_TABLES = (TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, TABLE6, TABLE7, TABLE8, FIGURE3, FIGURE4, CLIPPING)
