"""Joint gradient norms from norms that were taken one tensor at a time, equal bit for bit to ``clip_grad_norm_``'s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support


def tensor_norm(gradient: Tensor) -> Tensor:
    """2-norm of one gradient, 0-d in its dtype, by the kernel that ``clip_grad_norm_`` would choose for it."""
    if _has_foreach_support([gradient], gradient.device):
        return torch._foreach_norm([gradient], 2.0)[0]
    return torch.linalg.vector_norm(gradient, 2.0)


def joint_norm(parameters: Sequence[Parameter], norms: Mapping[int, Tensor]) -> Tensor:
    """2-norm of the norms, summed in the order of ``clip_grad_norm_(parameters)``.

    Args:
        parameters: in the order in which ``clip_grad_norm_`` would get them; those without a norm are left out.
        norms: ``id(parameter)`` -> :func:`tensor_norm` of its gradient.
    """
    with_norm = [p for p in parameters if id(p) in norms]
    grouped = _group_tensors_by_device_and_dtype([with_norm], with_indices=True)  # torch's order: by device and dtype
    ordered = [norms[id(with_norm[i])] for _, indices in grouped.values() for i in indices]
    device = with_norm[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in ordered]), 2.0)
