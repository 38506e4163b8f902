"""Tiny random OLMoE and Granite models, a few fixed batches, and one training loop shared by the method tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sonar_repro import make_factory
from sonar_repro.methods import ScheduledOptimizer
from sonar_repro.training.step import training_step

HYPER = {
    "adamw": {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "sgd": {"lr": 3e-1, "momentum": 0.9, "weight_decay": 0.01},
    "lion": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "adamw8bit": {"lr": 3e-2, "betas": (0.9, 0.95), "weight_decay": 0.1},
}
VOCABULARY, LAYERS, EXPERTS = 64, 2, 4


def tiny_config(name: str, **overrides):
    """A configuration small enough for milliseconds a step; rows are multiples of 16 bytes, as grouped_mm needs."""
    import transformers

    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.01,
        "output_router_logits": False,
    }
    if name == "olmoe":
        return transformers.OlmoeConfig(**{**shared, "num_experts": EXPERTS, **overrides})
    return transformers.GraniteMoeConfig(
        **{**shared, "num_local_experts": EXPERTS, "tie_word_embeddings": True, **overrides}
    )


def tiny_model(
    name: str = "olmoe", dtype: torch.dtype = torch.float32, backend: str = "grouped_mm", seed: int = 0, **overrides
):
    """A random model in train mode; the same seed gives the same weights bit for bit."""
    import transformers

    kind = {"olmoe": transformers.OlmoeForCausalLM, "granite": transformers.GraniteMoeForCausalLM}[name]
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        model = kind._from_config(tiny_config(name, **overrides), experts_implementation=backend)
    finally:
        torch.set_default_dtype(before)
    return model.train()


def batches(count: int, seed: int = 1, size: int = 2, length: int = 12) -> list[dict[str, Tensor]]:
    """``count`` random batches, int64 [size, length]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (count, size, length), generator=generator)
    return [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x} for x in ids]


def warm_up(optimizer: torch.optim.Optimizer, steps: int = 3) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up: at step k (from 1) of W, peak * k / W."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / steps))


def build(model: nn.Module, method: str, optimizer: str = "adamw", **kwargs) -> ScheduledOptimizer:
    """The optimizer of a named method with this file's hyperparameters."""
    return ScheduledOptimizer(model, make_factory(optimizer, **HYPER[optimizer]), method, **kwargs)


def train(
    model: nn.Module,
    optimizer: ScheduledOptimizer,
    data: Sequence[dict[str, Tensor]],
    scheduler=None,
    accumulation: int = 1,
    after_step: Callable[[int], None] | None = None,
) -> list[float]:
    """One pass of the project's own training step over ``data``; returns the loss of each micro-batch."""
    losses = []
    for k in range(len(data) // accumulation):
        micro = data[k * accumulation : (k + 1) * accumulation]
        losses += [float(x) for x in training_step(model, optimizer, scheduler, micro, accumulation)]
        if after_step is not None:
            after_step(k)
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, copied."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are not equal bit for bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def backward(model: nn.Module, batch: dict[str, Tensor], divide: int = 1) -> None:
    """One backward pass of loss/divide, without a step."""
    (model(**batch, use_cache=False).loss / divide).backward()
