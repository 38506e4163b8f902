"""Every parameter is owned once and moves at the scheduler's learning rate (public bug reports)."""

import pytest
import torch
from tiny_moe import LAYERS, backward, batches, build, differing, tiny_model, train, weights
from torch import nn

from sonar_repro import ScheduledOptimizer, make_factory
from sonar_repro.errors import UserError
from sonar_repro.methods import METHODS

SIX = list(METHODS)[:6]  # the paper's
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


class Spy(torch.optim.SGD):
    """Records the learning rate that each of its steps really used."""

    used: list[float] = []

    def step(self, closure=None):
        Spy.used.append(self.param_groups[0]["lr"])
        return super().step(closure)


@pytest.mark.parametrize("method", METHODS)
def test_learning_rate_inside_the_hook_is_the_schedulers(method):
    Spy.used = []
    model = tiny_model()
    optimizer = ScheduledOptimizer(model, lambda named, model: Spy([p for _, p in named], lr=1.0), method)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: (done + 1) / 8)
    calls = 0
    for k, batch in enumerate(batches(4), start=1):
        train(model, optimizer, [batch], scheduler)
        assert Spy.used[calls:] == [k / 8] * (optimizer.optimizer_calls - calls)
        calls = optimizer.optimizer_calls
    assert len(Spy.used) == calls > 0


def test_each_outer_group_has_its_own_learning_rate():
    for method in ("standard_no_expert_clip", "sonar"):
        model = tiny_model()
        start = weights(model)
        optimizer = build(model, method, "lion")
        assert [g["name"] for g in optimizer.param_groups] == ["experts", "other"]
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, batches(1))
        still = set(start) - set(differing(start, weights(model)))
        assert still == {name for name, p in model.named_parameters() if p.ndim == 3}


def test_factory_that_drops_a_parameter_is_refused():
    def factory(named, model):
        return torch.optim.SGD([p for _, p in named[: max(1, len(named) - 1)]], lr=0.1)

    with pytest.raises(UserError, match="SGD leaves out lm_head.weight"):
        ScheduledOptimizer(tiny_model(), factory, "sonar")


def test_factory_that_brings_a_foreign_parameter_is_refused():
    def factory(named, model):
        return torch.optim.SGD([p for _, p in named] + [nn.Parameter(torch.zeros(1))], lr=0.1)

    with pytest.raises(UserError, match="own each one once"):
        ScheduledOptimizer(tiny_model(), factory, "sonar")


def test_optimizer_that_skips_a_tensor_is_noticed_after_the_first_step():
    class Skips(torch.optim.AdamW):
        def step(self, closure=None):
            kept = [p for group in self.param_groups for p in group["params"] if p.ndim == 1]
            grads = [p.grad for p in kept]
            for p in kept:
                p.grad = None
            super().step(closure)
            for p, grad in zip(kept, grads):
                p.grad = grad

    model = tiny_model()
    optimizer = ScheduledOptimizer(model, lambda named, model: Skips([p for _, p in named]), "sonar")
    with pytest.raises(RuntimeError, match="norm.weight had a gradient but Skips did not step it"):
        train(model, optimizer, batches(1))


