"""Tiny models and one training run, on real CPU tensors or on fake ones, shared by the instruments' tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sonar_repro.methods import Schedule, ScheduledOptimizer
from sonar_repro.models.experts import find_expert_tensors
from sonar_repro.optim.factory import make_factory
from sonar_repro.training.step import training_step

SHARED = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
FAMILIES = {
    "olmoe": {"num_key_value_heads": 4, "num_experts": 8, "tie_word_embeddings": False},
    "granitemoe": {"num_key_value_heads": 2, "num_local_experts": 8, "tie_word_embeddings": True},
}


def config(family: str = "olmoe", layers: int = 2, **overrides: Any) -> Any:
    return AutoConfig.for_model(family, **{**SHARED, **FAMILIES[family], "num_hidden_layers": layers, **overrides})


def real_model(family: str = "olmoe", layers: int = 2, experts: str = "grouped_mm") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config(family, layers), dtype=torch.bfloat16, experts_implementation=experts
    ).train()


def real_batch(batch_size: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch_size, length, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def optimizer(model: Any, method: str = "sonar", kind: str = "adamw", accumulation: int = 1) -> ScheduledOptimizer:
    schedule = Schedule.named(method)
    mode = "update_each" if accumulation > 1 and schedule.in_backward != "none" else "standard"
    factory = make_factory(kind, lr=1e-3)
    counted = {"accumulation": accumulation, "accumulation_mode": mode}
    return ScheduledOptimizer(model, factory, schedule, on_nonfinite="off", **counted)  # as the papers' arms run


def experts_of(model: Any) -> list[torch.nn.Parameter]:
    return [tensor.parameter for tensor in find_expert_tensors(model)]


def run_steps(
    model: Any,
    batch: Callable[[], dict[str, torch.Tensor]],
    *,
    steps: int = 2,
    accumulation: int = 1,
    before_backward: Callable[[], None] = lambda: None,
    **options: Any,
) -> ScheduledOptimizer:
    made = optimizer(model, accumulation=accumulation, **options)

    def micro_batches() -> Any:
        for _ in range(accumulation):
            before_backward()
            yield batch()

    for _ in range(steps):
        training_step(model, made, None, micro_batches(), accumulation)
    return made
