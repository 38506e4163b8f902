"""``on_nonfinite``: one bad backward pass leaves experts, moments and step counts as they were, and nothing else."""

import copy
import io
import math

import pytest
import torch
from tiny_moe import HYPER, backward, batches, build, differing, tiny_model, train, weights

from sonar_repro import ScheduledOptimizer, make_factory
from sonar_repro.errors import UserError
from sonar_repro.methods import METHODS, nonfinite
from sonar_repro.training.step import training_step

EXPERTS = ("gate_up_proj", "down_proj")
KINDS = [*HYPER, "mesh_full", "mesh_b_full", "sinkgd", "sage"]


class Spoil(torch.autograd.Function):
    """Identity forward; backward multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def spoiled(module, factor=math.nan):
    """The gradient that leaves ``module`` towards its input is multiplied by ``factor``, the loss stays as it is."""
    return module.register_forward_pre_hook(lambda _, inputs: (Spoil.apply(inputs[0], factor), *inputs[1:]))


def make(method, optimizer="adamw", dtype=torch.float32, **kwargs):
    model = tiny_model(dtype=dtype)
    if optimizer in HYPER:
        return model, build(model, method, optimizer, **kwargs)
    return model, ScheduledOptimizer(model, make_factory(optimizer, lr=1e-3), method, **kwargs)


def experts_of(values):
    return {name: value for name, value in values.items() if name.endswith(EXPERTS)}


def states(optimizer):
    """Every state tensor and number, by parameter and key."""
    flat = {}
    for name, state in optimizer.state_dict()["state"].items():
        flat |= {f"{name}/{key}": torch.as_tensor(value).clone() for key, value in state.items() if value is not None}
    return flat


def kwargs_for(method):
    return {"accumulation": 2, "accumulation_mode": "fold"} if method == "fold" else {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_without_a_bad_gradient_every_bit_is_that_of_off(monkeypatch, optimizer, dtype, on_host):
    """Sonar's hooks, whether the host decides (CPU) or the verdict stays on the device (as on a GPU)."""
    if not on_host:
        monkeypatch.setattr(nonfinite, "on_host", lambda norm: False)
    found = {}
    for mode, check in (("off", "incoming"), ("skip", "incoming"), ("skip", "full"), ("raise", "full")):
        model, mine = make("sonar", optimizer, dtype, on_nonfinite=mode, nonfinite_check=check)
        train(model, mine, batches(4))
        found[mode, check] = weights(model) | states(mine)
        assert mine.skipped_updates == 0
    for key, value in found.items():
        assert differing(found["off", "incoming"], value) == [], key


@pytest.mark.parametrize("method", [*METHODS, "fold"])
def test_without_a_bad_gradient_every_method_keeps_its_bits(method):
    found = {}
    for mode in ("off", None):
        model, mine = make(method.replace("fold", "sonar"), on_nonfinite=mode, **kwargs_for(method))
        train(model, mine, batches(4), accumulation=mine.accumulation)
        found[mode] = weights(model) | states(mine)
    assert differing(found["off"], found[None]) == []


@pytest.mark.parametrize("method", [*METHODS, "fold"])
@pytest.mark.parametrize("factor", [math.nan, math.inf], ids=["nan", "inf"])
def test_one_bad_backward_behind_the_usual_guard(method, factor):
    """CASES "One bad backward", with the API's defaults: the loop skips the step if the norm is not finite."""
    model, mine = make(method.replace("fold", "sonar"), **kwargs_for(method))
    train(model, mine, batches(4), accumulation=mine.accumulation)
    before = weights(model)
    norm = mine.max_grad_norm
    handle = spoiled(model.model.norm, factor)
    mine.zero_grad()
    for _ in mine.backward_passes():
        for batch in batches(mine.accumulation, seed=7):
            assert math.isfinite(float(model(**batch).loss))
            backward(model, batch)
    norm = mine.clip_gradients().norm
    if norm is not None:
        assert not math.isfinite(float(norm))
    if norm is None and not mine._hooked:  # standard_no_clip: its loop has a norm of its own
        norm = torch.tensor(math.nan)
    if norm is None:
        mine.step()
    else:
        mine.zero_grad()
        mine.abandon_step()
    handle.remove()
    assert differing(experts_of(before), experts_of(weights(model))) == []
    train(model, mine, batches(4, seed=9), accumulation=mine.accumulation)
    after = weights(model)
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert set(differing(experts_of(before), experts_of(after))) == set(experts_of(before))


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("method", ["sonar", "sonar_per_expert", "optimizer_in_backward", "standard_no_expert_clip"])
def test_a_skipped_step_changes_nothing_below_the_fault(monkeypatch, method, optimizer, on_host):
    """No guard in the loop: ``step`` is called. Weights, moments and step counts of what got NaN stay as they were."""
    if method == "sonar_per_expert" and optimizer in ("mesh_full", "mesh_b_full", "sinkgd", "sage"):
        pytest.skip("roles are given to whole tensors")
    if not on_host:
        monkeypatch.setattr(nonfinite, "on_host", lambda norm: False)
    model, mine = make(method, optimizer)
    train(model, mine, batches(3))
    before = weights(model) | states(mine)
    handle = spoiled(model.model.norm)
    train(model, mine, batches(1, seed=7))
    handle.remove()
    after = weights(model) | states(mine)
    moved = {name.split("/")[0] for name in differing(before, after)}
    above = {"lm_head.weight", "model.norm.weight"} if method == "optimizer_in_backward" else set()
    assert moved == above
    assert mine.skipped_updates == len(weights(model)) - len(above)
    assert mine.steps == 4
    train(model, mine, batches(1, seed=8))
    assert all(bool(value.isfinite().all()) for value in weights(model).values())


