"""Which parameters an optimizer owns, and the checks that the model it trains is still the one it was attached to."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import nn
from torch.nn import Parameter

from ..errors import UserError
from ..models.experts import (
    RULE,
    Experts,
    ExpertTensor,
    expert_counts,
    find_expert_tensors,
    honours_interface,
    left_out,
    module_list_experts,
)

# Wrappers that put a component into parameter names without changing what the parameter is.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical_name(name: str) -> str:
    """A parameter's name without the components that torch.compile and checkpoint wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True)
class Owned:
    """One trainable parameter: tied weights appear once, under their first name."""

    name: str
    parameter: Parameter
    expert: ExpertTensor | None

    @property
    def kind(self) -> str:
        return "experts" if self.expert is not None else "other"


class Attachment:
    """The trainable parameters of a model and where each one hangs in the module tree.

    Raises:
        UserError: nothing is trainable; or experts are needed and none is batched and trainable.
    """

    def __init__(self, model: nn.Module, need_experts: bool, named: Experts | None = None) -> None:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module  # the names in a state dict are those of the bare model
        self.model = model
        found = find_expert_tensors(model, experts=named)
        experts = {id(e.parameter): e for e in found}
        every = list(model.named_parameters())
        self.owned = [Owned(canonical_name(n), p, experts.get(id(p))) for n, p in every if p.requires_grad]
        self.frozen = [(canonical_name(n), p) for n, p in every if not p.requires_grad]
        if not self.owned:
            raise UserError(f"{type(model).__name__} has no trainable parameter: set requires_grad on what to train")
        if need_experts:
            _refuse_parametrized(model, found)
        if need_experts and not experts:
            raise UserError(_no_experts(model, named))
        if need_experts:
            _check_left_out(model, found, by_rule=named is None)
        self._leaves = _leaves(model, {id(o.parameter): o.name for o in self.owned})
        self._edges = _edges(model, {module for module, _, _, _ in self._leaves})

    def leaves(self, parameters: set[int]) -> list[tuple[nn.Module, str, Parameter, str]]:
        """(module, attribute, parameter, name) of every place where one of these (by id) hangs."""
        return [leaf for leaf in self._leaves if id(leaf[2]) in parameters]

    def check(self) -> None:
        """Cheap check of every step: no owned parameter was replaced, no module above one, nothing was unfrozen."""
        for module, attribute, parameter, name in self._leaves:
            if module._parameters.get(attribute) is not parameter:
                raise _replaced(name, "the parameter object was replaced")
        for parent, key, child, path in self._edges:
            if parent._modules.get(key) is not child:
                raise _replaced(path, "the module was replaced")
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise RuntimeError(f"{name} was frozen when the optimizer was built: unfreeze first, then build it")

    def check_cover(self) -> None:
        """Full check: the model's trainable parameters are exactly the owned ones."""
        self.check()
        owned = {id(o.parameter) for o in self.owned}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in owned:
                raise RuntimeError(
                    f"{canonical_name(name)} is trainable but has no optimizer: build the optimizer last"
                )


def _replaced(name: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: {what} after the optimizer was attached (load_state_dict(assign=True), resizing, sharding do this) "
        "and its gradients would reach no optimizer: build the optimizer last"
    )


def _check_left_out(model: nn.Module, found: list[ExpertTensor], by_rule: bool) -> None:
    """Warn of batched tensors that count as "other"; refuse if their own kind was taken elsewhere in the model."""
    twins, others = left_out(model, found)
    if twins and by_rule:
        raise UserError(
            f"{found[0].name} is an expert tensor and {twins[0]} ({len(twins)} such) is not, though its module is of "
            f"the same class: {RULE}; set the attribute in every layer, or name the tensors with experts="
        )
    if rest := twins + others:
        warnings.warn(
            f"{rest[0]} ({len(rest)} such) has three or more dimensions and is not taken for an expert tensor, as "
            f"{found[0].name} is: it is updated with the rest; experts= says which tensors are experts",
            stacklevel=4,
        )


def _refuse_parametrized(model: nn.Module, found: list[ExpertTensor]) -> None:
    """An expert tensor under ``torch.nn.utils.parametrize`` hangs elsewhere and would count as "other"."""
    sizes = {e.num_experts for e in found}
    for path, module in model.named_modules():
        lists = module._modules.get("parametrizations")
        for attribute, chain in lists.items() if isinstance(lists, nn.ModuleDict) else ():
            for p in chain.parameters(recurse=False):
                batched = p.ndim >= 3 and p.requires_grad and p.shape[0] > 1
                if batched and (p.shape[0] in sizes | expert_counts(module) or honours_interface(module)):
                    raise UserError(
                        f"{path}.{attribute} is an expert tensor under a parametrization ({type(chain[0]).__name__}): "
                        "it cannot be updated as one; call torch.nn.utils.parametrize.remove_parametrizations, or use "
                        "standard_global_clip or standard_no_clip"
                    )


def _no_experts(model: nn.Module, named: Experts | None) -> str:
    who = type(model).__name__
    frozen = find_expert_tensors(model, include_frozen=True, experts=named)
    if frozen:
        return f"{who}: all {len(frozen)} expert tensors are frozen ({frozen[0].name}, ...): unfreeze them"
    lists = module_list_experts(model)
    instead = "use optimizer_in_backward (hooks every parameter), standard_global_clip or standard_no_clip"
    if lists:
        return f"{who} keeps its experts as module lists ({lists[0]} and {len(lists) - 1} more), not batched: {instead}"
    return f"{who} has no batched expert tensor: {instead}; or name them with experts=, for {RULE}"


def _leaves(model: nn.Module, owned: dict[int, str]) -> list[tuple[nn.Module, str, Parameter, str]]:
    return [
        (module, attribute, parameter, owned[id(parameter)])
        for module in model.modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in owned
    ]


def _edges(model: nn.Module, holders: set[nn.Module]) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """(parent, key, child, path) of every module on the way from the root to an owned parameter."""
    edges = []

    def visit(module: nn.Module, path: str, above: frozenset[int]) -> bool:
        needed = module in holders
        for key, child in module._modules.items():
            if child is None or id(child) in above:
                continue
            below = f"{path}.{key}" if path else key
            if visit(child, below, above | {id(child)}):
                edges.append((module, key, child, canonical_name(below)))
                needed = True
        return needed

    visit(model, "", frozenset({id(model)}))
    return edges
