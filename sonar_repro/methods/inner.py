"""Inner optimizers: which parameters each serves, and how its hyperparameters follow the outer groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..errors import Unsupported, UserError
from .direct import DirectAdamW
from .nonfinite import Guard, Verdict

Named = Sequence[tuple[str, Parameter]]
Factory = Callable[[Named, nn.Module], torch.optim.Optimizer]
# How a kernel is launched is a property of the machine, not of the run: it is neither scheduled nor restored.
EXECUTION_KEYS = frozenset({"fused", "foreach", "capturable", "differentiable", "params", "param_names"})


class Inner:
    """An inner optimizer over some parameters (or over one expert's view of a batched parameter)."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: Named) -> None:
        self.optimizer = optimizer
        self.named = list(named)
        # (inner group, outer group, keys) for each inner group
        self.links: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = []
        self._stepped = False
        self._check_cover()

    def _check_cover(self) -> None:
        """The factory's optimizer owns exactly what it was given, each once."""
        kind = type(self.optimizer).__name__
        owned = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        missing = [name for name, p in self.named if id(p) not in set(owned)]
        if missing:
            raise UserError(f"{kind} leaves out {missing[0]} (and {len(missing) - 1} more): it would never be updated")
        if len(owned) != len(self.named):
            raise UserError(f"{kind} owns {len(owned)} tensors where {len(self.named)} were given: own each one once")

    def split_groups(self, kind_of: dict[int, str]) -> None:
        """Split groups that mix experts and others, so that each outer group can have its own learning rate."""
        groups = []
        for group in self.optimizer.param_groups:
            for kind in dict.fromkeys(kind_of[id(p)] for p in group["params"]):
                groups.append({**group, "params": [p for p in group["params"] if kind_of[id(p)] == kind]})
        self.optimizer.param_groups[:] = groups

    def sync(self) -> None:
        """Copy every hyperparameter from the outer group, so that the scheduler's learning rate is the one used."""
        for group, outer, keys in self.links:
            for key in keys:
                group[key] = outer[key]

    def step(self, guard: Guard | None = None, verdict: Verdict = False) -> bool:
        """One step of the inner optimizer, unless ``verdict`` forbids it; whether it was called."""
        self.sync()
        if guard is None:
            self.optimizer.step()
            return True
        made_state = self._stepped or any(self.optimizer.state.get(p) for _, p in self.named)
        called = guard.step(self.optimizer, verdict, made_state)
        self._stepped |= called
        return called

    def label(self) -> str:
        """Its class and kernel, such as ``torch.optim.AdamW(fused)``."""
        kind = type(self.optimizer)
        module = "torch.optim" if kind.__module__.startswith("torch.optim") else kind.__module__.split(".")[0]
        kernel = next((k for k in ("fused", "foreach") if self.optimizer.param_groups[0].get(k)), None)
        return f"{module}.{kind.__name__}" + (f"({kernel})" if kernel else "")


class HookedTensor:
    """A parameter that is updated inside backward, as a whole or expert by expert."""

    def __init__(self, name: str, parameter: Parameter, num_experts: int | None = None) -> None:
        self.name = name
        self.parameter = parameter
        self.num_experts = num_experts  # None: one update for the whole tensor
        self.inners: list[Inner] = []
        self.views: list[Parameter] = []
        self.firings = 0  # since the last end of step
        self.spoiled = False  # accumulation_mode=fold: a micro-batch of this step was not finite
        self._direct: DirectAdamW | None = None
        if num_experts is not None:
            if hasattr(parameter, "device_mesh"):
                raise Unsupported(f"granularity=expert on the sharded parameter {name}: use granularity=tensor")
            self.views = [Parameter(piece) for piece in expert_slices(parameter.detach(), num_experts)]

    def build(self, factory: Factory, model: nn.Module) -> None:
        """One inner optimizer for the tensor, or one an expert over its view, named ``name[e]``."""
        targets = [(f"{self.name}[{e}]", v) for e, v in enumerate(self.views)] or [(self.name, self.parameter)]
        self.inners = [Inner(factory([target], model), [target]) for target in targets]
        # Expert by expert is the baseline whose cost is E calls of an optimizer: they stay such calls.
        self._direct = None if self.views else DirectAdamW.of(self.inners[0].optimizer, self.parameter)

    def pieces(self, gradient: Tensor | None = None) -> Iterator[tuple[Inner, Parameter, Tensor | None]]:
        """(inner optimizer, what it owns, its part of ``gradient``): the whole tensor, or one piece an expert."""
        if not self.views:
            yield self.inners[0], self.parameter, gradient
            return
        self._follow_storage()
        parts = [None] * len(self.views) if gradient is None else expert_slices(gradient, self.num_experts)
        yield from zip(self.inners, self.views, parts)

    def update(self, guard: Guard | None = None, verdict: Verdict = False) -> int:
        """One optimizer step on the gradient at hand; returns the number of optimizer calls made.

        Args:
            verdict: the ``guard``'s, on this gradient: nothing changes if it is bad.
        """
        if verdict is True:
            return 0
        if self._direct is not None:
            self.inners[0].sync()
            if self._direct.step(self.parameter.grad, verdict if isinstance(verdict, Tensor) else None):
                torch.autograd.graph.increment_version(self.parameter)
                return 1
        calls = 0
        for inner, target, gradient in self.pieces(self.parameter.grad):
            target.grad = gradient
            calls += inner.step(guard, verdict)
            target.grad = None
        # Fused AdamW and bitsandbytes do not bump the version counter; without this autograd could not see that a
        # weight changed under a graph that still needs it.
        torch.autograd.graph.increment_version(self.parameter)
        return calls

    def _follow_storage(self) -> None:
        """``model.to(...)`` swaps a parameter's storage under its views: point them at the new one."""
        here, view = self.parameter.detach(), self.views[0]
        if view.untyped_storage()._cdata != here.untyped_storage()._cdata or view.dtype != here.dtype:
            for view, piece in zip(self.views, expert_slices(here, self.num_experts)):
                view.data = piece


def expert_slices(tensor: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """The E slices of ``[E, ...]``, or the E blocks of k rows of ``[E*k, ...]`` (views, no copy)."""
    if tensor.shape[0] != num_experts:
        tensor = tensor.unflatten(0, (num_experts, -1))
    return tensor.unbind(0)


def outer_groups(owned: Sequence[Any], units: Sequence[HookedTensor], inners: Sequence[Inner]) -> list[dict[str, Any]]:
    """The groups that schedulers act on: experts and other, apart where the factory set hyperparameters apart.

    Every inner group is linked to its outer group. ``owned`` is a list of :class:`~.attachment.Owned`.
    """
    outer_of = {id(o.parameter): o.parameter for o in owned}
    kind_of = {id(o.parameter): o.kind for o in owned}
    for unit in units:
        for view in unit.views:
            outer_of[id(view)] = unit.parameter
            kind_of[id(view)] = "experts"
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for inner in inners:
        inner.split_groups(kind_of)
        for group in inner.optimizer.param_groups:
            hyper = {k: v for k, v in group.items() if k not in EXECUTION_KEYS and k != "name"}
            kind, label = kind_of[id(group["params"][0])], group.get("name")
            name = f"{kind}/{label}" if label else kind
            outer = groups.setdefault((name, repr(sorted(hyper.items()))), {"params": [], "name": name, **hyper})
            outer["params"] += [outer_of[id(p)] for p in group["params"]]
            inner.links.append((group, outer, tuple(hyper)))
    order = {id(o.parameter): i for i, o in enumerate(owned)}
    for outer in groups.values():
        unique = {id(p): p for p in outer["params"]}
        outer["params"] = sorted(unique.values(), key=lambda p: order[id(p)])
    return sorted(groups.values(), key=lambda g: (g["name"], order[id(g["params"][0])]))