def test_only_what_lies_below_the_fault_is_skipped():
    """NaN enters between the layers: the upper layer's experts were updated, the lower ones' were not: partial."""
    model, mine = make("sonar")
    train(model, mine, batches(3))
    before = weights(model)
    handle = spoiled(model.model.layers[1].input_layernorm)
    train(model, mine, batches(1, seed=7))
    handle.remove()
    assert set(differing(before, weights(model))) == {f"model.layers.1.mlp.experts.{name}" for name in EXPERTS}
    assert mine.skipped_updates == len(before) - 2


@pytest.mark.parametrize("check, kept", [("incoming", False), ("full", True)])
@pytest.mark.parametrize("method", ["sonar", "sonar_per_expert", "standard_no_expert_clip"])
def test_a_gradient_that_breaks_inside_the_experts_needs_the_full_check(method, check, kept):
    """The documented limit of ``incoming``: dL/dy is finite, one weight's own gradient is not."""
    model, mine = make(method, nonfinite_check=check)
    down = model.model.layers[0].mlp.experts.down_proj
    down.register_hook(lambda gradient: gradient.index_fill(1, torch.tensor([3]), math.inf))
    train(model, mine, batches(1))
    assert bool(down.isfinite().all()) is kept
    assert (mine.skipped_updates > 0) is kept


@pytest.mark.parametrize("method", ["sonar_tensor_clip", "sonar_exact_clip", "sonar_delayed_clip", "sonar_lagged_clip"])
def test_a_norm_that_the_clip_knows_is_a_full_check(method):
    model, mine = make(method)
    down = model.model.layers[0].mlp.experts.down_proj
    train(model, mine, batches(2))
    before = weights(model)
    handle = down.register_hook(lambda gradient: gradient * math.nan)
    train(model, mine, batches(1, seed=7))
    handle.remove()
    name = "model.layers.0.mlp.experts.down_proj"
    assert name not in differing(before, weights(model)) and mine.skipped_updates >= 1
    train(model, mine, batches(2, seed=8))
    assert all(bool(value.isfinite().all()) for value in weights(model).values())


def test_lagged_clip_goes_on_with_the_last_finite_norm():
    model, mine = make("sonar_lagged_clip")
    train(model, mine, batches(2))
    good = mine._clip.previous.clone()
    handle = spoiled(model.model.norm)
    train(model, mine, batches(1, seed=7))
    handle.remove()
    assert torch.equal(mine._clip.previous, good)


def test_lagged_clip_that_starts_with_a_bad_step_clips_nothing_in_the_next():
    results = []
    for bad in (True, False):
        model, mine = make("sonar_lagged_clip")
        if bad:
            handle = spoiled(model.model.norm)
            train(model, mine, batches(1, seed=7))
            handle.remove()
        train(model, mine, batches(2))
        results.append(weights(model))
    assert differing(*results) == []


@pytest.mark.parametrize("bad", [0, 1])
def test_fold_leaves_a_tensor_alone_when_one_of_its_micro_batches_is_bad(bad):
    model, mine = make("sonar", accumulation=2, accumulation_mode="fold")
    train(model, mine, batches(4), accumulation=2)
    before = weights(model)
    for index, batch in enumerate(batches(2, seed=7)):
        handle = spoiled(model.model.norm) if index == bad else None
        backward(model, batch, divide=2)
        if handle:
            handle.remove()
    mine.step()
    assert differing(before, weights(model)) == []
    mine.zero_grad()
    train(model, mine, batches(2, seed=8), accumulation=2)
    assert all(bool(value.isfinite().all()) for value in weights(model).values())


def test_update_each_leaves_out_the_bad_micro_batch_only():
    model, mine = make("sonar", accumulation=2, accumulation_mode="update_each")
    train(model, mine, batches(4), accumulation=2)
    first, second = batches(2, seed=7)
    handle = spoiled(model.model.norm)
    backward(model, first, divide=2)
    handle.remove()
    backward(model, second, divide=2)
    mine.step()
    assert mine.skipped_updates == len(weights(model))  # four experts once, and the rest, whose sum is bad
    assert {float(s["step"]) for u in mine._hooked for s in u.inners[0].optimizer.state.values()} == {2 * 2 + 1.0}


