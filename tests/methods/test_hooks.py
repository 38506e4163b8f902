"""Hooks that fire twice, vanish or are bypassed (public bug reports): refused, naming the parameter."""

import copy
import gc
import weakref

import pytest
import torch
from tiny_moe import backward, batches, build, differing, tiny_model, train, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

from sonar_repro.errors import UserError
from sonar_repro.methods import METHODS

SIX = list(METHODS)[:6]  # the paper's
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


class Pair(nn.Module):
    """Two batched expert tensors used by one layer, twice if asked; found by rule B (attribute ``num_experts``)."""

    def __init__(self):
        super().__init__()
        self.num_experts = 3
        self.w = nn.Parameter(torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)))
        self.v = nn.Parameter(torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1)))

    def forward(self, x):
        return torch.relu(x @ self.w) @ self.v


class PairModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Pair()
        self.head = nn.Linear(4, 2)

    def forward(self, x, use_reentrant=None):
        if use_reentrant is None:
            x = self.experts(self.experts(x))
        else:
            for _ in range(2):  # one weight in two checkpointed segments
                x = checkpoint(self.experts, x, use_reentrant=use_reentrant)
        return self.head(x).square().mean()


def pair_input():
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2)).requires_grad_()


def test_shared_weight_under_reentrant_checkpointing_raises():
    model = PairModel()
    optimizer = build(model, "sonar", "sgd")  # noqa: F841 (hooks live as long as their optimizer)
    with pytest.raises(RuntimeError, match=r"experts\.[wv] got a gradient 2 times.*use_reentrant=False"):
        model(pair_input(), use_reentrant=True).backward()


def test_shared_weight_under_non_reentrant_checkpointing_is_the_standard_update():
    results = []
    for method, use_reentrant in (("standard_no_expert_clip", None), ("sonar", None), ("sonar", False)):
        torch.manual_seed(0)
        model = PairModel()
        optimizer = build(model, method, "sgd")
        for _ in range(3):
            optimizer.zero_grad()
            model(pair_input(), use_reentrant=use_reentrant).backward()
            optimizer.step()
        results.append(weights(model))
    assert differing(results[0], results[1]) == differing(results[1], results[2]) == []


def test_transformers_reentrant_checkpointing_is_refused():
    model = tiny_model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    optimizer = build(model, "sonar")  # noqa: F841
    with pytest.raises(UserError, match="re-entrant.*'use_reentrant': False"):
        backward(model, batches(1)[0])


def test_load_state_dict_with_assign_raises_at_the_next_step():
    for method in SIX:
        model = tiny_model()
        optimizer = build(model, method)
        train(model, optimizer, batches(1))
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        backward(model, batches(1)[0])
        with pytest.raises(RuntimeError, match=r"model\.\S+: the parameter object was replaced"):
            optimizer.step()


def test_replaced_module_raises_at_the_next_step():
    model = tiny_model()
    optimizer = build(model, "sonar")
    train(model, optimizer, batches(1))
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])
    backward(model, batches(1)[0])
    with pytest.raises(RuntimeError, match=r"model\.layers\.1: the module was replaced"):
        optimizer.step()


def test_parameter_added_after_building_raises():
    model = tiny_model()
    optimizer = build(model, "sonar")
    model.adapter = nn.Linear(2, 2)
    backward(model, batches(1)[0])
    with pytest.raises(RuntimeError, match="adapter.weight is trainable but has no optimizer"):
        optimizer.step()


def test_training_a_deepcopy_raises():
    model = tiny_model()
    optimizer = build(model, "sonar")
    clone = copy.deepcopy(model)
    backward(clone, batches(1)[0])
    with pytest.raises(RuntimeError, match=f"no in-backward hook fired.*{GATE_UP}"):
        optimizer.step()
    with pytest.raises(UserError, match="cannot be copied"):
        copy.deepcopy((model, optimizer))


def test_missing_hook_raises():
    model = tiny_model()
    optimizer = build(model, "sonar")
    optimizer.detach()
    backward(model, batches(1)[0])
    with pytest.raises(RuntimeError, match=f"{GATE_UP}: its in-backward hook is gone"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="hook is gone"):
        optimizer.check_attached()


