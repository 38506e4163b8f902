"""A fused AdamW over one tensor, stepped by its kernel alone: what a hook can do without."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import optimizer as optim


class DirectAdamW:
    """Does what ``torch.optim.AdamW(fused=True).step()`` does for one dense tensor, and nothing else.

    Between two layers of a backward pass ``step`` finds the caches full of tensors, and its argument checks and
    grouping take 0.2 to 0.3 ms a call on a CPU. The two kernels are the same, so every bit of the result is.
    Hyperparameters, state and hooks are read at each call: what a scheduler or ``load_state_dict`` changes is followed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: Parameter) -> None:
        self.optimizer, self.parameter = optimizer, parameter

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, parameter: Parameter) -> DirectAdamW | None:
        """One for ``optimizer`` if it is AdamW itself, over ``parameter`` alone and unsharded; else ``None``."""
        groups = optimizer.param_groups
        alone = len(groups) == 1 and len(groups[0]["params"]) == 1 and groups[0]["params"][0] is parameter
        plain = type(optimizer) is torch.optim.AdamW and type(parameter) is Parameter and not parameter.is_complex()
        return DirectAdamW(optimizer, parameter) if alone and plain else None

    def step(self, gradient: Tensor, found_inf: Tensor | None = None) -> bool:
        """Update the tensor with ``gradient``, or return False: the first step, hooks on it, an unusual setting.

        ``found_inf``: 0-d float32 on the device; where it is 1 nothing changes.
        """
        group = self.optimizer.param_groups[0]
        state, lr, (beta1, beta2) = self.optimizer.state.get(self.parameter), group["lr"], group["betas"]
        if not state or self._watched() or not group["fused"] or group["amsgrad"] or gradient.is_sparse:
            return False
        if type(lr) is not float or type(beta1) is not float or type(beta2) is not float:
            return False  # tensors, which the kernel's caller moves about
        step = [state["step"]]
        torch._foreach_add_(step, 1)
        torch._fused_adamw_(
            [self.parameter], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], step,
            lr=lr, beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
            amsgrad=False, maximize=group["maximize"], found_inf=found_inf,
        )  # fmt: skip
        if found_inf is not None:
            torch._foreach_sub_(step, [found_inf])  # as torch.optim.adam does
        return True

    def _watched(self) -> bool:
        """Whether somebody is to see the step, or has replaced it (a scheduler on the inner optimizer does)."""
        own = self.optimizer
        return bool(
            own._optimizer_step_pre_hooks
            or own._optimizer_step_post_hooks
            or optim._global_optimizer_pre_hooks
            or optim._global_optimizer_post_hooks
            or "step" in own.__dict__
        )