def test_every_trainable_parameter_is_owned_once():
    for method in METHODS:
        model = tiny_model("granite")
        optimizer = build(model, method)
        owned = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert sorted(owned) == sorted(id(p) for p in model.parameters())
        assert len(optimizer.expert_parameters) == 2 * LAYERS
        assert len(optimizer.expert_parameters) + len(optimizer.other_parameters) == len(owned)
        with pytest.raises(UserError, match="add_param_group"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_tied_embedding_has_one_state_and_one_step_on_the_summed_gradient():
    model, reference = tiny_model("granite"), tiny_model("granite")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    optimizer = ScheduledOptimizer(model, make_factory("sgd", lr=0.5), "optimizer_in_backward")
    state_names = [name for name in optimizer.state_dict()["state"] if "embed" in name or "lm_head" in name]
    assert state_names == ["model.embed_tokens.weight"]
    before = reference.lm_head.weight.detach().clone()
    train(model, optimizer, batches(1))
    backward(reference, batches(1)[0])
    expected = before - 0.5 * reference.lm_head.weight.grad
    torch.testing.assert_close(model.lm_head.weight.detach(), expected, rtol=1e-6, atol=1e-7)
    assert optimizer.optimizer_calls == len(list(model.parameters()))


@pytest.mark.parametrize("method", SIX)
def test_frozen_parameters_are_skipped_and_reported(method):
    model = tiny_model()
    frozen = [GATE_UP, "model.embed_tokens.weight"]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    start = weights(model)
    optimizer = build(model, method)
    train(model, optimizer, batches(2))
    moved = differing(start, weights(model))
    assert set(start) - set(moved) == set(frozen)
    assert any(line.startswith("frozen: 2 tensors") for line in optimizer.describe())
    model.get_parameter(GATE_UP).requires_grad_(True)
    backward(model, batches(1)[0])
    with pytest.raises(RuntimeError, match=f"{GATE_UP} was frozen"):
        optimizer.step()


def test_nothing_to_train_or_no_experts_is_refused():
    model = tiny_model()
    for expert in (p for p in model.parameters() if p.ndim == 3):
        expert.requires_grad_(False)
    with pytest.raises(UserError, match="all 4 expert tensors are frozen"):
        build(model, "sonar")
    model.requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameter"):
        build(model, "standard_global_clip")
    for method in ("sonar", "sonar_per_expert", "standard_no_expert_clip"):
        with pytest.raises(UserError, match="Linear has no batched expert tensor: use optimizer_in_backward"):
            build(nn.Linear(2, 2), method)
    dense = nn.Linear(2, 2)
    optimizer = build(dense, "optimizer_in_backward")
    dense(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.hook_firings == 2


def test_works_with_torchs_own_schedulers_and_step_hooks():
    """OneCycleLR reads ``defaults`` and cycles betas too; step hooks are part of torch.optim.Optimizer."""
    model = tiny_model()
    optimizer = build(model, "sonar")
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=10)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    train(model, optimizer, batches(2), scheduler)
    assert seen == ["pre", "post"] * 2
    for inner in optimizer._inners:
        (group,) = inner.optimizer.param_groups
        assert 0.85 <= group["betas"][0] < 0.95 and group["lr"] > 0
    assert "experts" in repr(optimizer)


def test_factory_may_choose_another_class_for_experts():
    def factory(named, model):
        kind = torch.optim.SGD if "experts" in named[0][0] else torch.optim.AdamW
        return kind([p for _, p in named], lr=0.01)

    model = tiny_model()
    start = weights(model)
    optimizer = ScheduledOptimizer(model, factory, "sonar")
    train(model, optimizer, batches(2))
    assert differing(start, weights(model)) == list(start)
    assert optimizer.optimizer_label() == "torch.optim.AdamW + torch.optim.SGD"
    with pytest.raises(UserError, match=r"AdamW\+SGD cannot be loaded into AdamW"):
        build(tiny_model(), "sonar").load_state_dict(optimizer.state_dict())


def test_expert_without_tokens_moves_by_momentum_as_in_the_standard_schedule():
    idle = 1
    results = []
    for method in ("standard_no_expert_clip", "sonar", "sonar_per_expert"):
        model = tiny_model()
        router = model.model.layers[0].mlp.gate.weight
        router.requires_grad_(False)
        optimizer = build(model, method)
        train(model, optimizer, batches(1))
        gate = model.model.layers[0].mlp.gate
        gate.forward = silence(gate, idle)
        before = weights(model)
        optimizer.zero_grad()
        backward(model, batches(2)[1])
        if method == "standard_no_expert_clip":
            gradient = model.get_parameter(GATE_UP).grad
            assert torch.count_nonzero(gradient[idle]) == 0
            assert torch.count_nonzero(gradient[0]) > 0
        optimizer.step()
        after = weights(model)
        assert not torch.equal(before[GATE_UP][idle], after[GATE_UP][idle])
        results.append(after)
    assert differing(results[0], results[1]) == differing(results[1], results[2]) == []


def silence(gate, expert):
    """A router forward (as OLMoE's) in which no token can choose ``expert``."""

    def forward(hidden):
        logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
        logits[:, expert] = -1e9
        top, index = torch.topk(torch.softmax(logits, dim=-1), gate.top_k, dim=-1)
        return logits, top, index

    return forward
