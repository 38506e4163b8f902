"""The optimizer in other people's loops: plain PyTorch, HF Trainer, Accelerate. The examples themselves are run."""

import math
import os
import sys
from pathlib import Path

import processes
import pytest
import torch
from tiny_moe import differing, weights

from sonar_repro import ScheduledOptimizer, make_factory
from sonar_repro.errors import UserError

EXPERT = "model.layers.0.mlp.experts.gate_up_proj"
sys.path.insert(0, str(Path(__file__).parent / "examples"))


def test_plain_loop_example_learns_and_the_exact_methods_agree(capsys):
    import plain_loop

    losses = plain_loop.main("sonar")
    assert losses[-1] < losses[0] - 0.1
    assert plain_loop.main("sonar") == losses == plain_loop.main("standard_no_expert_clip")
    assert plain_loop.main("sonar_exact_clip") == plain_loop.main("standard_global_clip")
    shown = capsys.readouterr().out
    assert "experts: 4 tensors" in shown and "updated inside backward in 4 optimizer calls" in shown


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_data_parallel_example_learns_and_the_exact_methods_agree(mode):
    """The README's loop under torchrun, on two gloo processes."""

    def losses(method):
        example = Path(__file__).parent / "examples" / "data_parallel_loop.py"
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
        words = [sys.executable, *launcher, "--rdzv-endpoint=localhost:0", str(example), mode, method]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        done = processes.run(words, env=environment)
        assert done.returncode == 0, done.stderr
        when = "inside backward in 4" if method == "sonar" else "at the end"
        assert (
            f"experts: 4 tensors, 12,288 parameters, torch.optim.AdamW(fused), lr 0.01, updated {when}" in done.stdout
        )
        return [float(x) for x in done.stdout.split("losses: ")[1].split(",")]

    sonar = losses("sonar")
    assert sonar[-1] < sonar[0] - 0.5 and len(sonar) == 6
    assert sonar == losses("standard_no_expert_clip")


@pytest.fixture
def trainer():
    pytest.importorskip("accelerate")
    import hf_trainer

    return hf_trainer


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def test_trainer_runs_the_same_training_in_both_ways_and_with_the_standard_method(trainer, tmp_path):
    mixin = trainer.with_mixin(str(tmp_path / "a"))
    plain = trainer.with_plain_trainer(str(tmp_path / "b"))
    standard = trainer.with_mixin(str(tmp_path / "c"), "standard_no_expert_clip")
    assert differing(weights(mixin.model), weights(plain.model)) == []
    assert differing(weights(mixin.model), weights(standard.model)) == []
    assert mixin.optimizer.optimizer.hook_firings == 6 * 4
    # Trainer's cosine schedule with two warm-up steps; it logs the rate before its scheduler moves on
    expected = [0.01 * min(k / 2, (1 + math.cos(math.pi * max(0, k - 2) / 4)) / 2) for k in range(6)]
    torch.testing.assert_close(logged(mixin, "learning_rate"), expected, rtol=1e-6, atol=1e-12)
    for a, b in zip(logged(mixin, "grad_norm"), logged(plain, "grad_norm"), strict=True):
        assert a == b > 1.0


def test_trainer_resumes_bit_for_bit(trainer, tmp_path):
    for method in ("sonar", "sonar_per_expert"):
        folder = str(tmp_path / method)
        whole = trainer.with_mixin(folder, method)
        resumed = trainer.with_mixin(folder, method, resume=True)
        assert differing(weights(whole.model), weights(resumed.model)) == []
        assert (resumed.optimizer.optimizer.hook_firings, resumed.optimizer.optimizer.steps) == (3 * 4, 6)


def test_trainer_checkpoint_goes_on_under_another_method(trainer, tmp_path):
    whole = trainer.with_mixin(str(tmp_path), "standard_no_expert_clip")
    resumed = trainer.with_mixin(str(tmp_path), "sonar", resume=True)
    assert differing(weights(whole.model), weights(resumed.model)) == []


