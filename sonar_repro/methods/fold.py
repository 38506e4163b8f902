"""``accumulation_mode=fold``: micro-batch gradients go into the moments as they are freed; one update a step.

Let g_1..g_A be the gradients of a step's micro-batches, each of loss/A, and G their sum, which the standard schedule
keeps.

AdamW. The first moment is linear in the gradient, so folding is exact: m <- b1 m + (1-b1) g_1, then m <- m + (1-b1)
g_a, which ends at b1 m + (1-b1) G. The second moment is not linear. Each micro-batch adds its own square:

    v_fold = b2 v + (1-b2) sum_a g_a^2        v_std = b2 v + (1-b2) G^2
    v_std - v_fold = (1-b2) sum_{a != b} g_a g_b

The cross terms would need G itself, that is, the memory that folding saves. They vanish in expectation when the
micro-batches' gradients are uncorrelated (noise dominates, as in fine-tuning with tiny batches), and are largest when
all g_a agree: then the new part of v_std is A times that of v_fold, and the folded update is up to sqrt(A) times
longer; never more, since (sum g_a)^2 <= A sum g_a^2. (§4.4's update-at-each schedule has b2^A and A updates.)
AdamA (Zhang et al. 2023) folds in the same way.

SGD with momentum. The buffer is linear: buf <- mu buf + (g_1 + wd W), then buf <- buf + g_a, is the standard schedule
up to the rounding of the sum.

Lion has two different mixtures of m and G and one buffer; Nesterov momentum needs G beside the buffer: refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import UserError
from .inner import HookedTensor

# An update's fp32 temporaries cover at most this many elements, or a sixteenth of the tensor if that is more: small
# beside a layer's gradient, and few enough kernel launches.
_CHUNK, _PARTS = 1_000_000, 16


def check_foldable(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError unless the moments can take micro-batch gradients one by one."""
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, torch.optim.SGD):
        able = "adamw and sgd with momentum can"
        raise UserError(f"accumulation_mode=fold: {kind.__name__} cannot fold gradients into its state; {able}")
    for group in optimizer.param_groups:
        for key in ("amsgrad", "maximize", "nesterov", "dampening"):
            if group.get(key):
                raise UserError(
                    f"accumulation_mode=fold: {kind.__name__} with {key}={group[key]} cannot fold; leave it out"
                )
        if kind is torch.optim.SGD and group["momentum"] == 0:
            raise UserError("accumulation_mode=fold: momentum=0 leaves no state to fold into; set optimizer momentum")


def fold_in(unit: HookedTensor, first: bool) -> None:
    """Add the gradient at hand to the moments; the ``first`` of a step decays them."""
    for inner, target, gradient in unit.pieces(unit.parameter.grad):
        inner.sync()
        group, state = inner.optimizer.param_groups[0], inner.optimizer.state[target]
        update = _fold_sgd if isinstance(inner.optimizer, torch.optim.SGD) else _fold_adamw
        update(group, state, target, gradient, first)


def apply(unit: HookedTensor) -> int:
    """The step's one update, from the folded moments; returns the number of updates made."""
    for inner, target, _ in unit.pieces():
        inner.sync()
        group, state = inner.optimizer.param_groups[0], inner.optimizer.state[target]
        if isinstance(inner.optimizer, torch.optim.SGD):
            target.add_(state["momentum_buffer"], alpha=-group["lr"])
        else:
            _apply_adamw(group, state, target)
    torch.autograd.graph.increment_version(unit.parameter)
    return len(unit.inners)


def _fold_sgd(group: dict[str, Any], state: dict[str, Any], p: Parameter, g: Tensor, first: bool) -> None:
    buffer = state.get("momentum_buffer")
    if buffer is None:
        buffer = state["momentum_buffer"] = torch.zeros_like(p)
    if first:
        buffer.mul_(group["momentum"])
        if group["weight_decay"]:
            buffer.add_(p, alpha=group["weight_decay"])
    buffer.add_(g)


def _fold_adamw(group: dict[str, Any], state: dict[str, Any], p: Parameter, g: Tensor, first: bool) -> None:
    beta1, beta2 = group["betas"]
    if not state:  # as torch.optim.AdamW makes it
        device = p.device if group["fused"] or group["capturable"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
    if first:
        state["exp_avg"].lerp_(g, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
    else:
        state["exp_avg"].add_(g, alpha=1 - beta1)
        state["exp_avg_sq"].addcmul_(g, g, value=1 - beta2)


def _apply_adamw(group: dict[str, Any], state: dict[str, Any], p: Parameter) -> None:
    """W <- (1 - lr wd) W - lr m_hat / (sqrt(v_hat) + eps), in fp32 as the fused kernel does, some experts at a time."""
    beta1, beta2 = group["betas"]
    state["step"] += 1
    step = state["step"].to(p.device)
    size = group["lr"] / (1 - beta1**step)  # 0-d tensors: no synchronisation, and fake tensors have no values
    root = (1 - beta2**step).sqrt()
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    for w, m, v in _chunks(p, state["exp_avg"], state["exp_avg_sq"]):
        denominator = v.to(wide, copy=True).sqrt_().div_(root).add_(group["eps"])
        update = m.to(wide, copy=True).div_(denominator).mul_(size)
        w.copy_(w.to(wide, copy=True).mul_(1 - group["lr"] * group["weight_decay"]).sub_(update))


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor, some at a time."""
    rows, numel = tensors[0].shape[0], max(1, tensors[0].numel())
    step = max(1, rows * max(_CHUNK, numel // _PARTS) // numel)
    for start in range(0, rows, step):
        yield tuple(t.narrow(0, start, min(step, rows - start)) for t in tensors)
