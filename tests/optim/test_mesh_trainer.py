"""Hidden momentum in HF Trainer: the same weights as a plain loop, clipping apart, resume, and the refusals."""

from __future__ import annotations

import pytest
import torch
from tiny_whale import differing, family, mesh, weights

from sonar_repro.errors import UserError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from sonar_repro.optim.trainer import MeshTrainerCallback, MeshTrainerMixin  # noqa: E402

ROWS = 16


class Whale(MeshTrainerMixin, transformers.Trainer):
    """What the documentation tells users to write."""


def rows(count: int = ROWS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 96, (count, 12), generator=generator)
    return [{"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x)} for x in ids]


def arguments(folder, **options) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        **{
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "max_grad_norm": 0.5,
            "learning_rate": 2e-3,
            "dataloader_num_workers": 0,
            "train_sampling_strategy": "sequential",
            **options,
        },
    )


def trainer(folder, variant: str = "mesh", kind=Whale, model=None, **options):
    model = model or family("olmoe")
    optimizer = mesh(model, variant)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    made = kind(model, arguments(folder, **options), train_dataset=rows(), optimizers=(optimizer, schedule))
    return made, model, optimizer


def plain_loop(variant: str, steps: int = 4, clip: float | None = 0.5):
    model = family("olmoe")
    optimizer = mesh(model, variant)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    data = rows()
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        optimizer.prepare()
        for micro in range(2):
            start = (4 * step + 2 * micro) % ROWS
            batch = {k: torch.stack([r[k] for r in data[start : start + 2]]) for k in data[0]}
            # Trainer sums over tokens and divides by all tokens of the step: here the mean over equal micro-batches.
            (model(**batch).loss / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(optimizer.clippable_parameters(), clip or float("inf"))
        norms.append(norm.item())
        optimizer.step()
        schedule.step()
    return model, norms


@pytest.mark.parametrize("variant", ["mesh", "mesh_full"])
@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_trainer_equals_a_plain_loop(tmp_path, variant, clip):
    made, model, optimizer = trainer(tmp_path, variant, max_grad_norm=clip)
    made.train()
    expected, norms = plain_loop(variant, clip=clip or None)
    for (name, a), b in zip(model.named_parameters(), expected.parameters()):
        # Trainer weighs by token counts, we by micro-batches: equal up to fp32 rounding of the loss scale.
        assert torch.allclose(a, b, atol=5e-4), name
    logged = [entry["grad_norm"] for entry in made.state.log_history if "grad_norm" in entry]
    assert logged == pytest.approx(norms, rel=1e-3)
    if variant == "mesh":
        assert optimizer.diagnostics()["prepare_calls_per_step"] == 1.0


def test_checkpoint_and_resume_are_bit_for_bit(tmp_path):
    straight, model, _ = trainer(tmp_path / "a", save_strategy="steps", save_steps=2)
    straight.train()
    checkpoint = str(tmp_path / "a" / "checkpoint-2")
    # Trainer's own loading skips fused experts (the files hold one matrix an expert); from_pretrained does not.
    other = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation="eager").train()
    resumed, other, _ = trainer(tmp_path / "b", model=other)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert differing(weights(model), weights(other)) == []


def test_the_callback_alone_refuses_a_trainer_that_clips_everything(tmp_path):
    made, _, _ = trainer(tmp_path, kind=transformers.Trainer)
    made.add_callback(MeshTrainerCallback())
    with pytest.raises(UserError, match="MeshTrainerMixin"):
        made.train()


def test_a_plain_trainer_cannot_lose_momentum_silently(tmp_path):
    made, _, _ = trainer(tmp_path, kind=transformers.Trainer)
    with pytest.raises(UserError, match="without prepare.*MeshTrainerCallback"):
        made.train()


def test_fp16_is_refused(tmp_path):
    class Fp16(MeshTrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            args.fp16 = True  # TrainingArguments itself refuses fp16 on a CPU
            super().on_train_begin(args, state, control, **kwargs)

    made, _, _ = trainer(tmp_path)
    made.remove_callback(MeshTrainerCallback)
    made.add_callback(Fp16(clips_apart=True))
    with pytest.raises(UserError, match="fp16=True.*bf16"):
        made.train()


def test_other_optimizers_pass_through(tmp_path):
    made, _, _ = trainer(tmp_path, "direct", kind=transformers.Trainer)
    made.add_callback(MeshTrainerCallback())
    made.train()
