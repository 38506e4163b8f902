"""Known faults of in-backward updates (public bug reports): each one with the right value or the right refusal."""

import copy
import gc
import weakref

import pytest
import torch
from tiny_moe import HYPER, LAYERS, batches, build, differing, tiny_model, train, warm_up, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

from sonar_repro import ScheduledOptimizer, make_factory
from sonar_repro.errors import UserError
from sonar_repro.methods import METHODS

SIX = list(METHODS)[:6]  # the paper's

IN_BACKWARD = ("sonar", "sonar_per_expert", "optimizer_in_backward")
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def backward(model, batch, divide=1):
    (model(**batch, use_cache=False).loss / divide).backward()


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


# ---- accumulation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", IN_BACKWARD)
def test_accumulation_is_refused_unless_told_what_to_do(method):
    with pytest.raises(UserError, match="accumulation=4.*update_each.*standard_"):
        build(tiny_model(), method, accumulation=4)


@pytest.mark.parametrize("method", ["standard_global_clip", "standard_no_expert_clip", "standard_no_clip"])
def test_standard_methods_refuse_in_backward_accumulation(method):
    with pytest.raises(UserError, match="accumulation_mode=update_each.*use accumulation_mode=standard"):
        build(tiny_model(), method, accumulation=4, accumulation_mode="update_each")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_bad_accumulation_names_the_value(value):
    with pytest.raises(UserError, match=f"accumulation={value!r}"):
        build(tiny_model(), "sonar", accumulation=value, accumulation_mode="update_each")


@pytest.mark.parametrize("method", IN_BACKWARD)
def test_undeclared_second_backward_raises_and_names_the_parameter(method):
    model = tiny_model()
    optimizer = build(model, method)
    first, second = batches(2)
    backward(model, first, 2)
    with pytest.raises(RuntimeError, match=r"got a gradient 2 times.*accumulation_mode='update_each'"):
        backward(model, second, 2)
    optimizer.abandon_step()
    optimizer.zero_grad()
    backward(model, second)
    optimizer.step()
    assert optimizer.steps == 1


def test_update_each_is_a_updates_of_the_experts_and_one_of_the_rest():
    """The paper's Sonar with A = 4 (§4.4), against two plain AdamW stepped by hand."""
    model = tiny_model(dtype=torch.bfloat16)
    optimizer = build(model, "sonar", accumulation=4, accumulation_mode="update_each")
    train(model, optimizer, batches(8), warm_up(optimizer), accumulation=4)

    reference = tiny_model(dtype=torch.bfloat16)
    experts = [p for p in reference.parameters() if p.ndim == 3]
    rest = [p for p in reference.parameters() if p.ndim != 3]
    inner, outer = (torch.optim.AdamW(ps, fused=True, **HYPER["adamw"]) for ps in (experts, rest))
    schedulers = [warm_up(inner), warm_up(outer)]
    for k, batch in enumerate(batches(8)):
        backward(reference, batch, 4)
        inner.step()
        inner.zero_grad()
        if k % 4 == 3:
            torch.nn.utils.clip_grad_norm_(rest, 1.0)
            outer.step()
            outer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
    assert differing(weights(model), weights(reference)) == []
    assert optimizer.hook_firings == 2 * 4 * 2 * LAYERS
    assert optimizer.optimizer_calls == 2 * (4 * 2 * LAYERS + 1)


