"""Which role each parameter plays, found by module identity: vocabulary, one_d, dense, routed, shared.

* **routed**: the batched expert tensors of :func:`find_expert_tensors`, and matrices inside per-expert module lists;
* **shared**: the matrices of a shared-expert MLP (:func:`shared_expert_modules`);
* **vocabulary**: the weights of ``get_input_embeddings()`` and ``get_output_embeddings()``, tied ones once;
* **one_d**: whatever is a vector once axes of size 1 are dropped, and expert biases ``[E, .]`` (a vector an expert);
* **dense**: every other matrix; a convolution ``[out, ...]`` counts as the matrix ``[out, rest]``.

The rule never looks at ``ndim`` alone: a fused expert tensor is a batch of matrices (:mod:`.layouts`), and neither is a
router's 2-D weight an expert. Each parameter gets exactly one role.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.nn import Parameter

from ..errors import UserError
from ..models.experts import find_expert_tensors, module_list_experts
from .layouts import Layout, expert_layouts, mlp_layouts

ROLES = ("vocabulary", "one_d", "dense", "routed", "shared")
Named = Sequence[tuple[str, Parameter]]


@dataclass(frozen=True)
class ParameterRole:
    """One trainable parameter, its role, and how to see it as logical matrices (``None`` for a vector)."""

    name: str
    parameter: Parameter
    role: str
    layout: Layout | None

    @property
    def matrices(self) -> int:
        return 0 if self.layout is None else sum(view.shape[0] for view in self.layout.views(self.parameter))


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile wrappers."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        else:
            return model


def shared_expert_modules(model: nn.Module) -> list[tuple[str, dict[str, Layout]]]:
    """(path, layouts) of the shared-expert MLPs: MLPs that stand beside the routed experts of a layer.

    A module counts as an MLP by its matrices alone: one ``[D, I]`` and one or two ``[I, D]`` (or a fused ``[2I, D]``),
    with equal leading axes if they are batched. Two places are searched: the siblings of the experts module in its
    MoE block (also one list deep), and, for families that keep the shared MLP beside the block (granitemoeshared),
    siblings of the block whose attribute name has ``shared`` in it. No router or gate has these shapes.
    """
    modules = dict(model.named_modules())
    experts = {e.module_name for e in find_expert_tensors(model, include_frozen=True)} | set(module_list_experts(model))
    found: dict[str, dict[str, Layout]] = {}
    for path in sorted(experts):
        block = path.rpartition(".")[0]
        beside = [
            (place, module) for place, module in _siblings(modules, block) if "shared" in place.rpartition(".")[2]
        ]
        for place, module in _siblings(modules, path) + beside:
            if any(e == place or e.startswith(place + ".") for e in experts):
                continue
            for candidate, mlp in _mlp_candidates(place, module):
                if layouts := mlp_layouts(mlp):
                    found[candidate] = layouts
    return list(found.items())


def _siblings(modules: dict[str, nn.Module], path: str) -> list[tuple[str, nn.Module]]:
    if not path:
        return []
    parent = path.rpartition(".")[0]
    named = [(f"{parent}.{name}" if parent else name, m) for name, m in modules[parent].named_children()]
    return [(place, module) for place, module in named if place != path]


def _mlp_candidates(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [(f"{path}.{name}", child) for name, child in module.named_children()]
    return [(path, module)]


def vocabulary_parameters(model: nn.Module) -> list[Parameter]:
    """Weights of the input and output embeddings, tied ones once.

    Raises UserError for a model without ``get_input_embeddings`` (give it one, as transformers models have).
    """
    found: dict[int, Parameter] = {}
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        method = getattr(model, getter, None)
        if method is None:
            raise UserError(
                f"{type(model).__name__} has no {getter}(): roles need to know the vocabulary; add the method "
                "(transformers models have it)"
            )
        try:
            module = method()
        except NotImplementedError:
            module = None
        weight = getattr(module, "weight", None)
        if isinstance(weight, Parameter):
            found[id(weight)] = weight
    return list(found.values())


@dataclass(frozen=True)
class _Fact:
    """One parameter of a model; holding it guards against a reused id."""

    parameter: Parameter
    role: str
    layout: Layout | None


@dataclass(frozen=True)
class _Facts:
    """A model's parameters by identity, and by storage for per-expert views."""

    by_id: dict[int, _Fact]
    by_storage: dict[int, _Fact]
    roles: frozenset[str]

    def of(self, parameter: Parameter) -> _Fact | None:
        fact = self.by_id.get(id(parameter))
        return fact if fact is not None and fact.parameter is parameter else None

    def of_view(self, parameter: Parameter) -> _Fact | None:
        """An expert's slice of a batched parameter is one matrix (or fused pair) of the same layout."""
        fact = self.by_storage.get(parameter.untyped_storage()._cdata)
        if fact is None or fact.layout is None:
            return fact
        return replace(fact, layout=replace(fact.layout, batch=1))


