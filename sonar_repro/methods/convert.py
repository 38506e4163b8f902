"""A checkpoint of a plain torch optimizer, as a :class:`~.optimizer.ScheduledOptimizer` loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UserError
from .inner import EXECUTION_KEYS
from .state import FORMAT

if TYPE_CHECKING:
    from .optimizer import ScheduledOptimizer


def from_torch_state(
    state_dict: dict[str, Any], optimizer: ScheduledOptimizer, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """What ``optimizer.load_state_dict`` takes, from ``torch.optim.AdamW(...).state_dict()`` (or SGD's, Adam's, ...).

    The states are handed on as they are: going on equals torch's own going on bit for bit.

    Args:
        state_dict: ``{"state": {index: {...}}, "param_groups": [{"params": [index], ...}]}``.
        optimizer: built on the model, over the same class.
        names: the parameters' names in the checkpoint's order, all groups one after another. Default: those in the
            checkpoint (``param_names``), else the model's order, of the trainable ones or of all, whichever count fits.

    Raises:
        UserError: not such a dict, another count of parameters, unknown names or other shapes, settings that differ
            between parameters which are one group here.
    """
    groups, states = _parts(state_dict)
    indices = [index for group in groups for index in group["params"]]
    order = _order(groups, indices, optimizer, names)
    group_of = {name: group for name, group in _pairs(groups, order)}
    state_of = {name: states.get(index, {}) for index, name in zip(indices, order)}
    owned = {o.name: o.parameter for o in optimizer._owned}
    if lacking := sorted(owned.keys() - group_of.keys()):
        raise UserError(f"the checkpoint has no {lacking[0]} ({len(lacking)} such), which is trained here")
    for name, state in state_of.items():
        if name not in owned and state:
            raise UserError(f"the checkpoint trains {name}, which is no trainable parameter here: unfreeze it first")
        _check_shapes(name, state, owned.get(name))
    if optimizer._kind in ("AdamW", "Adam"):
        wanted = {"step", "exp_avg", "exp_avg_sq"}
        if strange := [name for name, state in state_of.items() if state and not wanted <= state.keys()]:
            raise UserError(
                f"the checkpoint's state of {strange[0]} is not {optimizer._kind}'s: it has no exp_avg and exp_avg_sq"
            )
    steps = [int(state["step"]) for state in state_of.values() if "step" in state]
    return {
        "format": FORMAT,
        "optimizer": optimizer._kind,
        "steps": max(steps, default=0),
        "state": {name: dict(state_of[name]) for name in owned},
        "clip": {},
        "param_groups": [_group(group, optimizer, group_of) for group in optimizer.state_dict()["param_groups"]],
    }


def is_torch_state(state_dict: Any) -> bool:
    """Whether it looks like a plain torch optimizer's: indices and no format of ours."""
    return (
        isinstance(state_dict, dict) and "format" not in state_dict and {"state", "param_groups"} <= state_dict.keys()
    )


def _parts(state_dict: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    if not is_torch_state(state_dict):
        raise UserError("not a torch optimizer's state_dict(): 'state' and 'param_groups' by index are expected")
    return state_dict["param_groups"], state_dict["state"]


def _pairs(groups: Sequence[dict[str, Any]], order: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    by_place = [group for group in groups for _ in group["params"]]
    return list(zip(order, by_place))


def _order(groups: Sequence[dict], indices: Sequence[int], optimizer: Any, names: Sequence[str] | None) -> list[str]:
    if names is None and all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    if names is None:
        trainable = [o.name for o in optimizer._owned]
        every = [name for name, _ in _everything(optimizer)]
        if len(groups) > 1:
            raise UserError(
                f"the checkpoint has {len(groups)} parameter groups and no names: give names=[...] in its order"
            )
        fitting = [order for order in (trainable, every) if len(order) == len(indices)]
        if not fitting:
            raise UserError(
                f"the checkpoint has {len(indices)} parameters, the model {len(trainable)} trainable ones: another "
                "model, or give names=[...] in its order"
            )
        names = fitting[0]
    names = list(names)
    if len(names) != len(indices) or len(set(names)) != len(names):
        raise UserError(f"names= has {len(names)} entries (each once) for {len(indices)} parameters of the checkpoint")
    return names


def _everything(optimizer: Any) -> list[tuple[str, Any]]:
    attachment = optimizer._attachment
    kept = {id(p) for _, p in attachment.frozen} | {id(o.parameter) for o in attachment.owned}
    from .attachment import canonical_name

    return [(canonical_name(n), p) for n, p in attachment.model.named_parameters() if id(p) in kept]


def _check_shapes(name: str, state: dict[str, Any], parameter: Any) -> None:
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        value = state.get(key)
        if parameter is not None and isinstance(value, torch.Tensor) and value.shape != parameter.shape:
            raise UserError(
                f"the checkpoint's {key} of {name} has shape {list(value.shape)}, the parameter has "
                f"{list(parameter.shape)}: another order of parameters; give names=[...]"
            )


def _group(ours: dict[str, Any], optimizer: Any, group_of: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One of the optimizer's groups with the settings that the checkpoint has for its parameters."""
    theirs = [group_of[name] for name in ours["params"]]
    settings = dict(ours)
    keys = (ours.keys() | {"initial_lr"}) - EXECUTION_KEYS - {"name", "shapes", "params", "param_names"}
    for key in keys:
        values = [group[key] for group in theirs if key in group]
        if not values:
            continue
        if any(value != values[0] for value in values):
            other = next(v for v in values if v != values[0])
            raise UserError(
                f"the checkpoint has {key}={values[0]} and {other} for parameters of the "
                f"group {ours['name']}: let the factory make groups as the checkpoint's optimizer had them"
            )
        settings[key] = values[0]
    return settings