def test_plain_trainer_refuses_to_resume_without_its_experts(trainer, tmp_path):
    """Trainer's own loading leaves fused experts out (transformers#48805) with no more than a warning."""
    from sonar_repro.methods.trainer import ScheduledOptimizerCallback

    trainer.with_plain_trainer(str(tmp_path))
    again = make_plain(trainer, tmp_path, ScheduledOptimizerCallback(), max_grad_norm=0.0)
    with pytest.raises(UserError, match=f"checkpoint-3: it has no {EXPERT}.*transformers#48805.*ScheduledTrainerMixin"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_trainer_runs_two_pass_clipping(trainer, tmp_path):
    exact = trainer.with_mixin(str(tmp_path / "a"), "sonar_exact_clip")
    standard = trainer.with_mixin(str(tmp_path / "b"), "standard_global_clip")
    assert differing(weights(exact.model), weights(standard.model)) == []
    assert logged(exact, "grad_norm") == logged(standard, "grad_norm")


def test_trainer_accumulates_when_told(trainer, tmp_path):
    model = trainer.make_model()
    factory = make_factory("adamw", lr=1e-2)
    kwargs = {"model": model, "factory": factory, "schedule": "sonar", "accumulation": 2, "accumulation_mode": "fold"}
    run = trainer.ScheduledTrainer(
        model=model,
        args=trainer.make_arguments(str(tmp_path), gradient_accumulation_steps=2, max_steps=2, save_steps=9),
        train_dataset=trainer.make_data(),
        data_collator=trainer.collate,
        optimizer_cls_and_kwargs=(ScheduledOptimizer, kwargs),
    )
    run.train()
    assert (run.optimizer.optimizer.hook_firings, run.optimizer.optimizer.optimizer_calls) == (2 * 2 * 4, 2 * 5)


@pytest.mark.parametrize("method", ["sonar", "sonar_exact_clip"])
def test_trainer_with_model_init_makes_the_optimizer_on_the_model_it_makes(trainer, tmp_path, method):
    """``optimizers=`` is refused with ``model_init``; without a model in the kwargs the trainer's own is taken."""

    def run(**model):
        torch.manual_seed(0)
        kwargs = {"factory": make_factory("adamw", lr=1e-2), "schedule": method}
        return trainer.ScheduledTrainer(
            args=trainer.make_arguments(str(tmp_path), max_steps=3, save_steps=9),
            train_dataset=trainer.make_data(),
            data_collator=trainer.collate,
            optimizer_cls_and_kwargs=(ScheduledOptimizer, {**kwargs, **model.pop("more", {})}),
            **model,
        )

    made = run(model_init=lambda: trainer.make_model())
    made.train()
    first = weights(made.model)
    model = trainer.make_model()
    given = run(model=model, more={"model": model})
    given.train()
    assert differing(first, weights(given.model)) == []
    made.train()  # another trial: another model, and an optimizer on it
    assert differing(first, weights(made.model)) == [] and made.optimizer.optimizer.steps == 3


def test_norm_that_nothing_measured_is_not_logged_as_zero(trainer, tmp_path):
    plain = trainer.with_plain_trainer(str(tmp_path / "a"), "optimizer_in_backward")
    assert logged(plain, "loss") and logged(plain, "grad_norm") == []
    mixin = trainer.with_mixin(str(tmp_path / "b"), "optimizer_in_backward")
    assert logged(mixin, "loss") and logged(mixin, "grad_norm") == []
    assert differing(weights(plain.model), weights(mixin.model)) == []


def make_plain(trainer, folder, callback, method="sonar", optimizer=None, **arguments):
    from transformers import Trainer

    model = trainer.make_model()
    optimizer = optimizer or ScheduledOptimizer(model, make_factory("adamw", lr=1e-2), method)
    return Trainer(
        model=model,
        args=trainer.make_arguments(str(folder), **arguments),
        train_dataset=trainer.make_data(),
        data_collator=trainer.collate,
        optimizers=(optimizer, None),
        callbacks=[callback],
    )


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"max_grad_norm": 1.0}, r"max_grad_norm=1.0: Trainer would clip.*max_grad_norm=0.0"),
        ({"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2.*accumulation=1"),
        ({"max_grad_norm": 0.0, "method": "sonar_exact_clip"}, "sonar_exact_clip.*ScheduledTrainerMixin"),
    ],
)
def test_plain_trainer_that_would_train_something_else_is_refused(trainer, tmp_path, arguments, said):
    from sonar_repro.methods.trainer import ScheduledOptimizerCallback

    run = make_plain(trainer, tmp_path, ScheduledOptimizerCallback(), **arguments)
    with pytest.raises(UserError, match=said) as error:
        run.train()
    assert "\n" not in str(error.value)


def test_trainer_with_another_bound_is_refused(trainer, tmp_path):
    model = trainer.make_model()
    kwargs = {"model": model, "factory": make_factory("adamw", lr=1e-2), "schedule": "sonar", "max_grad_norm": 0.5}
    run = trainer.ScheduledTrainer(
        model=model,
        args=trainer.make_arguments(str(tmp_path), max_grad_norm=1.0),
        train_dataset=trainer.make_data(),
        data_collator=trainer.collate,
        optimizer_cls_and_kwargs=(ScheduledOptimizer, kwargs),
    )
    with pytest.raises(UserError, match="max_grad_norm=1.0, but the optimizer was built with max_grad_norm=0.5"):
        run.train()


def test_trainer_with_another_optimizer_is_refused(trainer, tmp_path):
    from sonar_repro.methods.trainer import ScheduledOptimizerCallback

    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    run = make_plain(trainer, tmp_path, ScheduledOptimizerCallback(), optimizer=other, max_grad_norm=0.0)
    with pytest.raises(UserError, match="Trainer runs SGD, not ScheduledOptimizer"):
        run.train()


def test_trainer_with_fp16_is_refused():
    from types import SimpleNamespace

    from tiny_moe import build, tiny_model

    from sonar_repro.methods.trainer import ScheduledOptimizerCallback

    args = SimpleNamespace(fp16=True, gradient_accumulation_steps=1, max_grad_norm=0.0)  # TrainingArguments wants a GPU
    model = tiny_model()
    with pytest.raises(UserError, match="fp16=True with sonar.*bf16=True"):
        ScheduledOptimizerCallback().on_train_begin(args, None, None, optimizer=build(model, "sonar"), model=model)


def test_accelerate_example_resumes_bit_for_bit(tmp_path):
    pytest.importorskip("accelerate")
    import accelerate_loop

    whole, optimizer, losses = accelerate_loop.main()
    assert optimizer.optimizer.hook_firings == 6 * 2 * 4  # updated at each of two micro-batches
    assert losses[-1] < losses[0]
    _, _, first = accelerate_loop.main(str(tmp_path), save_at=3)
    resumed, again, second = accelerate_loop.main(str(tmp_path), resume=True)
    assert first + second == losses
    assert again.optimizer.steps == 6
    assert differing(weights(whole), weights(resumed)) == []
