"""Find the batched expert tensors of any transformers MoE by module contract, never by parameter names.

Four rules (measured exact on 75 of 76 tiny MoE families of transformers 5):

A. a module that honours ``ExpertsInterface`` (its ``__dict__`` has the four flags that ``use_experts_implementation``
   sets): its own parameters of two or more dimensions whose dim 0 is that of its 3-D parameters (weights ``[E, ., .]``
   and biases ``[E, .]``, but no norm inside the module);
B. an own parameter of three or more dimensions whose dim 0 equals an int attribute (> 1) with ``expert`` in its name,
   if one of its other dimensions is a width of the model (so an unrelated ``[8, 3, 3]`` beside ``num_experts=8`` is not
   taken);
C. an own 2-D parameter ``[E*k, .]``, E such an attribute and k another int attribute of the module (dbrx);
D. a ModuleList/ModuleDict of identical children, as many as such an attribute: per-expert modules, not batched.

A model that none of them fits names its experts itself (``experts=``).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn import Parameter

from ..errors import UserError

#: What names experts: parameter or module names and globs, modules, parameters, a predicate, or several of these.
Experts = str | nn.Module | Parameter | Callable[[str, Parameter], bool] | Iterable
RULE = (
    "a batched expert tensor is a parameter [E, ...] of a module that honours transformers' ExpertsInterface, or that "
    "has an int attribute with 'expert' in its name equal to E (self.num_experts = E on that very module)"
)
_INTERFACE_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


@dataclass(frozen=True)
class ExpertTensor:
    """One batched expert parameter ``[E, ...]`` (rule C: ``[E*k, ...]``, E slices of k rows)."""

    name: str  # as in model.named_parameters()
    parameter: Parameter
    module_name: str
    layer: int  # position of its experts module among all of them, 0..L-1
    num_experts: int  # E


def _int_attributes(module: nn.Module) -> dict[str, int]:
    return {k: v for k, v in vars(module).items() if isinstance(v, int) and not isinstance(v, bool) and v > 1}


def expert_counts(module: nn.Module) -> set[int]:
    """The module's int attributes (> 1) with ``expert`` in their names."""
    return {v for k, v in _int_attributes(module).items() if "expert" in k.lower()}


def honours_interface(module: nn.Module) -> bool:
    """Rule A: the flags that ``use_experts_implementation`` sets."""
    return all(flag in vars(module) for flag in _INTERFACE_FLAGS)


def _expert_parameters(module: nn.Module) -> list[tuple[str, Parameter, int]]:
    """(attribute, parameter, E) of the module's own batched expert parameters, by rules A, B and C.

    Of rule B without its condition on widths, which takes the whole model to judge (:func:`_unrelated`).
    """
    own = [(name, p) for name, p in module._parameters.items() if p is not None]
    if honours_interface(module):
        counts = {p.shape[0] for _, p in own if p.ndim == 3}
        return [(name, p, p.shape[0]) for name, p in own if p.ndim >= 2 and p.shape[0] in counts]
    counts = expert_counts(module) if own else set()
    if not counts:
        return []
    # Rule C: a parameter as long as an attribute with "expert" in it is a router's or a bias, not E blocks of k rows.
    widths = {v for k, v in _int_attributes(module).items() if "expert" not in k.lower()}
    products = {e * k: e for e in counts for k in widths if e * k not in counts}
    found = []
    for name, p in own:
        if p.ndim >= 3 and p.shape[0] in counts:
            found.append((name, p, p.shape[0]))
        elif p.ndim == 2 and p.shape[0] in products:
            found.append((name, p, products[p.shape[0]]))
    return found