def test_gradient_that_bypassed_its_hook_raises():
    model = tiny_model()
    optimizer = build(model, "sonar")
    loss = model(**batches(1)[0], use_cache=False).loss
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
        p.grad = g
    with pytest.raises(RuntimeError, match="gradient that did not pass its hook"):
        optimizer.step()


def test_backward_with_inputs_fires_the_hooks():
    results = []
    for inputs in (False, True):
        model = tiny_model()
        optimizer = build(model, "sonar")
        loss = model(**batches(1)[0], use_cache=False).loss
        loss.backward(inputs=list(model.parameters()) if inputs else None)
        optimizer.step()
        results.append(weights(model))
    assert differing(*results) == []


def test_second_attachment_is_refused_until_the_first_is_detached_or_dropped():
    model = tiny_model()
    first = build(model, "sonar")
    with pytest.raises(UserError, match=r"already has a ScheduledOptimizer \(.*call its detach\(\)"):
        build(model, "optimizer_in_backward")
    first.detach()
    second = build(model, "sonar")
    gone = weakref.ref(second)
    del second
    assert gone() is None, "no reference cycle: dropping the optimizer must free its state at once"
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters()), "and take its hooks along"
    train(model, build(model, "sonar"), batches(1))


def test_dropped_model_and_optimizer_free_their_tensors_at_once():
    """A retry after an out-of-memory error must not find the first attempt's tensors alive (pytorch#27600)."""
    model = tiny_model()
    optimizer = build(model, "sonar_per_expert")
    train(model, optimizer, batches(1))
    gone = [weakref.ref(model.get_parameter(GATE_UP)), weakref.ref(optimizer)]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        assert [r() for r in gone] == [None, None]
    finally:
        gc.enable()


def test_update_bumps_the_version_counter_so_that_autograd_sees_it():
    """Fused kernels do not; a graph that was kept would silently use changed weights."""
    for method in ("sonar", "sonar_per_expert"):
        model = PairModel()
        optimizer = build(model, method)  # noqa: F841
        x = pair_input()
        hidden = model.experts(x)
        hidden.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            hidden.sum().backward()


@pytest.mark.parametrize("move", ["dtype", "storage"])
def test_moving_the_model_after_attaching_keeps_per_expert_updates_working(move):
    results = []
    for method in ("sonar", "sonar_per_expert"):
        model = tiny_model(dtype=torch.float32)
        optimizer = build(model, method)
        if move == "dtype":
            model.to(torch.bfloat16)
        else:  # what model.to(device) does to each parameter
            for p in model.parameters():
                p.data = p.data.clone()
        start = weights(model)
        train(model, optimizer, batches(3))
        results.append(weights(model))
        assert GATE_UP in differing(start, results[-1])
    assert differing(*results) == []


def test_gradscaler_is_refused_for_in_backward_methods_only():
    model = tiny_model()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = build(model, "sonar")
    with pytest.raises(UserError, match="GradScaler.*bf16"):  # before a tensor moves
        scaler.scale(model(**batches(1)[0], use_cache=False).loss).backward()
    with pytest.raises(UserError, match="GradScaler.*bf16"):
        scaler.step(optimizer)
    plain = tiny_model()
    standard = build(plain, "standard_global_clip")
    scaler.scale(plain(**batches(1)[0], use_cache=False).loss).backward()
    scaler.step(standard)
    assert standard.steps == 1


def test_unreduced_gradients_of_several_processes_are_refused(monkeypatch):
    """Under DDP hooks see local gradients: each rank's experts would go their own way."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = tiny_model()
    optimizer = build(model, "sonar")
    with pytest.raises(UserError, match="not sharded and 2 processes.*FSDP2"):
        backward(model, batches(1)[0])
    optimizer.abandon_step()
    optimizer.zero_grad()
    optimizer.gradients_are_reduced = True
    backward(model, batches(1)[0])
    optimizer.step()
