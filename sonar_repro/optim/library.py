"""Factory entries for the library optimizers: AdamW and SGD, fused where that works, and bitsandbytes' 8-bit AdamW."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from ..errors import Unsupported, UserError

Named = Sequence[tuple[str, Parameter]]
_targets_by_model: weakref.WeakKeyDictionary[nn.Module, tuple] = weakref.WeakKeyDictionary()


@functools.cache
def fused_works(kind: type[torch.optim.Optimizer], device: str, dtype: torch.dtype) -> bool:
    """Whether ``kind``'s fused kernel exists for this device and dtype and computes the update.

    It is run, not looked up: torch 2.13's fused SGD leaves bf16 and fp16 parameters on the CPU unchanged wherever a
    whole vector register fits (pytorch#191763). Two steps on 67 elements are compared with the plain loop.
    """
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
    from torch.utils._python_dispatch import _disable_current_modes

    if device not in _get_fused_kernels_supported_devices() or not dtype.is_floating_point:
        return False
    hyper = {"lr": 0.25, "weight_decay": 0.125, **({"momentum": 0.5} if kind is torch.optim.SGD else {})}
    results = []
    with _disable_current_modes(), torch.no_grad():  # real values, even while a model is being built on fake tensors
        gradient = torch.linspace(-1, 1, 67, device=device, dtype=dtype)
        for fused in (True, False):
            p = Parameter(torch.linspace(1, 2, 67, device=device, dtype=dtype))
            optimizer = kind([p], fused=fused, foreach=False, **hyper)
            for _ in range(2):
                p.grad = gradient.clone()
                optimizer.step()
            results.append(p.detach().float())
        return torch.allclose(*results, rtol=0.02, atol=0.02)


def _fused(kind: type[torch.optim.Optimizer], model: nn.Module, wanted: bool | None) -> bool:
    """Decided once for the whole model, so that every method runs the same kernels."""
    if wanted is False:
        return False
    if kind is torch.optim.SGD and any(hasattr(p, "device_mesh") for p in model.parameters()):
        if wanted:  # torch 2.13 has a sharding rule for fused AdamW only
            raise UserError("fused=True: SGD has no fused kernel for sharded parameters (FSDP2); leave fused out")
        return False
    if model not in _targets_by_model:
        trainable = [p for p in model.parameters() if p.requires_grad]
        _targets_by_model[model] = tuple(dict.fromkeys((p.device.type, p.dtype) for p in trainable))
    lacking = [target for target in _targets_by_model[model] if not fused_works(kind, *target)]
    if wanted and lacking:
        where = ", ".join(f"{dtype} on {device}" for device, dtype in lacking)
        raise UserError(f"fused=True: {kind.__name__} has no working fused kernel for {where}; leave fused out")
    return not lacking


def adamw(named: Named, model: nn.Module, *, fused: bool | None = None, **hyper: Any) -> torch.optim.AdamW:
    """``torch.optim.AdamW``, fused where the device has it (the paper's setting, §5.1), else one tensor at a time."""
    kind = torch.optim.AdamW
    return kind([p for _, p in named], fused=_fused(kind, model, fused), foreach=False, **hyper)


def sgd(named: Named, model: nn.Module, *, fused: bool | None = None, **hyper: Any) -> torch.optim.SGD:
    """``torch.optim.SGD``, fused where the kernel works, else one tensor at a time."""
    kind = torch.optim.SGD
    return kind([p for _, p in named], fused=_fused(kind, model, fused), foreach=False, **hyper)


def adamw8bit(named: Named, model: nn.Module, **hyper: Any) -> torch.optim.Optimizer:
    """bitsandbytes' ``AdamW8bit``: block-wise 8-bit moments, fp32 for tensors under 4,096 elements.

    Per-expert equals batched only for slices of at least 4,096 elements that are a multiple of its 256-element block.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise Unsupported(f"optimizer adamw8bit needs bitsandbytes ({error}): install sonar_repro[bnb]") from error
    return AdamW8bit([p for _, p in named], **hyper)
