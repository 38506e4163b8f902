"""Inner optimizers: which parameters each serves, and how its hyperparameters follow the outer groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import Unsupported, UserError

Named = Sequence[tuple[str, Parameter]]
# How a kernel is launched is a property of the machine, not of the run: it is neither scheduled nor restored.
EXECUTION_KEYS = frozenset({"fused", "foreach", "capturable", "differentiable", "params", "param_names"})


class Inner:
    """An inner optimizer over some parameters (or over one expert's view of a batched parameter)."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: Named) -> None:
        self.optimizer = optimizer
        self.named = list(named)
        self.links: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = []
        self._check_cover()

    def _check_cover(self) -> None:
        """The factory's optimizer owns exactly what it was given (DESIGN rule 6), each once."""
        given = {id(p): name for name, p in self.named}
        owned = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        kind = type(self.optimizer).__name__
        missing = [name for key, name in given.items() if key not in set(owned)]
        if missing:
            raise UserError(f"optimizer {kind} leaves out {missing[0]} (and {len(missing) - 1} more): it would never be updated")
        if len(owned) != len(given):
            raise UserError(f"optimizer {kind} owns {len(owned)} tensors where {len(given)} were given: each must be owned once")

    def split_groups(self, kind_of: dict[int, str]) -> None:
        """Split groups that mix experts and others, so that each outer group can have its own learning rate."""
        groups = []
        for group in self.optimizer.param_groups:
            kinds = dict.fromkeys(kind_of[id(p)] for p in group["params"])
            for kind in kinds:
                groups.append({**group, "params": [p for p in group["params"] if kind_of[id(p)] == kind]})
        self.optimizer.param_groups[:] = groups

    def sync(self) -> None:
        """Copy every hyperparameter from the outer group, so that the scheduler's learning rate is the one used."""
        for group, outer, keys in self.links:
            for key in keys:
                group[key] = outer[key]

    def step(self) -> None:
        self.sync()
        self.optimizer.step()


class HookedTensor:
    """A parameter that is updated inside backward, as a whole or expert by expert."""

    def __init__(self, name: str, parameter: Parameter, num_experts: int | None = None) -> None:
        self.name = name
        self.parameter = parameter
        self.num_experts = num_experts  # None: one update for the whole tensor
        self.inners: list[Inner] = []
        self.views: list[Parameter] = []
        self.firings = 0  # since the last end of step
        if num_experts is not None:
            if hasattr(parameter, "device_mesh"):
                raise Unsupported(f"granularity=expert on the sharded parameter {name}: use granularity=tensor")
            self.views = [Parameter(piece) for piece in _slices(parameter.detach(), num_experts)]

    def targets(self) -> list[tuple[str, Parameter]]:
        """What its inner optimizers own: the parameter, or one view an expert named ``name[e]``."""
        if self.num_experts is None:
            return [(self.name, self.parameter)]
        return [(f"{self.name}[{e}]", view) for e, view in enumerate(self.views)]

    def update(self) -> int:
        """One optimizer step on the gradient at hand; returns the number of optimizer calls made."""
        if self.num_experts is None:
            self.inners[0].step()
        else:
            self._update_views()
        # Fused AdamW and bitsandbytes do not bump the version counter; without this autograd could not see that a
        # weight changed under a graph that still needs it (views of .data never bump it).
        torch.autograd.graph.increment_version(self.parameter)
        return len(self.inners)

    def _update_views(self) -> None:
        self._follow_storage()
        for inner, view, grad in zip(self.inners, self.views, _slices(self.parameter.grad, self.num_experts)):
            view.grad = grad
            inner.step()
            view.grad = None

    def _follow_storage(self) -> None:
        """``model.to(...)`` swaps a parameter's storage under its views: point them at the new one."""
        here, view = self.parameter.detach(), self.views[0]
        if view.untyped_storage()._cdata != here.untyped_storage()._cdata or view.dtype != here.dtype:
            for view, piece in zip(self.views, _slices(here, self.num_experts)):
                view.data = piece


def _slices(tensor: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """The E slices of ``[E, ...]``, or the E blocks of k rows of ``[E*k, ...]`` (views, no copy)."""
    if tensor.shape[0] != num_experts:
        tensor = tensor.unflatten(0, (num_experts, -1))
    return tensor.unbind(0)