_facts_of: weakref.WeakKeyDictionary[nn.Module, _Facts] = weakref.WeakKeyDictionary()


def _is_vector(parameter: Parameter) -> bool:
    return sum(size > 1 for size in parameter.shape) <= 1


def _facts(model: nn.Module) -> _Facts:
    modules = dict(model.named_modules())
    role_of: dict[int, tuple[str, Layout | None]] = {}
    tensors = find_expert_tensors(model, include_frozen=True)
    for tensor, layout in zip(tensors, expert_layouts(model, tensors)):
        role_of[id(tensor.parameter)] = ("routed", layout) if layout is not None else ("one_d", None)
    groups = [("routed", f"{path}.{name}", mlp_layouts(child) or {}) for path in module_list_experts(model)
              for name, child in modules[path].named_children()]  # fmt: skip
    groups += [("shared", path, layouts) for path, layouts in shared_expert_modules(model)]
    for role, path, layouts in groups:
        for name, parameter in modules[path].named_parameters():
            if not _is_vector(parameter):
                role_of.setdefault(id(parameter), (role, layouts.get(name, Layout())))
    for parameter in vocabulary_parameters(model):
        role_of[id(parameter)] = ("vocabulary", Layout())
    for parameter in model.parameters():
        plain = ("one_d", None) if _is_vector(parameter) else ("dense", Layout())
        role_of.setdefault(id(parameter), plain)
    by_id = {id(p): _Fact(p, *role_of[id(p)]) for p in model.parameters()}
    by_storage = {p.untyped_storage()._cdata: by_id[id(p)] for p in model.parameters()}
    return _Facts(by_id, by_storage, frozenset(fact.role for fact in by_id.values()))


def assign_roles(named: Named, model: nn.Module, *, needed: Collection[str] = ()) -> list[ParameterRole]:
    """The role of each given parameter, in order.

    Args:
        named: any subset of the model's parameters, or per-expert views of its batched ones (found by their storage).
        needed: roles that the model must have (an ablation of a role that is not there would run something else).

    Raises:
        UserError: a parameter that is given twice, is not the model's, or is sharded; a needed role is missing.
    """
    model = unwrap(model)
    facts = _facts_of.get(model)
    if facts is None or any(facts.of(p) is None and facts.of_view(p) is None for _, p in named):
        facts = _facts_of[model] = _facts(model)
    if missing := [role for role in ROLES if role in needed and role not in facts.roles]:
        what = "routed experts: MESH needs a mixture of experts; use variant direct"
        what = what if missing == ["routed"] else f"parameter with the role {missing[0]}: leave roles.{missing[0]} out"
        raise UserError(f"{type(model).__name__} has no {what}")
    twice = [name for name, count in Counter(id(p) for _, p in named).items() if count > 1]
    if twice:
        raise UserError(f"parameter {dict((id(p), n) for n, p in named)[twice[0]]} is given twice: own each once")
    roles = []
    for name, parameter in named:
        if hasattr(parameter, "device_mesh"):
            raise UserError(f"{name} is sharded (DTensor): Sinkhorn needs whole matrices; use DDP, or optimizer adamw")
        fact = facts.of(parameter) or facts.of_view(parameter)
        if fact is None:
            raise UserError(f"{name} is not a parameter of {type(model).__name__}: pass the model that owns it")
        roles.append(ParameterRole(name, parameter, fact.role, fact.layout))
    return roles
