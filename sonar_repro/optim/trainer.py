"""Hidden momentum in HF Trainer: prepare before the first micro-batch of a step, clipping without the hidden buffers.

    class MyTrainer(MeshTrainerMixin, Trainer): ...
    MyTrainer(model, args, train_dataset=..., optimizers=(build(..., variant="mesh"), scheduler))

Trainer clips and measures the gradients of all parameters (and multiplies them by 1 when it only measures), which would
rescale H; the mixin leaves expert momentum out of both. It adds :class:`MeshTrainerCallback` by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from ..errors import UserError


def _inner(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper."""
    while not hasattr(optimizer, "prepare") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


class MeshTrainerCallback(TrainerCallback):
    """Calls ``optimizer.prepare()`` in ``on_step_begin`` (once a step, whatever the accumulation).

    Args:
        clips_apart: the trainer leaves expert momentum out of its clipping (:class:`MeshTrainerMixin` does).

    Raises UserError at the start of training: fp16 (a loss scaler), or a trainer that clips everything.
    """

    def __init__(self, clips_apart: bool = False) -> None:
        self.clips_apart = clips_apart

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        """Refuse what would destroy or rescale H."""
        if not getattr(_inner(optimizer), "hidden_parameters", None):
            return
        if args.fp16:
            raise UserError("fp16=True with hidden momentum: the loss scaler destroys H; use bf16=True")
        if not self.clips_apart:
            raise UserError(
                "Trainer measures and clips the gradients of all parameters, hidden momentum too: derive the trainer "
                "from MeshTrainerMixin (class MyTrainer(MeshTrainerMixin, Trainer))"
            )

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        """p.grad ← β1 H, before the first micro-batch."""
        inner = _inner(optimizer)
        if hasattr(inner, "prepare"):
            inner.prepare()


class MeshTrainerMixin:
    """Put before ``Trainer`` in the bases: prepare, and clipping (``max_grad_norm``) outside expert momentum."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(MeshTrainerCallback(clips_apart=True))

    def _clippable(self) -> list[torch.nn.Parameter]:
        out = {id(p) for p in getattr(_inner(self.optimizer), "hidden_parameters", ())}
        return [p for p in self.model.parameters() if id(p) not in out and p.grad is not None]

    def _clip_grad_norm(self, model: Any) -> Any:
        """Trainer's hook: clip, and return the norm before clipping, both without expert momentum."""
        return self.accelerator.clip_grad_norm_(self._clippable(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Trainer's hook: the norm for the log, of the same parameters; nothing is scaled."""
        if grad_norm is None:
            grad_norm = torch.nn.utils.get_total_norm([p.grad for p in self._clippable()])
        return grad_norm.item() if hasattr(grad_norm, "item") else grad_norm
