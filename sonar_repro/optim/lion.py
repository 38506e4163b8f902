"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2): one moment, element-wise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter


def lion_update(p: Tensor, g: Tensor, m: Tensor, lr: float, beta1: float, beta2: float, weight_decay: float) -> None:
    """One in-place update; ``p``, ``g``, ``m`` of one shape and dtype.

    ``p <- (1 - lr wd) p - lr sign(beta1 m + (1 - beta1) g)``; ``m <- beta2 m + (1 - beta2) g``.
    """
    direction = m.mul(beta1).add_(g, alpha=1 - beta1).sign_()
    p.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)
    m.mul_(beta2).add_(g, alpha=1 - beta2)


class Lion(torch.optim.Optimizer):
    """Lion with its only state, ``exp_avg``, in the parameter's dtype.

    Args:
        params: parameters or groups.
        lr, betas, weight_decay: as in the paper (decoupled decay).
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                lion_update(p, p.grad, state["exp_avg"], group["lr"], *group["betas"], group["weight_decay"])
        return loss


def build(named_parameters: Sequence[tuple[str, Parameter]], model: nn.Module, **hyper: Any) -> Lion:
    """Factory entry: Lion over the given parameters."""
    return Lion([p for _, p in named_parameters], **hyper)
