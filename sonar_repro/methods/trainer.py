"""HF Trainer with a :class:`~sonar_repro.methods.ScheduledOptimizer`: what Trainer's own loop would get wrong.

Plain ``Trainer`` (its clipping is switched off, the optimizer clips):

    args = TrainingArguments(..., max_grad_norm=0.0)
    Trainer(model, args, ..., optimizers=(optimizer, None), callbacks=[ScheduledOptimizerCallback()])

or, for every method (two backward passes, hidden momentum) and with ``max_grad_norm`` in its usual place:

    class MyTrainer(ScheduledTrainerMixin, Trainer): ...
    MyTrainer(model, args, ..., optimizer_cls_and_kwargs=(ScheduledOptimizer, {"model": model, "factory": factory,
                                                                                "schedule": "sonar"}))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, TrainerCallback

from ..errors import UserError
from . import checks
from .optimizer import ScheduledOptimizer

_MIXIN = "derive the trainer from ScheduledTrainerMixin (class MyTrainer(ScheduledTrainerMixin, Trainer))"


def unwrap(optimizer: Any) -> ScheduledOptimizer:
    """The scheduled optimizer inside Accelerate's wrapper. Raises UserError if it is another one."""
    while not isinstance(optimizer, ScheduledOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, ScheduledOptimizer):
        raise UserError(
            f"Trainer runs {type(optimizer).__name__}, not ScheduledOptimizer: pass optimizers=(optimizer, None) or "
            "optimizer_cls_and_kwargs"
        )
    return optimizer


def _check_experts_were_loaded(checkpoint: Path, scheduled: ScheduledOptimizer) -> None:
    """Raise UserError unless the checkpoint holds the expert tensors under the names that Trainer's loading wants."""
    names: set[str] = set()
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names |= set(tensors.keys())
    lacking = [name for name in scheduled.expert_names if name not in names]
    if lacking:
        raise UserError(
            f"resuming from {checkpoint}: it has no {lacking[0]}, so Trainer left the experts as they were "
            f"(transformers#48805); {_MIXIN}, which loads them"
        )


class ScheduledOptimizerCallback(TrainerCallback):
    """Checks at the start of training that Trainer and optimizer agree, and corrects the logged gradient norm.

    Args:
        trainer_clips_through_optimizer: the trainer is a :class:`ScheduledTrainerMixin`, which adds this callback.

    Raises UserError at the start of training: another optimizer, fp16, clipping done twice or with another bound,
    another number of accumulation steps, re-entrant checkpointing, a resumed run whose experts were not loaded;
    RuntimeError if the hooks are not in place.
    """

    def __init__(self, trainer_clips_through_optimizer: bool = False) -> None:
        self._mixin = trainer_clips_through_optimizer

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        """Refuse what would quietly train something else."""
        scheduled = unwrap(optimizer)
        scheduled.check_attached()
        name, in_backward = scheduled.schedule.name, scheduled.schedule.in_backward != "none"
        if in_backward and args.fp16:
            raise UserError(f"fp16=True with {name}: updates inside backward see scaled gradients; use bf16=True")
        if args.gradient_accumulation_steps != scheduled.accumulation:
            raise UserError(
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}, but the optimizer was built with "
                f"accumulation={scheduled.accumulation}: give both the same number"
            )
        if in_backward:
            checks.refuse_reentrant(kwargs["model"])
        self._check_clipping(args.max_grad_norm or None, scheduled)
        if state.global_step > 0 and not self._mixin:
            _check_experts_were_loaded(Path(args.output_dir) / f"checkpoint-{state.global_step}", scheduled)

    def _check_clipping(self, bound: float | None, scheduled: ScheduledOptimizer) -> None:
        if not self._mixin:
            if bound is not None:
                raise UserError(
                    f"max_grad_norm={bound}: Trainer would clip on top of the optimizer's clip="
                    f"{scheduled.schedule.clip}; pass max_grad_norm=0.0 to TrainingArguments, or {_MIXIN}"
                )
            if scheduled.passes > 1 or scheduled.needs_prepare:
                raise UserError(f"{scheduled.schedule.name} here needs more than Trainer's own loop: {_MIXIN}")
        elif bound != scheduled.max_grad_norm and scheduled.schedule.clip != "none":
            raise UserError(
                f"max_grad_norm={bound}, but the optimizer was built with max_grad_norm={scheduled.max_grad_norm}: "
                "give both the same bound (0.0 and None switch clipping off)"
            )

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        """Before the first micro-batch of a step."""
        unwrap(optimizer).prepare()

    def on_log(self, args, state, control, logs=None, optimizer=None, **kwargs) -> None:
        """Log the norm of what the optimizer clipped; leave it out (never 0) where hooks freed all gradients."""
        if not logs or "grad_norm" not in logs:
            return
        scheduled = unwrap(optimizer)
        norm = scheduled.last_clip.norm
        if norm is None and scheduled.schedule.in_backward == "none":
            return  # Trainer has measured all gradients itself
        for entry in (logs, state.log_history[-1] if state.log_history else {}):
            entry.pop("grad_norm", None)
            if norm is not None:
                entry["grad_norm"] = float(norm)


class ScheduledTrainerMixin:
    """Put before ``Trainer`` in the bases: clipping and the logged norm are the optimizer's, both passes are run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(ScheduledOptimizerCallback(trainer_clips_through_optimizer=True))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Trainer's; ``optimizer_cls_and_kwargs=(ScheduledOptimizer, {...})`` without a model gets the trainer's own.

        That is the way in with ``model_init``, which makes the model later, and again for every trial.
        """
        given = self.optimizer_cls_and_kwargs
        if given is None or given[0] is not ScheduledOptimizer or (given[1].get("model") and not self.model_init):
            return super().create_optimizer(*(() if model is None else (model,)))
        made = self.model if model is None else model
        self.optimizer_cls_and_kwargs = (given[0], {**given[1], "model": made})
        try:
            return super().create_optimizer(*(() if model is None else (model,)))
        finally:
            self.optimizer_cls_and_kwargs = given

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward, as often as the method needs; the loss of the last pass."""
        for _ in unwrap(self.optimizer).backward_passes():
            loss = super().training_step(model, dict(inputs), *args, **kwargs)
        return loss

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint's weights, experts too: Trainer's own loading skips them (transformers#48805).

        ``save_pretrained`` writes experts one by one, as the hub has them; only ``from_pretrained`` fuses them again.
        """
        model = self.model if model is None else model
        if not isinstance(model, PreTrainedModel) or self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        dtypes = {p.dtype for p in model.parameters()}
        exact = dtypes.pop() if len(dtypes) == 1 else torch.float32  # every narrower dtype goes through fp32 unchanged
        loaded = type(model).from_pretrained(resume_from_checkpoint, config=model.config, dtype=exact)
        model.load_state_dict(loaded.state_dict())

    def _clip_grad_norm(self, model: Any) -> Any:
        return unwrap(self.optimizer).clip_gradients().norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return unwrap(self.optimizer).clip_gradients().norm
