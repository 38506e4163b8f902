"""Refusals and consistency checks of the scheduled optimizer, each one line that names the thing and the way out."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import UserError
from .inner import HookedTensor, Inner
from .schedule import ACCUMULATION_MODES, CLIP, NONFINITE_CHECKS, NONFINITE_MODES, Schedule
from .state import merge, split


def check_arguments(schedule: Schedule, max_grad_norm: float | None, accumulation: int, mode: str) -> None:
    """Values and the pairs of values that must agree."""
    if max_grad_norm is not None and not _positive(max_grad_norm):
        raise UserError(f"max_grad_norm={max_grad_norm!r}: must be a positive number, or None to clip nothing")
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
        raise UserError(f"accumulation={accumulation!r}: must be an int of at least 1")
    if mode not in ACCUMULATION_MODES:
        raise UserError(f"accumulation_mode={mode!r}: choose one of {', '.join(ACCUMULATION_MODES)}")
    name = schedule.name
    if schedule.in_backward == "none" and mode != "standard":
        raise UserError(f"accumulation_mode={mode} with {name}: it keeps its gradients; use accumulation_mode=standard")
    modes = CLIP[schedule.clip].modes
    if schedule.in_backward == "none" or accumulation == 1 or mode in modes:
        return
    way = f"say accumulation_mode={' or '.join(map(repr, modes))}" if modes else "use accumulation=1"
    raise UserError(
        f"accumulation={accumulation} with {name} and accumulation_mode={mode}: its gradients are freed at every "
        f"micro-batch; {way}, or a standard_* method"
    )


def check_types(model: Any, schedule: Any) -> None:
    """The first and the third argument are what they are taken for."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model={model!r:.60}: must be a torch.nn.Module (model, factory, method, in this order)")
    if not isinstance(schedule, (str, Schedule)):
        raise UserError(f"schedule={schedule!r:.60}: must be the name of a method or a Schedule")


def check_nonfinite(mode: str | None, check: str) -> None:
    """The two settings of the guard against non-finite gradients."""
    if mode is not None and mode not in NONFINITE_MODES:
        raise UserError(f"on_nonfinite={mode!r}: choose one of {', '.join(NONFINITE_MODES)}")
    if check not in NONFINITE_CHECKS:
        raise UserError(f"nonfinite_check={check!r}: choose one of {', '.join(NONFINITE_CHECKS)}")


def refuse_to_guard_momentum(mode: str | None) -> None:
    """Hidden momentum lies in the gradient: a bad one cannot be told from it and left out."""
    if mode in ("skip", "raise"):
        raise UserError(
            f"on_nonfinite={mode}: the optimizer hides its momentum in the gradient, and both are lost to one NaN; use "
            "the full-state variant (mesh_full, mesh_b_full), or on_nonfinite=off"
        )


