"""Refusals and consistency checks of the scheduled optimizer, each one line that names the thing and the way out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from ..errors import UserError
from .inner import HookedTensor, Inner
from .schedule import ACCUMULATION_MODES, CLIP, NONFINITE_CHECKS, NONFINITE_MODES, Schedule


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
