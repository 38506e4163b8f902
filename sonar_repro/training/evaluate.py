"""Held-out loss: the token-weighted mean over all supervised tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from .step import mixed_precision


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, batches: Iterable[Any], device: torch.device, autocast: torch.dtype | None = None
) -> dict[str, Any]:
    """Loss and token accuracy on held-out batches, computed from logits in fp32.

    The router's auxiliary loss has no part in it. Cross-entropy sums are added up in float64 on the host.

    Args:
        batches: :class:`sonar_repro.data.Batch` objects.

    Returns:
        ``heldout`` (nats a token, None without tokens), ``heldout_tokens``, ``heldout_token_accuracy`` (top-1 share).
    """
    was_training = model.training
    model.eval()
    total, hits, tokens = 0.0, 0, 0
    for batch in batches:
        inputs = batch.model_inputs(device)
        labels = inputs.pop("labels")[:, 1:]
        with mixed_precision(device.type, autocast):
            logits = model(**inputs, use_cache=False).logits[:, :-1]
        kept = labels != -100
        picked, target = logits[kept].float(), labels[kept]
        total += F.cross_entropy(picked, target, reduction="sum").double().item()
        hits += int((picked.argmax(-1) == target).sum())
        tokens += int(kept.sum())
    model.train(was_training)
    return {
        "heldout": total / tokens if tokens else None,
        "heldout_tokens": tokens,
        "heldout_token_accuracy": hits / tokens if tokens else None,
        "heldout_reason": None if tokens else "no held-out tokens",
        "router_aux_loss": "off",
    }


def changed_weights(model: torch.nn.Module, start: Any, expert_names: set[str]) -> dict[str, dict[str, int]]:
    """How many weights differ from their starting values, expert and other apart (Table 5).

    Args:
        model: the trained model.
        start: iterable of (name, tensor) with the starting values, any device; tied weights once.
        expert_names: names of the expert tensors in ``model.named_parameters()``.

    Returns:
        ``{"expert": {"changed", "total"}, "other": {...}}``, counted element by element.
    """
    now = dict(model.named_parameters())
    counts = {"expert": {"changed": 0, "total": 0}, "other": {"changed": 0, "total": 0}}
    for name, before in start:
        if name not in now:
            continue
        kind = counts["expert" if name in expert_names else "other"]
        parameter = now[name].detach()
        kind["changed"] += int((parameter != before.to(parameter.device)).sum())
        kind["total"] += parameter.numel()
    return counts
