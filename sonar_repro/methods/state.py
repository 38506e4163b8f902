"""The optimizer state dict: keyed by parameter name and the same for every method, so that a run can change method.

Format: ``{"format": 1, "optimizer": class name, "steps": int, "state": {name: {key: value}}, "clip": {...},
"param_groups": [{"name", "params": [names], "shapes": {name: shape}, hyperparameters...}]}``. Per-expert states are
stacked to the batched shape; ``clip`` holds what a way of clipping remembers (nothing, for the paper's methods).
Every trainable parameter has an entry in ``state``; it is empty before its first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import UserError
from .inner import EXECUTION_KEYS, HookedTensor, Inner

FORMAT = 1
# State tensors that have one value an element of the parameter, by the names that torch, bitsandbytes and optim/ use.
_LIKE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "state1", "state2", "m", "H"}
)


def slice_shape(parameter: Parameter, num_experts: int) -> torch.Size:
    """Shape of one expert's slice of ``[E, ...]``, or of its k rows of ``[E*k, ...]``."""
    rows = parameter.shape[0] // num_experts
    return parameter.shape[1:] if rows == 1 else torch.Size((rows, *parameter.shape[1:]))


def merge(states: list[dict[str, Any]], parameter: Parameter, name: str) -> dict[str, Any]:
    """Stack E per-expert states into the state of the batched parameter (the inverse of :func:`split`).

    Tensors of a slice's shape, and row or column statistics of it (MESH-B's V), are stacked; 8-bit block maxima are
    concatenated; the rest (0-d ``step``, quantisation
    maps, numbers) must agree between experts and is kept once. Raises RuntimeError if it does not.
    """
    if not any(states):
        return {}
    piece = slice_shape(parameter, len(states))
    merged: dict[str, Any] = {}
    for key, first in states[0].items():
        values = [s[key] for s in states]
        if isinstance(first, Tensor) and first.shape == piece:
            merged[key] = torch.stack(values).reshape(parameter.shape)
        elif isinstance(first, Tensor) and key.startswith("absmax"):
            merged[key] = torch.cat(values)
        elif isinstance(first, Tensor) and _is_statistic(key, first, piece) and parameter.shape[0] == len(states):
            merged[key] = torch.stack(values)
        elif isinstance(first, Tensor) and _is_pair(key, first, piece) and first.shape[0] == 1:
            merged[key] = torch.cat(values)
        elif all(_same(v, first) for v in values):
            merged[key] = first
        else:
            raise RuntimeError(f"state {key!r} of {name} differs between experts: it has no batched form")
    return merged