def _unrelated(model: nn.Module) -> set[int]:
    """Ids of the parameters that rule B finds by their dim 0 but that no token is multiplied with.

    An expert's matrix shares a dimension with the hidden state, and so with a norm, a router or an embedding; or with
    another expert matrix of its module; or with an int attribute of it.
    """
    candidates: dict[nn.Module, list[Parameter]] = {}
    for module in model.modules():
        if not honours_interface(module):
            found = [p for _, p, _ in _expert_parameters(module) if p.ndim >= 3]
            if found:
                candidates[module] = found
    every = {id(p) for found in candidates.values() for p in found}
    widths = {n for p in model.parameters() if id(p) not in every and p.ndim <= 2 for n in p.shape}

    def related(module: nn.Module, p: Parameter) -> bool:
        named = {v for k, v in _int_attributes(module).items() if "expert" not in k.lower()}
        return bool((widths | named).intersection(p.shape[1:]))

    def beside(p: Parameter, others: list[Parameter]) -> bool:
        return any(set(p.shape[1:]).intersection(other.shape[1:]) for other in others if other is not p)

    some = any(related(module, p) for module, found in candidates.items() for p in found)
    dropped = set()
    for module, found in candidates.items():
        core = [p for p in found if related(module, p)] if some else found
        sharing = [p for p in core if beside(p, core)] or core
        dropped |= {id(p) for p in found} - {id(p) for p in sharing}
    return dropped


def find_expert_tensors(
    model: nn.Module, include_frozen: bool = False, experts: Experts | None = None
) -> list[ExpertTensor]:
    """Batched expert parameters of ``model`` in module order, each once (tied tensors keep their first name).

    Args:
        model: any module; nothing is run and no values are read, so fake and meta tensors work.
        include_frozen: also return tensors with ``requires_grad=False``.
        experts: which they are, where the rules do not say it: names of parameters or modules, globs
            (``"*.experts.*"``), modules, parameters, a predicate ``(name, parameter) -> bool``, or several of these.
            Of modules and globs the parameters of three or more dimensions are taken. E is dim 0.

    Returns:
        A list, empty for a dense model and for a model whose experts are module lists (:func:`module_list_experts`).

    Raises:
        UserError: an entry of ``experts`` that names nothing in the model, or a tensor of one dimension.
    """
    chosen = None if experts is None else _chosen(model, experts)
    unrelated = _unrelated(model) if chosen is None else set()
    found: list[ExpertTensor] = []
    seen: set[int] = set()
    layer = 0
    for module_name, module in model.named_modules():
        here = []
        by_rule = {attribute: e for attribute, _, e in _expert_parameters(module)}
        for attribute, parameter in module._parameters.items():
            taken = id(parameter) in chosen if chosen is not None else attribute in by_rule
            if parameter is None or not taken or id(parameter) in seen | unrelated:
                continue
            if not (parameter.requires_grad or include_frozen):
                continue
            seen.add(id(parameter))
            name = f"{module_name}.{attribute}" if module_name else attribute
            num_experts = by_rule.get(attribute, parameter.shape[0])
            here.append(ExpertTensor(name, parameter, module_name, layer, num_experts))
        found += here
        layer += bool(here)
    return found


def _chosen(model: nn.Module, experts: Experts) -> set[int]:
    """Ids of the parameters that ``experts`` names."""
    one = isinstance(experts, (str, nn.Module, Parameter)) or not isinstance(experts, Iterable)
    entries = [experts] if one else list(experts)
    if not entries:
        raise UserError("experts=[]: name at least one tensor, or leave it out")
    chosen: dict[int, Parameter] = {}
    for entry in entries:
        found = _named_by(model, entry)
        if not found:
            raise UserError(f"experts={_shown(entry)}: {_nothing_found(model, entry)}")
        for name, p in found:
            if p.ndim < 2:
                raise UserError(f"experts: {name} has shape {list(p.shape)}; an expert tensor is [E, ...]")
        chosen |= {id(p): p for _, p in found}
    return set(chosen)


