"""The optimizer state dict: keyed by parameter name and the same for every method, so that a run can change method.

Format: ``{"format": 1, "optimizer": class name, "steps": int, "state": {name: {key: value}}, "param_groups": [{"name",
"params": [names], "shapes": {name: shape}, hyperparameters...}]}``. Per-expert states are stacked to the batched shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import UserError

FORMAT = 1
# State tensors that have one value an element of the parameter, by the names that torch, bitsandbytes and optim/ use.
_LIKE_PARAMETER = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "state1", "state2", "m", "H"})


def merge(states: list[dict[str, Any]], parameter: Parameter, name: str) -> dict[str, Any]:
    """Stack E per-expert states into the state of the batched parameter (the inverse of :func:`split`).

    Tensors of a slice's shape are stacked; 8-bit block maxima are concatenated; the rest (0-d ``step``, quantisation
    maps, numbers) must agree between experts and is kept once. Raises RuntimeError if it does not.
    """
    if not any(states):
        return {}
    slice_numel = parameter.numel() // len(states)
    merged: dict[str, Any] = {}
    for key, first in states[0].items():
        values = [s[key] for s in states]
        if isinstance(first, Tensor) and first.numel() == slice_numel and first.ndim == parameter[:1].ndim - (first.ndim < parameter.ndim):
            merged[key] = torch.stack(values).reshape(parameter.shape)
        elif isinstance(first, Tensor) and key.startswith("absmax"):
            merged[key] = torch.cat(values)
        elif all(_same(v, first) for v in values):
            merged[key] = first
        else:
            raise RuntimeError(f"state {key!r} of {name} differs between experts: it has no batched form")
    return merged


def split(state: dict[str, Any], parameter: Parameter, num_experts: int, name: str) -> list[dict[str, Any]]:
    """Cut a batched state into one a expert: the inverse of :func:`merge`."""
    rows = parameter.shape[0] // num_experts
    slice_shape = parameter.shape[1:] if rows == 1 else (rows, *parameter.shape[1:])
    states: list[dict[str, Any]] = [{} for _ in range(num_experts)]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            pieces = value.reshape(num_experts, *slice_shape).unbind(0)
        elif isinstance(value, Tensor) and key.startswith("absmax"):
            if value.numel() % num_experts or (parameter.numel() // num_experts) % 256:
                raise UserError(f"{name}: 8-bit blocks of {key} cross expert borders; granularity=expert needs slices of a multiple of 256 elements")
            pieces = value.reshape(num_experts, -1).unbind(0)
        else:
            pieces = [value] * num_experts
        for target, piece in zip(states, pieces):
            target[key] = piece
    return states


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


def check_names(saved: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """The saved names are exactly the trainable ones and every shape agrees. Raises UserError naming the first that is not."""
    listed = {name: tuple(shape) for group in saved["param_groups"] for name, shape in group["shapes"].items()}
    for what, names in (("lacks", shapes.keys() - listed.keys()), ("has an unknown", listed.keys() - shapes.keys())):
        if names:
            raise UserError(f"optimizer state {what} parameter {min(names)} ({len(names)} such): it belongs to another model or other frozen layers")
    for what, names in (("lacks", shapes.keys() - saved["state"].keys()), ("has an unknown", saved["state"].keys() - shapes.keys())):
        if names:
            raise UserError(f"optimizer state {what} entry for {min(names)} ({len(names)} such): the file is incomplete or edited")
    for name, shape in shapes.items():
        if listed[name] != shape:
            raise UserError(f"optimizer state of {name} was saved for shape {list(listed[name])}, the model has {list(shape)}")
        for key, value in saved["state"][name].items():
            if not isinstance(value, Tensor):
                continue
            broadcast = value.ndim == len(shape) and all(v in (1, s) for v, s in zip(value.shape, shape))
            if (key in _LIKE_PARAMETER or value.ndim == len(shape)) and value.shape != torch.Size(shape) and not (broadcast and key not in _LIKE_PARAMETER):
                if key.startswith(("absmax", "qmap")) or value.ndim == 0:
                    continue  # 8-bit block maxima and maps have shapes of their own
                raise UserError(f"optimizer state {key!r} of {name} has shape {list(value.shape)}, the parameter {list(shape)}")


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
