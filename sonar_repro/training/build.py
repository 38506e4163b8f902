"""From a config to the objects of a run: optimizer, learning-rate schedule, and the facts about its model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..config.identity import accumulation_mode
from ..config.schema import Config
from ..methods import Schedule, ScheduledOptimizer
from ..models.experts import find_expert_tensors
from ..optim.factory import make_factory


def learning_rate(config: Config, step: int, warmup_steps: int | None = None) -> float:
    """Learning rate of step k, from 1: peak*k/W in warm-up, then cosine to the final value at the last step."""
    peak, final = config.learning_rate, config.final_learning_rate
    warmup = config.warmup_steps if warmup_steps is None else warmup_steps
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
    hyper = dict(config.optimizer.hyper)
    if config.task.options.get("diagnosis") and config.optimizer.kind in ("mesh", "mesh_b"):
        hyper.setdefault("diagnostics", True)  # a shadow of the hidden momentum, to compare it with
    factory = make_factory(config.optimizer.kind, lr=config.learning_rate, **hyper)
    method = config.method
    return ScheduledOptimizer(
        model,
        factory,
        Schedule(in_backward=method.in_backward, granularity=method.granularity, clip=method.clip),
        max_grad_norm=method.max_grad_norm,
        accumulation=config.accumulation,
        accumulation_mode=accumulation_mode(config),
        on_nonfinite=method.on_nonfinite,
        nonfinite_check=method.nonfinite_check,
        **method.options,
    )


def make_scheduler(config: Config, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """A LambdaLR that gives step k the rate :func:`learning_rate` says: its epoch k-1 is step k.

    A parameter group with a ``warmup_share`` of its own (MESH: 3% under AdamW, 10% elsewhere) warms up by that, unless
    the command sets ``warmup_steps``.
    """
    peak = config.learning_rate
    asked = config.optimizer.warmup_steps is None or config.warmup_steps != config.optimizer.warmup_steps

    def factor_of(group: dict[str, Any]) -> Callable[[int], float]:
        share = None if asked else group.get("warmup_share")
        warmup = config.warmup_steps if share is None else round(share * config.steps)
        return lambda epoch: learning_rate(config, epoch + 1, warmup) / peak if peak else 0.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, [factor_of(group) for group in optimizer.param_groups])


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


def state_bytes(optimizer: ScheduledOptimizer) -> dict[str, int]:
    """Bytes of the tensors that the inner optimizers hold; hidden momentum, which lives in gradient buffers, apart."""
    hidden = sum(o.hidden_buffer_bytes() for o in inner_optimizers(optimizer) if hasattr(o, "hidden_buffer_bytes"))
    return {"optimizer_state_bytes": optimizer.optimizer_state_bytes(), "hidden_buffer_bytes": hidden}


def state_tensors(optimizer: ScheduledOptimizer) -> list[torch.Tensor]:
    """Every tensor that the inner optimizers keep between steps."""
    states = [state for inner in inner_optimizers(optimizer) for state in inner.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def inner_optimizers(optimizer: ScheduledOptimizer) -> list[torch.optim.Optimizer]:
    """The optimizers behind the schedule."""
    return [inner.optimizer for inner in optimizer._inners]


def roles_of(optimizer: ScheduledOptimizer) -> list[dict[str, Any]] | None:
    """Which parameters hold which state, a row a role; None for optimizers that assign no roles."""
    rows = []
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            if "rule" not in group:
                return None
            states = [inner.state[p] for p in group["params"] if p in inner.state]
            held = [(k, v) for state in states for k, v in state.items() if isinstance(v, torch.Tensor)]
            buffered = "H" if group.get("momentum") == "hidden" else None  # lives in the gradient buffer, not in state
            tensors = [(k, v) for k, v in held if k != buffered]
            rows.append(
                {
                    "role": group["name"],
                    "rule": group["rule"],
                    "tensors": len(group["params"]),
                    "parameters": sum(p.numel() for p in group["params"]),
                    "state": ", ".join(sorted({k for k, _ in tensors})) or None,
                    "gradient_buffer": buffered,
                    "state_bytes": sum(v.numel() * v.element_size() for _, v in tensors),
                }
            )
    return rows


def hidden_momentum(optimizer: ScheduledOptimizer) -> dict[str, Any] | None:
    """What MESH reports of hidden momentum (its implementation section); None for optimizers without one."""
    for inner in inner_optimizers(optimizer):
        if hasattr(inner, "diagnostics") and inner.hidden_buffer_bytes():
            return inner.diagnostics()
    return None


def saving_bound(expert_parameters: int, parameters: int, layers: int) -> float:
    """Largest relative saving of in-backward experts when weights, gradients and two moments share a dtype: f(1-1/L)/4.

    f is the expert share of the parameters. Of the four equal parts one is gradients; hooks free all but one layer's.
    """
    return expert_parameters / parameters * (1 - 1 / layers) / 4


def counts_of(optimizer: ScheduledOptimizer, steps: int, skipped: int, accumulation: int) -> dict[str, Any]:
    """The record's ``counts``: measured optimizer calls and hook firings over the steps that ran."""
    updates = accumulation if optimizer.accumulation_mode == "update_each" else 1
    guarded = {} if optimizer.on_nonfinite == "off" else {"skipped_tensors": optimizer.skipped_updates}
    return {
        "steps": steps,
        "skipped_steps": skipped,
        "optimizer_calls_per_step": optimizer.optimizer_calls / steps if steps else None,
        "hook_firings_per_step": optimizer.hook_firings / steps if steps else None,
        "updates_per_step": updates,
        **guarded,
        **({"slices_with_fp32_state": optimizer.slices_with_fp32_state} if optimizer.slices_with_fp32_state else {}),
    }