def _named_by(model: nn.Module, entry: Experts) -> list[tuple[str, Parameter]]:
    named = list(model.named_parameters(remove_duplicate=False))
    if isinstance(entry, str):
        found = [(name, p) for name, p in named if fnmatchcase(name, entry)]
        if entry not in dict(named):  # a glob: routers and norms beside the experts are not meant
            found = [(name, p) for name, p in found if p.ndim >= 3] or [(n, p) for n, p in found if p.ndim == 2]
        for path, module in [] if found else model.named_modules():
            if path and fnmatchcase(path, entry):
                found += _batched(module, path)
        return found
    if isinstance(entry, Parameter):
        return [(name, p) for name, p in named if p is entry][:1]
    if isinstance(entry, nn.Module):
        path = next((path for path, module in model.named_modules() if module is entry), None)
        return [] if path is None else _batched(entry, path)
    if callable(entry):
        try:
            return [(name, p) for name, p in named if entry(name, p)]
        except TypeError as error:
            raise UserError(f"experts={_shown(entry)}: called with (name, parameter) it raises {error}") from error
    raise UserError(f"experts={entry!r}: give names, globs, modules, parameters or a predicate (name, parameter)")


def _batched(module: nn.Module, path: str) -> list[tuple[str, Parameter]]:
    """Parameters of three or more dimensions in a module and below, and what rule A takes besides (biases)."""
    found = []
    for below, child in module.named_modules():
        by_rule = {name for name, _, _ in _expert_parameters(child)}
        own = [(n, p) for n, p in child._parameters.items() if p is not None and (p.ndim >= 3 or n in by_rule)]
        prefix = ".".join(part for part in (path, below) if part)
        found += [(f"{prefix}.{name}" if prefix else name, p) for name, p in own]
    return found


def _shown(entry: Experts) -> str:
    if isinstance(entry, nn.Module):
        return type(entry).__name__
    return f"a parameter {list(entry.shape)}" if isinstance(entry, Parameter) else repr(entry)


def _nothing_found(model: nn.Module, entry: Experts) -> str:
    who = type(model).__name__
    if isinstance(entry, nn.Module):
        return f"it is no module of {who}, or has no parameter of three dimensions below it"
    if isinstance(entry, str):
        names = [name for name, _ in model.named_parameters()] + [path for path, _ in model.named_modules() if path]
        near = difflib.get_close_matches(entry, names, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"its names look like {names[0] if names else '-'}"
        return f"{who} has no parameter or module of that name; {hint}"
    return f"no parameter of {who} is one"


def left_out(model: nn.Module, found: list[ExpertTensor]) -> tuple[list[str], list[str]]:
    """Trainable parameters of three or more dimensions that are not among ``found``, kernels of convolutions aside.

    Returns:
        Names of those that hang in a module of the same class, under the same attribute and with the same shape as one
        that was found; and of the others. Leading dimensions of 1 are no batch of experts.
    """
    modules = dict(model.named_modules())
    taken = {id(e.parameter) for e in found}
    alike = {(type(modules[e.module_name]), e.name.rpartition(".")[2], e.parameter.shape) for e in found}
    twins, others = [], []
    for path, module in modules.items():
        if isinstance(module, (nn.modules.conv._ConvNd, nn.Bilinear)):
            continue
        for attribute, p in module._parameters.items():
            if p is None or p.ndim < 3 or p.shape[0] < 2 or not p.requires_grad or id(p) in taken:
                continue
            name = f"{path}.{attribute}" if path else attribute
            (twins if (type(module), attribute, p.shape) in alike else others).append(name)
    return twins, others


def _identical(children: list[nn.Module]) -> bool:
    def shapes(m: nn.Module) -> list[tuple]:
        return [(n, tuple(p.shape)) for n, p in m.named_parameters()]

    first = shapes(children[0])
    return all(type(c) is type(children[0]) and shapes(c) == first for c in children)


def module_list_experts(model: nn.Module) -> list[str]:
    """Paths of ModuleLists/ModuleDicts that hold one module an expert (rule D): such experts have no batched tensor."""
    paths = []
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        # nllb keeps a dropout among its experts: only children that hold parameters count
        children = [c for c in module.children() if next(c.parameters(), None) is not None]
        parent = modules[path.rpartition(".")[0]] if path else module
        if len(children) in expert_counts(module) | expert_counts(parent) and _identical(children):
            paths.append(path)
    return paths


def decorated_expert_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the modules that honour ``ExpertsInterface``; others ignore ``experts_implementation``."""
    return [(name, module) for name, module in model.named_modules() if honours_interface(module)]