@pytest.mark.parametrize("method", ["sonar", "standard_global_clip", "optimizer_in_backward"])
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_raise_names_a_tensor_after_the_step_and_training_can_go_on(monkeypatch, method, on_host):
    if not on_host:
        monkeypatch.setattr(nonfinite, "on_host", lambda norm: False)
    model, mine = make(method, on_nonfinite="raise")
    train(model, mine, batches(2))
    before = weights(model)
    handle = spoiled(model.model.norm)
    with pytest.raises(RuntimeError, match=r"non-finite gradient of model\..*on_nonfinite='skip'") as error:
        train(model, mine, batches(1, seed=7))
    handle.remove()
    assert "\n" not in str(error.value)
    assert differing(experts_of(before), experts_of(weights(model))) == []
    train(model, mine, batches(1, seed=8))
    assert all(bool(value.isfinite().all()) for value in weights(model).values())


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "adamw8bit"])
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_the_very_first_backward_may_be_the_bad_one(monkeypatch, optimizer, on_host):
    if not on_host:
        monkeypatch.setattr(nonfinite, "on_host", lambda norm: False)
    results = []
    for bad in (True, False):
        model, mine = make("sonar", optimizer)
        if bad:
            handle = spoiled(model.model.norm)
            train(model, mine, batches(1, seed=7))
            handle.remove()
            assert mine.skipped_updates == len(weights(model))
        train(model, mine, batches(2))
        results.append(weights(model))
    assert differing(*results) == []


def test_off_is_what_the_papers_code_does():
    model, mine = make("sonar", on_nonfinite="off")
    handle = spoiled(model.model.norm)
    train(model, mine, batches(1))
    handle.remove()
    assert not any(bool(value.isfinite().all()) for value in experts_of(weights(model)).values())
    assert mine.skipped_updates == 0


@pytest.mark.parametrize("how", ["checkpointing", "compiled", "frozen below"])
def test_guard_under_what_a_forward_hook_may_not_survive(how):
    model, mine = make("sonar")
    if how == "frozen below":
        for name, p in model.named_parameters():
            p.requires_grad_("layers.1.mlp.experts" in name)
        mine.detach()
        mine = build(model, "sonar")
    if how == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = torch.compile(model, backend="eager") if how == "compiled" else model
    train(trained, mine, batches(2))
    before = weights(model)
    handle = spoiled(model.model.norm)
    if how == "compiled":  # a compiled model does not see hooks that come later
        torch._dynamo.reset()
        trained = torch.compile(model, backend="eager")
    train(trained, mine, batches(1, seed=7))
    handle.remove()
    assert differing(before, weights(model)) == []


def test_a_copy_of_the_model_watches_nothing_and_can_be_saved():
    model, mine = make("sonar")
    clone = copy.deepcopy(model)
    backward(clone, batches(1)[0])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    backward(loaded, batches(1)[0])
    assert mine._guard._incoming == {} and mine.hook_firings == 0
    mine.detach()
    backward(model, batches(1)[0])
    assert mine._guard._incoming == {}


def test_hidden_momentum_cannot_be_guarded():
    from tiny_whale import family

    model = family("olmoe")
    factory = make_factory("mesh", lr=1e-3)
    assert ScheduledOptimizer(model, factory, "standard_no_clip").on_nonfinite == "off"
    for mode in ("skip", "raise"):
        with pytest.raises(UserError, match=f"on_nonfinite={mode}.*mesh_full.*on_nonfinite=off"):
            ScheduledOptimizer(family("olmoe"), factory, "standard_no_clip", on_nonfinite=mode)


@pytest.mark.parametrize("kwargs", [{"on_nonfinite": "stop"}, {"on_nonfinite": True}, {"nonfinite_check": "all"}])
def test_unknown_settings_are_refused(kwargs):
    with pytest.raises(UserError, match=f"{next(iter(kwargs))}=.*choose one of"):
        make("sonar", **kwargs)


def test_fake_tensors_take_the_devices_way_without_reading_a_value():
    """A data-dependent read would raise under FakeTensorMode; a full check reads each expert gradient once more."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Norms(TorchDispatchMode):
        read = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "norm" in func._schema.name:
                tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
                self.read += sum(t.numel() for t in tensors)
            return func(*args, **(kwargs or {}))

    read = {}
    for check in ("incoming", "full"):
        with FakeTensorMode():
            model = tiny_model(dtype=torch.bfloat16)
            mine = ScheduledOptimizer(model, make_factory("adamw", lr=1e-3), "sonar", nonfinite_check=check)
            ids = torch.zeros((2, 12), dtype=torch.int64)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
            for _ in range(2):
                with Norms() as norms:
                    training_step(model, mine, None, [batch])
            read[check] = norms.read
    experts = sum(p.numel() for p in mine.expert_parameters)
    incoming = 2 * 2 * 12 * 32  # layers x tokens x hidden
    assert read["full"] - read["incoming"] == experts - incoming
