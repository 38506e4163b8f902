"""A whole tensor's fused AdamW is stepped by its kernels alone, with the same bits, whenever nobody can tell."""

import copy

import pytest
import torch
from tiny_moe import LAYERS, batches, build, differing, tiny_model, train, warm_up, weights
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sonar_repro import ScheduledOptimizer
from sonar_repro.methods.direct import DirectAdamW

HOOKED = 2 * LAYERS


def factory(cls=torch.optim.AdamW, **hyper):
    hyper = {"lr": 3e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True, **hyper}
    return lambda named, model: cls([p for _, p in named], **hyper)


def calls_of_step(monkeypatch, make, steps=3, method="sonar", prepare=lambda optimizer: None):
    """Train; returns the end weights, the inner optimizers' own ``step`` calls per training step, the optimizer."""
    model, calls = tiny_model(), [0]
    optimizer = ScheduledOptimizer(model, make, method)
    kinds = {type(inner.optimizer) for inner in optimizer._inners}
    for kind in kinds:
        plain = kind.step

        def counted(self, closure=None, plain=plain):
            calls[0] += 1
            return plain(self, closure)

        monkeypatch.setattr(kind, "step", counted)
    prepare(optimizer)
    seen = []
    scheduler = warm_up(optimizer)
    for batch in batches(steps):
        calls[0] = 0
        train(model, optimizer, [batch], scheduler)
        seen.append(calls[0])
    monkeypatch.undo()
    return weights(model), seen, optimizer


def test_only_the_first_step_and_the_end_of_a_step_call_the_optimizer(monkeypatch):
    _, calls, optimizer = calls_of_step(monkeypatch, factory())
    assert calls == [HOOKED + 1, 1, 1]
    assert optimizer.optimizer_calls == 3 * (HOOKED + 1), "an update is counted however it is made"
    steps = {float(s["step"]) for inner in optimizer._inners for s in inner.optimizer.state.values()}
    assert steps == {3.0}


def test_expert_by_expert_stays_calls_of_the_optimizer(monkeypatch):
    _, calls, _ = calls_of_step(monkeypatch, factory(), method="sonar_per_expert")
    assert calls == [HOOKED * 4 + 1] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("hyper", [{}, {"weight_decay": 0.0}, {"maximize": True}, {"eps": 1e-3}, {"betas": (0.5, 0.6)}])
def test_same_bits_as_the_optimizers_own_step(monkeypatch, dtype, hyper):
    ends = []
    for direct in (True, False):
        model = tiny_model(dtype=dtype)
        optimizer = ScheduledOptimizer(model, factory(**hyper), "optimizer_in_backward")
        if not direct:
            monkeypatch.setattr(DirectAdamW, "step", lambda self, gradient, found_inf: False)
        train(model, optimizer, batches(5), warm_up(optimizer))
        ends.append((weights(model), optimizer.state_dict()["state"]))
    assert differing(ends[0][0], ends[1][0]) == []
    for name, state in ends[0][1].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(ends[1][1][name][key])), (name, key)


class Subclass(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    "make",
    [
        factory(amsgrad=True),
        factory(fused=False, foreach=False),
        factory(lr=torch.tensor(3e-2)),
        factory(Subclass),
        factory(torch.optim.Adam),
    ],
    ids=["amsgrad", "not fused", "tensor lr", "subclass", "Adam"],
)
def test_anything_else_steps_as_it_always_does(monkeypatch, make):
    _, calls, _ = calls_of_step(monkeypatch, make)
    assert calls == [HOOKED + 1] * 3


def test_hooks_on_a_step_are_called_at_every_step(monkeypatch):
    seen = []

    def hook_inner(optimizer):
        for unit in optimizer._hooked:
            unit.inners[0].optimizer.register_step_post_hook(lambda *_: seen.append("inner"))

    calls_of_step(monkeypatch, factory(), prepare=hook_inner)
    assert seen == ["inner"] * 3 * HOOKED
    seen.clear()
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(type(optimizer).__name__))
    try:
        calls_of_step(monkeypatch, factory())
    finally:
        handle.remove()
    assert seen.count("AdamW") == 3 * (HOOKED + 1)


def test_a_step_replaced_on_the_instance_is_the_one_called(monkeypatch):
    replaced = []

    def replace(optimizer):
        inner = optimizer._hooked[0].inners[0].optimizer
        own = inner.step
        inner.step = lambda: (replaced.append(1), own())

    calls_of_step(monkeypatch, factory(), prepare=replace)
    assert len(replaced) == 3


def test_a_loaded_state_is_the_one_used():
    """load_state_dict makes new tensors: a list kept from before would update the old ones."""
    model, data = tiny_model(), batches(6)
    optimizer = build(model, "sonar")
    train(model, optimizer, data[:3])
    saved, at_three = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, data[3:])
    straight = weights(model)
    model.load_state_dict(at_three)
    optimizer.load_state_dict(saved)
    train(model, optimizer, data[3:])
    assert differing(straight, weights(model)) == []
