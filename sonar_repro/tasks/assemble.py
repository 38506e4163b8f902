"""From a config to the objects of a run: optimizer, learning-rate schedule, and the facts about its model."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..config import Config, accumulation_mode
from ..methods import Schedule, ScheduledOptimizer
from ..models.experts import find_expert_tensors
from ..optim.factory import make_factory


def learning_rate(config: Config, step: int) -> float:
    """Learning rate of step k, from 1: peak*k/W in warm-up, then cosine to the final value at the last step."""
    peak, final, warmup = config.learning_rate, config.final_learning_rate, config.warmup_steps
    if config.schedule == "constant":
        return peak
    if step <= warmup:
        return peak * step / warmup
    if config.steps == warmup:
        return peak
    share = (step - warmup) / (config.steps - warmup)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def make_optimizer(config: Config, model: torch.nn.Module) -> ScheduledOptimizer:
    """The update schedule over the optimizer factory: the two independent axes of an arm."""
    factory = make_factory(config.optimizer.kind, lr=config.learning_rate, **config.optimizer.hyper)
    method = config.method
    return ScheduledOptimizer(
        model,
        factory,
        Schedule(in_backward=method.in_backward, granularity=method.granularity, clip=method.clip),
        max_grad_norm=method.max_grad_norm,
        accumulation=config.accumulation,
        accumulation_mode=accumulation_mode(config),
        **method.options,
    )


def make_scheduler(config: Config, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """A LambdaLR that gives step k the rate :func:`learning_rate` says: its epoch k-1 is step k."""
    peak = config.learning_rate

    def factor(epoch: int) -> float:
        return learning_rate(config, epoch + 1) / peak if peak else 0.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def describe_model(config: Config, model: torch.nn.Module) -> dict[str, Any]:
    """The record's ``model``: sizes in parameters, and the expert layout."""
    tensors = find_expert_tensors(model)
    total = sum(p.numel() for p in model.parameters())
    expert = sum(t.parameter.numel() for t in tensors)
    return {
        "name": config.model.name,
        "model_type": model.config.model_type,
        "parameters": total,
        "expert_parameters": expert,
        "other_parameters": total - expert,
        "layers": len({t.layer for t in tensors}),
        "experts": tensors[0].num_experts if tensors else 0,
        "expert_tensors": len(tensors),
        "dtype": config.scale.dtype,
        "weights": config.model.weights,
    }


def gradient_floor(model: torch.nn.Module) -> dict[str, int]:
    """M_floor and its bound under hooks in bytes at the gradients' dtype (Sonar-MoE §4.1 Eq. 1 and §4.2 Eq. 2).

    M_floor is the sum over layers and experts of the expert weights; hooked, at most one layer's share is alive.
    """
    by_layer: dict[int, int] = {}
    for tensor in find_expert_tensors(model):
        parameter = tensor.parameter
        by_layer[tensor.layer] = by_layer.get(tensor.layer, 0) + parameter.numel() * parameter.element_size()
    return {"m_floor_bytes": sum(by_layer.values()), "m_floor_bound_bytes": max(by_layer.values(), default=0)}


def saving_bound(expert_parameters: int, parameters: int, layers: int) -> float:
    """Largest relative saving of in-backward experts when weights, gradients and two moments share a dtype: f(1-1/L)/4.

    f is the expert share of the parameters. Of the four equal parts one is gradients; hooks free all but one layer's.
    """
    return expert_parameters / parameters * (1 - 1 / layers) / 4


def counts_of(optimizer: ScheduledOptimizer, steps: int, skipped: int, accumulation: int) -> dict[str, Any]:
    """The record's ``counts``: measured optimizer calls and hook firings over the steps that ran."""
    updates = accumulation if optimizer.hook_firings and accumulation > 1 else 1
    return {
        "steps": steps,
        "skipped_steps": skipped,
        "optimizer_calls_per_step": optimizer.optimizer_calls / steps if steps else None,
        "hook_firings_per_step": optimizer.hook_firings / steps if steps else None,
        "updates_per_step": updates,
    }