def _positive(value: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and not math.isnan(value)


def refuse_reentrant(model: nn.Module) -> None:
    """Re-entrant checkpointing runs backward inside backward and can fire a hook twice (pytorch#81296)."""
    for name, module in model.named_modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if getattr(module, "gradient_checkpointing", False) and getattr(function, "keywords", {}).get("use_reentrant"):
            raise UserError(
                f"{name or 'the model'} uses re-entrant checkpointing, which can fire a hook twice: "
                "pass gradient_checkpointing_kwargs={'use_reentrant': False}"
            )


def refuse_local_gradients(unit: HookedTensor, reduced: bool) -> None:
    """Under DDP a hook sees this process's own gradient: every rank would update its experts to other values."""
    if reduced or hasattr(unit.parameter, "device_mesh") or not torch.distributed.is_available():
        return
    processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if processes > 1:
        raise UserError(
            f"{unit.name} is not sharded and {processes} processes train it: its hook sees gradients that are not "
            "averaged; build the optimizer on what sonar_repro.data_parallel (DDP or FSDP2) returns, or set "
            "optimizer.gradients_are_reduced if they are"
        )


def keeps_hidden_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an inner optimizer (MESH, MESH-B) keeps momentum in gradient buffers between ``prepare`` and ``step``."""
    return getattr(optimizer, "_hidden", None) is not None


def refuse_hidden_momentum(units: Sequence[HookedTensor], schedule: Schedule) -> None:
    """Hidden momentum needs its gradient buffer for the whole step; a hook frees it."""
    for unit in units:
        if any(keeps_hidden_momentum(inner.optimizer) for inner in unit.inners):
            raise UserError(
                f"{schedule.name} frees the gradient of {unit.name} inside backward, but the optimizer hides its "
                "momentum in that gradient: use the full-state variant (mesh_full, mesh_b_full) or a standard_* method"
            )


_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to its optimizer


def own(owned: Sequence[Any], optimizer: torch.optim.Optimizer) -> None:
    """Note who trains a parameter. Raises UserError if another scheduled optimizer that is still alive does."""

    def other() -> tuple[str, Any] | None:
        found = ((o.name, _OWNERS[o.parameter]()) for o in owned if o.parameter in _OWNERS)
        return next(((name, one) for name, one in found if one is not None and one is not optimizer), None)

    if other() is not None:
        gc.collect()  # one that was dropped may wait in a circle of references
    if (pair := other()) is not None:
        raise UserError(
            f"{pair[0]} already has a ScheduledOptimizer ({pair[1].schedule.name}): two would both update it; drop "
            "that one, or call its detach() first"
        )
    for o in owned:
        _OWNERS[o.parameter] = weakref.ref(optimizer)


def disown(owned: Sequence[Any], optimizer: torch.optim.Optimizer) -> None:
    """The optimizer was detached: another may take over."""
    for o in owned:
        if o.parameter in _OWNERS and _OWNERS[o.parameter]() is optimizer:
            del _OWNERS[o.parameter]


_STACK_WELL = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


def refuse_unstackable(units: Sequence[HookedTensor]) -> None:
    """granularity=expert: E states must have a batched form, or the run could not be saved.

    Tried on two small slices with an optimizer of the same class and settings. Raises UserError.
    """
    unit = next((unit for unit in units if unit.views), None)
    kind = type(unit.inners[0].optimizer) if unit else None
    if kind is None or issubclass(kind, _STACK_WELL) or kind.__module__.startswith(("bitsandbytes", "sonar_repro")):
        return
    group = {k: v for k, v in unit.inners[0].optimizer.param_groups[0].items() if k != "params"}
    with _disable_current_modes(), torch.enable_grad():
        pieces = [nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4) * (e + 1)) for e in range(2)]
        whole = nn.Parameter(torch.stack([p.detach() for p in pieces]))
        try:
            optimizers = [kind([{**group, "params": [p]}]) for p in pieces]
        except (TypeError, ValueError):
            return  # it cannot be made from its group alone: nothing is known
        for p, optimizer in zip(pieces, optimizers):
            p.grad = p.detach() * 0.5 + 0.1
            optimizer.step()
        states = [optimizer.state.get(p, {}) for p, optimizer in zip(pieces, optimizers)]
        try:
            back = split(merge(states, whole, unit.name), whole, 2, unit.name)
            fits = all(_equal(a, b) for a, b in zip(states, back))
            reason = "they change when stacked"
        except (RuntimeError, UserError) as error:
            fits, reason = False, str(error)
    if not fits:
        raise UserError(
            f"granularity=expert with {kind.__name__}: the states of its experts have no batched form ({reason}), so a "
            "run could not be saved; use granularity=tensor (sonar), or AdamW, SGD, Lion"
        )


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def same(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y

    return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)


def warn_of_fp32_slices(units: Sequence[HookedTensor]) -> int:
    """How many expert slices an 8-bit optimizer keeps in fp32, because they are too small; warns if there are any."""
    small = []
    for unit in units:
        least = getattr(getattr(unit.inners[0].optimizer, "args", None), "min_8bit_size", None)
        bits = getattr(getattr(unit.inners[0].optimizer, "args", None), "optim_bits", None)
        if unit.views and least is not None and bits == 8 and unit.views[0].numel() < least <= unit.parameter.numel():
            small.append((unit, least))
    if not small:
        return 0
    unit, least = small[0]
    slices = sum(len(unit.views) for unit, _ in small)
    warnings.warn(
        f"{slices} expert slices keep fp32 states, such as those of {unit.name} of {unit.views[0].numel():,} elements "
        f"(8 bits from min_8bit_size={least:,}): 8 bytes a parameter, and other numbers than the batched tensor's",
        stacklevel=5,
    )
    return slices


def too_many_firings(unit: HookedTensor, allowed: int) -> RuntimeError:
    """A hook that fires again before the step ends would apply a part of the gradient as if it were all of it."""
    return RuntimeError(
        f"{unit.name} got a gradient {unit.firings} times since the last step (allowed: {allowed}): re-entrant "
        "checkpointing does this (pass use_reentrant=False), and so do several backward passes a step (build the "
        "optimizer with accumulation=A, accumulation_mode='update_each'); after an interrupted step call abandon_step()"
    )


def check_hooks_worked(units: Sequence[HookedTensor]) -> None:
    """Before the end of a step: no gradient bypassed its hook, and at least one hook has fired."""
    for unit in units:
        if unit.parameter.grad is not None and not unit.firings:
            raise RuntimeError(
                f"{unit.name} has a gradient that did not pass its hook (autograd.grad and a "
                "hand-set .grad do this): call loss.backward()"
            )
    if units and not any(unit.firings for unit in units):
        raise RuntimeError(
            f"no in-backward hook fired since the last step (of {len(units)}, first {units[0].name}): the model that "
            "was trained is not the one the optimizer was built on, or backward did not run"
        )


def check_all_stepped(units: Sequence[HookedTensor], end: Sequence[Inner], with_grad: set[int]) -> None:
    """After the first step: every tensor that had a gradient was stepped, if its optimizer keeps state at all."""
    stepped = [(u.name, inner, p) for u in units if u.firings for inner in u.inners for _, p in inner.named]
    stepped += [(name, inner, p) for inner in end for name, p in inner.named if id(p) in with_grad]
    with_state = {type(inner.optimizer) for _, inner, p in stepped if inner.optimizer.state.get(p)}
    for name, inner, p in stepped:
        if type(inner.optimizer) in with_state and not inner.optimizer.state.get(p):
            raise RuntimeError(f"{name} had a gradient but {type(inner.optimizer).__name__} did not step it")