def split(state: dict[str, Any], parameter: Parameter, num_experts: int, name: str) -> list[dict[str, Any]]:
    """Cut a batched state into one a expert: the inverse of :func:`merge`."""
    shape = slice_shape(parameter, num_experts)
    states: list[dict[str, Any]] = [{} for _ in range(num_experts)]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            pieces = value.reshape(num_experts, *shape).unbind(0)
        elif isinstance(value, Tensor) and key.startswith("absmax"):
            if value.numel() % num_experts or (parameter.numel() // num_experts) % 256:
                raise UserError(
                    f"{name}: 8-bit blocks of {key} cross expert borders: granularity=expert needs slices "
                    "of a multiple of 256 elements"
                )
            pieces = value.reshape(num_experts, -1).unbind(0)
        elif isinstance(value, Tensor) and _is_statistic(key, value, parameter.shape) and len(value) == num_experts:
            pieces = value.unbind(0)
        elif isinstance(value, Tensor) and _is_pair(key, value, shape) and len(value) == num_experts:
            pieces = value.split(1)
        else:
            pieces = [value] * num_experts
        for target, part in zip(states, pieces):
            target[key] = part
    return states


def _is_statistic(key: str, value: Tensor, shape: Sequence[int]) -> bool:
    """One number a row or column of a tensor of ``shape``: it has as many dimensions and broadcasts to it."""
    if value.ndim != len(shape) or value.ndim < 2 or key.startswith("qmap"):
        return False
    return all(v in (1, s) for v, s in zip(value.shape, shape))


def _is_pair(key: str, value: Tensor, piece: Sequence[int]) -> bool:
    """Column statistics of fused gate and up matrices: ``[E, 2, 1, n]``, of one expert's slice ``[1, 2, 1, n]``."""
    return value.ndim == 4 and len(piece) == 2 and tuple(value.shape[1:3]) == (2, 1) and not key.startswith("qmap")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
    return type(a) is type(b) and a == b


def place(state: dict[str, Any], parameter: Parameter, on_device_step: bool) -> dict[str, Any]:
    """Copies of a saved state on the parameter's device, dtypes unchanged; ``step`` stays on the host unless fused."""

    def copy(key: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            device = "cpu" if key == "step" and not on_device_step else parameter.device
            return value.detach().to(device, copy=True)
        if isinstance(value, dict):
            return {k: copy(k, v) for k, v in value.items()}
        return value

    return {key: copy(key, value) for key, value in state.items()}


def named_states(units: Sequence[HookedTensor], end: Sequence[Inner]) -> dict[str, dict[str, Any]]:
    """The state of every parameter by name; ``{}`` for one that was not stepped yet."""
    states: dict[str, dict[str, Any]] = {}
    for unit in units:
        own = [inner.optimizer.state.get(p, {}) for inner in unit.inners for _, p in inner.named]
        states[unit.name] = merge(own, unit.parameter, unit.name) if unit.views else dict(own[0])
    for inner in end:
        states |= {name: dict(inner.optimizer.state.get(p, {})) for name, p in inner.named}
    return states


def dump_groups(groups: list[dict[str, Any]], names: dict[int, str]) -> list[dict[str, Any]]:
    """Outer groups with parameters by name and shape, without what belongs to the machine."""
    dumped = []
    for group in groups:
        shapes = {names[id(p)]: list(p.shape) for p in group["params"]}
        hyper = {k: v for k, v in group.items() if k not in EXECUTION_KEYS}
        dumped.append({**hyper, "params": list(shapes), "shapes": shapes})
    return dumped


def restore(units: Sequence[HookedTensor], end: Sequence[Inner], saved: dict[str, dict[str, Any]]) -> None:
    """Put saved states into the inner optimizers as they are: no cast to the parameters' dtypes."""
    pieces: list[tuple[Inner, Parameter, dict[str, Any]]] = []  # cut first: nothing is changed if one does not fit
    for unit in units:
        whole = saved[unit.name]
        cut = split(whole, unit.parameter, len(unit.views), unit.name) if unit.views else [whole]
        pieces += [(inner, inner.named[0][1], piece) for inner, piece in zip(unit.inners, cut)]
    for inner in end:
        pieces += [(inner, p, saved[name]) for name, p in inner.named]
    group_of = {id(p): g for inner, _, _ in pieces for g in inner.optimizer.param_groups for p in g["params"]}
    for inner, parameter, piece in pieces:
        inner.optimizer.state.pop(parameter, None)
        if piece:
            group = group_of[id(parameter)]
            on_device = bool(group.get("fused") or group.get("capturable"))
            inner.optimizer.state[parameter] = place(piece, parameter, on_device)


def check_format(saved: dict[str, Any], optimizer: str) -> None:
    """The dict is one of ours and of the same optimizer class."""
    missing = {"format", "optimizer", "steps", "state", "param_groups"} - saved.keys()
    if missing or saved["format"] != FORMAT:
        lacks = f"lacks {', '.join(sorted(missing))}" if missing else f"format {saved['format']!r}"
        raise UserError(
            f"optimizer state {lacks}: expected format {FORMAT}, as ScheduledOptimizer.state_dict() makes it"
        )
    if saved["optimizer"] != optimizer:
        raise UserError(
            f"optimizer state of {saved['optimizer']} cannot be loaded into {optimizer}: use the same optimizer"
        )


def check_names(saved: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """The saved names are exactly the trainable ones and every shape agrees; else a UserError names the first."""
    listed = {name: tuple(shape) for group in saved["param_groups"] for name, shape in group["shapes"].items()}
    for found, where in ((listed.keys(), "its groups"), (saved["state"].keys(), "its state")):
        for what, names in (("lacks", shapes.keys() - found), ("has the unknown", found - shapes.keys())):
            if names:
                raise UserError(
                    f"optimizer state {what} parameter {min(names)} in {where} ({len(names)} such): it belongs to "
                    "another model, to other frozen layers, or is incomplete"
                )
    for name, shape in shapes.items():
        if listed[name] != shape:
            raise UserError(f"optimizer state of {name} is for shape {list(listed[name])}, the model has {list(shape)}")
        for key, value in saved["state"][name].items():
            if isinstance(value, Tensor) and not _fits(key, value, shape):
                raise UserError(f"optimizer state {key!r} of {name} has shape {list(value.shape)}, not {list(shape)}")


def check_groups(saved: dict[str, Any], own: list[dict[str, Any]]) -> None:
    """The saved groups divide the parameters as this optimizer's do. ``own``: from :func:`dump_groups`."""
    theirs = [(g["name"], sorted(g["params"])) for g in saved["param_groups"]]
    mine = [(g["name"], sorted(g["params"])) for g in own]
    if theirs != mine:
        raise UserError(
            f"optimizer state has the groups {', '.join(n for n, _ in theirs)}, this optimizer "
            f"{', '.join(n for n, _ in mine)}, or they divide the parameters otherwise: use the same factory"
        )


def _fits(key: str, value: Tensor, shape: tuple[int, ...]) -> bool:
    """Moments have the parameter's shape; other states of as many dimensions broadcast to it (row statistics)."""
    if key in _LIKE_PARAMETER:
        return tuple(value.shape) == shape
    if value.ndim != len(shape) or key.startswith(("absmax", "qmap")):
        return True
    return all(v in (1, s) for v, s in zip(value.shape, shape))


def inner_bytes(optimizer: torch.optim.Optimizer, seen: set[int]) -> int:
    """Bytes of an inner optimizer's state; one that accounts for itself (MESH) is asked."""
    own = getattr(optimizer, "optimizer_state_bytes", None)
    return own() if own is not None else state_bytes(dict(optimizer.state), seen)


def state_bytes(value: Any, seen: set[int]) -> int:
    """Bytes of every tensor in a (nested) optimizer state, shared tensors once, a sharded tensor's local part."""
    if isinstance(value, Tensor):
        if id(value) in seen:
            return 0
        seen.add(id(value))
        local = value.to_local() if hasattr(value, "to_local") else value
        return local.numel() * local.element_size()
    if isinstance(value, dict):
        return sum(state_bytes(v, seen) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(state_bytes(v, seen) for v in value)
    return 0
