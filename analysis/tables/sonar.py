"""Tables of the Sonar-MoE paper, each a spec."""

from __future__ import annotations

from typing import Any

from ..axes import product
from .spec import Column, TableSpec

BACKENDS = {"smoke": ["grouped_mm", "eager"]}  # conf/scale/*.yaml; other scales run the paper's two
PAPER_BACKENDS = ["sonicmoe", "scattermoe"]
G, N, ALL, SONAR, PER_EXPERT = "standard_global_clip", "standard_no_expert_clip", "optimizer_in_backward", "sonar", "sonar_per_expert"
METHOD = ("method", "Method")
MODEL = ("model", "Model")


def backends(scale: str) -> list[str]:
    """Backends that an experiment sweeps at one scale."""
    return BACKENDS.get(scale, PAPER_BACKENDS)


def plain(scale: str, **axes: Any) -> list[dict[str, Any]]:
    """Rows of one backend with the paper's fixed axes: batch of 2, AdamW, no accumulation, checkpointing or cap."""
    fixed = {"optimizer": "adamw", "batch_size": 2, "accumulation": 1, "checkpointing": False, "memory_cap_gb": None}
    return product(**{"model": "olmoe", "backend": backends(scale)[0], **fixed, **axes})


TABLE1 = TableSpec(
    name="table1",
    title="Table 1: memory, step time and held-out loss by model, backend and method",
    source="Table 1",
    experiment="table1",
    rows=lambda scale: plain(scale, model=["olmoe", "granite"], backend=backends(scale), method=[G, N, ALL, SONAR]),
    labels=(MODEL, ("backend", "Backend"), METHOD),
    columns=(
        Column("peak_allocated_gb", delta=True, bold=True),
        Column("saving_bound_pct", only=("smoke",), published=False, panel="memory"),
        Column("peak_reserved_gb", bold=True),
        Column("step_ms", delta=True, bold=True, panel="time"),
        Column("tokens_per_s", panel="time", error=False),
        Column("heldout_loss", panel="quality"),
    ),
    notes=(
        "Δ is against standard training with global clipping on the same model and backend; bold is the lowest memory and step time"
        " of a model and backend.",
    ),
)

ALL_TABLES = (TABLE1,)