def test_update_each_second_moment_is_the_recursion_of_section_4_4():
    """v_hook = b2^A v + (1-b2) sum b2^(A-a) g_a^2, against v_std = b2 v + (1-b2) mean-gradient^2, in fp32."""
    hyper = {"lr": 0.0, "betas": (0.9, 0.95), "weight_decay": 0.0}  # lr 0: both schedules see the same gradients
    data, moments, gradients = batches(4), {}, []
    for method, mode in (("standard_no_expert_clip", "standard"), ("sonar", "update_each")):
        model = tiny_model()
        optimizer = ScheduledOptimizer(
            model, make_factory("adamw", **hyper), method, accumulation=2, accumulation_mode=mode
        )
        train(model, optimizer, data, accumulation=2)
        moments[mode] = optimizer.state_dict()["state"][GATE_UP]
    for batch in data:
        model = tiny_model()
        backward(model, batch, 2)
        gradients.append(model.get_parameter(GATE_UP).grad.double())
    beta = 0.95
    v_hook, v_std = torch.zeros(()).double(), torch.zeros(()).double()
    for g1, g2 in (gradients[:2], gradients[2:]):
        v_hook = beta**2 * v_hook + (1 - beta) * (beta * g1**2 + g2**2)
        v_std = beta * v_std + (1 - beta) * (g1 + g2) ** 2
    torch.testing.assert_close(moments["update_each"]["exp_avg_sq"].double(), v_hook, rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(moments["standard"]["exp_avg_sq"].double(), v_std, rtol=1e-4, atol=1e-12)
    assert (v_hook - v_std).abs().max() > 0.1 * v_std.max(), "the two recursions must be distinguishable here"
    assert (moments["update_each"]["step"], moments["standard"]["step"]) == (4, 2)


# ---- clipping and the reported norm -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, scope",
    [("standard_global_clip", "all"), ("standard_no_expert_clip", "non_expert"), ("sonar", "non_expert")],
)
def test_reported_norm_is_that_of_its_scope(method, scope):
    model, reference = tiny_model(), tiny_model()
    optimizer = build(model, method)
    train(model, optimizer, batches(1))
    backward(reference, batches(1)[0])
    covered = [p for p in reference.parameters() if scope == "all" or p.ndim != 3]
    expected = torch.sqrt(sum(p.grad.double().square().sum() for p in covered))
    assert optimizer.last_clip.scope == scope
    torch.testing.assert_close(optimizer.last_clip.norm.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", ["standard_no_clip", "optimizer_in_backward"])
def test_norm_that_was_not_measured_is_none_not_zero(method):
    model = tiny_model()
    optimizer = build(model, method)
    assert optimizer.last_clip.norm is None
    train(model, optimizer, batches(1))
    assert (optimizer.last_clip.norm, optimizer.last_clip.scope) == (None, "none")


def test_no_max_grad_norm_measures_nothing():
    model = tiny_model()
    optimizer = build(model, "sonar", max_grad_norm=None)
    train(model, optimizer, batches(1))
    assert (optimizer.last_clip.norm, optimizer.last_clip.scope) == (None, "none")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), True, "1.0"])
def test_bad_max_grad_norm_names_the_value(value):
    with pytest.raises(UserError, match="max_grad_norm="):
        build(tiny_model(), "sonar", max_grad_norm=value)


# ---- learning rate ----------------------------------------------------------------------------------------------


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


# ---- ownership --------------------------------------------------------------------------------------------------


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


# ---- hooks: fired twice, gone, bypassed ---------------------------------------------------------------------------


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
    with pytest.raises(UserError, match=r"already has an in-backward optimizer: call its detach\(\)"):
        build(model, "optimizer_in_backward")
    first.detach()
    second = build(model, "sonar")
    gone = weakref.ref(second)
    del second
    assert gone() is None, "no reference cycle: dropping the optimizer must free its state at once"
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


def test_moving_the_model_after_attaching_keeps_per_expert_updates_working():
    results = []
    for method in ("sonar", "sonar_per_expert"):
        model = tiny_model(dtype=torch.float32)
        optimizer = build(model, method)
        model.to(torch.bfloat16)
        train(model, optimizer, batches(3))
        results.append(weights(model))
        assert results[-1][GATE_UP].dtype == torch.bfloat16
    assert differing(*results) == []


def test_gradscaler_is_refused_for_in_backward_methods_only():
    model = tiny_model()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = build(model, "sonar")
    scaler.scale(model(**batches(1)[0], use_cache=False).loss).backward()
    with pytest.raises(UserError, match="GradScaler.*bf16"):
        scaler.step(optimizer)
    plain = tiny_model()
    standard = build(plain, "standard_global_clip")
    scaler.scale(plain(**batches(1)[0], use_cache=False).loss).backward()
    scaler.step(standard)
    assert standard.steps == 1


# ---- an expert without tokens -------------------------------------------------------------------------------------


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


# ---- several processes ----------------------------------------------------------------------------------------------


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
