"""HF Trainer: its scheduler, clipping, logging, checkpoints and resume, with experts updated inside backward.

python tests/methods/examples/hf_trainer.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM, Trainer, TrainingArguments

from sonar_repro import ScheduledOptimizer, make_factory
from sonar_repro.methods.trainer import ScheduledOptimizerCallback, ScheduledTrainerMixin


class ScheduledTrainer(ScheduledTrainerMixin, Trainer):
    """Trainer whose clipping is the optimizer's; works with every method."""


def make_model() -> OlmoeForCausalLM:
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_experts=4, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return OlmoeForCausalLM(config).to(torch.bfloat16)


def make_data(count: int = 24) -> list[dict]:
    ids = torch.randint(2, 64, (count, 12), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": x, "labels": x} for x in ids]


def collate(examples: list[dict]) -> dict:
    return {key: torch.tensor([e[key] for e in examples]) for key in examples[0]}


def make_arguments(folder: str, **overrides) -> TrainingArguments:
    settings = {
        "output_dir": folder, "max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "warmup_steps": 2, "lr_scheduler_type": "cosine", "logging_steps": 1, "save_steps": 3, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    return TrainingArguments(**{**settings, **overrides})


def with_mixin(folder: str, method: str = "sonar", resume: bool = False, **overrides):
    """``optimizer_cls_and_kwargs=``: Trainer builds the optimizer; ``max_grad_norm`` in its usual place."""
    model = make_model()
    factory = make_factory("adamw", lr=1e-2, betas=(0.9, 0.95))
    trainer = ScheduledTrainer(
        model=model,
        args=make_arguments(folder, max_grad_norm=1.0, **overrides),
        train_dataset=make_data(),
        data_collator=collate,
        optimizer_cls_and_kwargs=(ScheduledOptimizer, {"model": model, "factory": factory, "schedule": method}),
    )
    trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-3") if resume else None)
    return trainer


def with_plain_trainer(folder: str, method: str = "sonar"):
    """``optimizers=``: Trainer makes its scheduler for our optimizer; Trainer's own clipping is switched off."""
    model = make_model()
    optimizer = ScheduledOptimizer(model, make_factory("adamw", lr=1e-2, betas=(0.9, 0.95)), method, max_grad_norm=1.0)
    trainer = Trainer(
        model=model,
        args=make_arguments(folder, max_grad_norm=0.0),
        train_dataset=make_data(),
        data_collator=collate,
        optimizers=(optimizer, None),
        callbacks=[ScheduledOptimizerCallback()],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        with_mixin(first)
        with_mixin(first, resume=True)
        with_plain_trainer(second)
