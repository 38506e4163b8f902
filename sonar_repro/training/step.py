"""The one training step that every scale shares: smoke, forecast (fake tensors) and paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def training_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    micro_batches: Iterable[Mapping[str, Tensor]],
    accumulation: int = 1,
    autocast: torch.dtype | None = None,
    held: list[Any] | None = None,
) -> list[Tensor]:
    """Run one optimizer step: Algorithm 1 of Sonar-MoE (§4.2) for in-backward methods, the usual step for the others.

    Args:
        model: a transformers causal LM in train mode.
        optimizer: a :class:`sonar_repro.methods.ScheduledOptimizer`; it clips and counts by itself.
        scheduler: stepped once, after the optimizer; ``None`` keeps the learning rate.
        micro_batches: ``accumulation`` mappings of ``input_ids``, ``attention_mask``, ``labels``; int64 ``[B, T]``.
        held: ``None`` drops the output at once and runs without a key/value cache. A list keeps the last output,
            and leaves the cache at the model's default, as a script with ``outputs = model(**batch)`` does: logits and
            cache then live through the backward pass.
        autocast: run forward and loss in this dtype (mixed precision); ``None`` leaves the weights' dtype.
        accumulation: A; each loss is divided by it before its backward pass (§4.4).

    Returns:
        The undivided loss of each micro-batch, detached 0-d tensors on the model's device (no synchronisation here).
    """
    optimizer.zero_grad(set_to_none=True)
    optimizer.prepare()
    final = None
    if optimizer.passes > 1 or hasattr(model, "no_sync"):
        micro_batches = list(micro_batches)  # clip=exact runs them twice; data parallel must know the last one
        final = len(micro_batches) - 1
    losses: list[Tensor] = []
    for _ in optimizer.backward_passes():
        losses = []
        for index, batch in enumerate(micro_batches):
            with gradient_sync(model, index == final):
                with mixed_precision(batch["input_ids"].device.type, autocast):
                    if held is None:
                        loss = model(**batch, use_cache=False).loss
                    else:
                        held[:] = [model(**batch)]
                        loss = held[0].loss
                losses.append(loss.detach())
                if accumulation > 1:
                    loss = loss / accumulation
                loss.backward()
                del loss
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return losses


def mixed_precision(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager:
    """Autocast to ``dtype`` on the device, or nothing for ``None``."""
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype)


def gradient_sync(model: torch.nn.Module, sync: bool) -> AbstractContextManager:
    """DistributedDataParallel averages gradients once a step, in the last micro-batch; other models do nothing here."""
    return nullcontext() if sync or not hasattr(model, "no_sync") else model.no_sync()
