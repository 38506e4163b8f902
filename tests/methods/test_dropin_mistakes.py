"""Mistakes of people's own loops: each is refused in one line, or does what was meant; the values are torch's own."""

import copy
import functools
import warnings

import pytest
import torch
from tiny_moe import backward, batches, build, differing, tiny_model, train, weights
from torch import nn
from torch.nn.utils import clip_grad_norm_, parametrize

from sonar_repro import ScheduledOptimizer, from_torch_state, make_factory
from sonar_repro.errors import UserError

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
FACTORY = make_factory("adamw", **HYPER)
EXPERT = "model.layers.0.mlp.experts.gate_up_proj"


def one_line(error):
    return "\n" not in str(error.value)


# ---- another model is trained (14.7) --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["standard_no_expert_clip", "standard_global_clip", "standard_no_clip"])
@pytest.mark.parametrize("how", ["other", "deepcopy", "twin with a shared head"])
def test_an_optimizer_of_another_model_is_an_error_at_the_first_step(method, how):
    model = tiny_model()
    optimizer = build(model, method)
    trained = tiny_model(seed=1) if how == "other" else copy.deepcopy(model)
    said = "none of its 25 parameters received a gradient in this step.*build the optimizer last"
    if how == "twin with a shared head":
        trained.lm_head = model.lm_head
        said = r"\(24 of 25 parameters\) received no gradient in the first step, and the model .* never ran"
    before = weights(model)
    backward(trained, batches(1)[0])
    with pytest.raises(RuntimeError, match=said) as error:
        optimizer.step()
    assert one_line(error) and differing(before, weights(model)) == []


@pytest.mark.parametrize("method", ["standard_no_expert_clip", "sonar"])
def test_parts_that_a_step_does_not_use_are_no_error(method):
    """A tower that this step leaves out: trained on, and named once."""
    model = tiny_model()
    model.tower = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30)))  # more tensors than are used
    optimizer = build(model, method)
    with pytest.warns(UserWarning, match=r"tower.0.weight \(60 of 85 parameters\) received no gradient"):
        train(model, optimizer, batches(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, batches(1))


@pytest.mark.parametrize("how", ["frozen before", "frozen afterwards", "unused expert"])
def test_frozen_layers_and_unused_experts_are_no_fault(how):
    model = tiny_model()
    if how == "frozen before":
        model.model.embed_tokens.weight.requires_grad_(False)
    optimizer = build(model, "standard_no_expert_clip")
    if how == "frozen afterwards":
        model.model.embed_tokens.weight.requires_grad_(False)
    batch = batches(1, length=1, size=1) if how == "unused expert" else batches(1)  # one token, two of four experts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, batch)


# ---- clipped twice (14.24) ------------------------------------------------------------------------------------------


def loop(method, clip=None, steps=3, **kwargs):
    model = tiny_model()
    optimizer = ScheduledOptimizer(model, FACTORY, method, max_grad_norm=0.5, **kwargs)
    for batch in batches(steps):
        optimizer.zero_grad()
        for _ in optimizer.backward_passes():
            backward(model, batch)
        if clip is not None:
            clip(model)
        optimizer.step()
    return weights(model)


def same_bound(model):
    clip_grad_norm_(model.parameters(), 0.5)


def through_accelerate(model):
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True).clip_grad_norm_(model.parameters(), 0.5)


@pytest.mark.parametrize("clip", [same_bound, through_accelerate])
def test_a_second_clip_finds_nothing_to_do_after_exact_clipping(clip):
    """The right value is global clipping, once; the loop's line used to move weights by 0.03."""
    assert differing(loop("sonar_exact_clip", clip), loop("standard_global_clip")) == []


@pytest.mark.parametrize("method", ["sonar_lagged_clip", "sonar_offload_clip"])
def test_a_second_clip_that_would_spoil_the_joint_norm_is_refused(method):
    with pytest.raises(UserError, match=r"clip_grad_norm_ line in the loop\?.*leave the line out.*max_grad_norm="):
        loop(method, same_bound)
    loop(method)


@pytest.mark.parametrize("bound", [0.1, 1e-3])
def test_a_second_clip_with_a_lower_bound_is_refused_after_exact_clipping(bound):
    with pytest.raises(UserError, match="clip=exact had clipped them.*lower bound") as error:
        loop("sonar_exact_clip", lambda model: clip_grad_norm_(model.parameters(), bound))
    assert one_line(error)


@pytest.mark.parametrize("method", ["sonar", "standard_global_clip", "sonar_delayed_clip"])
def test_other_methods_find_nothing_to_do_in_a_second_clip(method):
    """Up to the 1e-6 in torch's coefficient: AdamW's step does not depend on the gradient's scale but through eps."""
    once, twice = loop(method), loop(method, same_bound)
    for name, value in once.items():
        torch.testing.assert_close(twice[name], value, rtol=0, atol=3 * 1e-2 * 1e-3)


def test_a_clip_line_that_clips_experts_which_the_method_does_not_is_named():
    with pytest.warns(UserWarning, match="experts.*clip_grad_norm_ line.*clip=non_expert"):
        loop("standard_no_expert_clip", same_bound)


# ---- optimizer.state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["standard_no_clip", "sonar", "sonar_per_expert", "optimizer_in_backward"])
def test_clearing_and_assigning_the_state_has_effect(method):
    """After ``state.clear()`` or ``state = {}`` training goes on as from a fresh optimizer."""
    results = []
    for how in ("clear", "assign", "delete", "fresh"):
        model = tiny_model()
        optimizer = build(model, method)
        train(model, optimizer, batches(2))
        if how == "clear":
            optimizer.state.clear()
        elif how == "assign":
            optimizer.state = {}
        elif how == "delete":
            for p in list(optimizer.state):
                del optimizer.state[p]
        else:
            optimizer.detach()
            optimizer = build(model, method)
        assert len(optimizer.state) == 0
        train(model, optimizer, batches(2, seed=3))
        results.append(weights(model))
    for other in results[:-1]:
        assert differing(results[-1], other) == []


@pytest.mark.parametrize("method", ["standard_no_clip", "sonar", "optimizer_in_backward"])
def test_writing_one_entry_of_the_state_has_effect(method):
    model = tiny_model()
    optimizer = build(model, method)
    train(model, optimizer, batches(1))
    p = dict(model.named_parameters())[EXPERT]
    optimizer.state[p]["exp_avg"] = torch.full_like(p, 3.0)
    assert bool((optimizer.state_dict()["state"][EXPERT]["exp_avg"] == 3.0).all())


def test_per_expert_state_is_assigned_as_a_whole_or_refused():
    model = tiny_model()
    optimizer = build(model, "sonar_per_expert")
    train(model, optimizer, batches(1))
    p = dict(model.named_parameters())[EXPERT]
    for write in (
        lambda s: s.__setitem__("exp_avg", torch.zeros_like(p)),
        lambda s: s.update(exp_avg=0),
        lambda s: s.pop("step"),
    ):
        with pytest.raises(UserError, match="stacked from one an expert"):
            write(optimizer.state[p])
    optimizer.state[p] = {**optimizer.state[p], "exp_avg": torch.full_like(p, 3.0)}
    assert bool((optimizer.state[p]["exp_avg"] == 3.0).all())


@pytest.mark.parametrize("value", [3, [1], {"a": {}}, {nn.Parameter(torch.zeros(2)): {}}])
def test_a_state_that_is_none_is_refused_and_nothing_is_lost(value):
    model = tiny_model()
    optimizer = build(model, "sonar")
    train(model, optimizer, batches(1))
    with pytest.raises(UserError, match="optimizer.state"):
        optimizer.state = value
    assert len(optimizer.state) == 25
    with pytest.raises(KeyError):
        optimizer.state[nn.Parameter(torch.zeros(2))]


# ---- construction ---------------------------------------------------------------------------------------------------


def transformers_adafactor(named, model):
    from transformers.optimization import Adafactor

    return Adafactor([p for _, p in named], lr=1e-3, relative_step=False, scale_parameter=False)


class Counting(torch.optim.Optimizer):
    """A number an expert that depends on its values: no batched form."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["norm"] = float(p.grad.norm())


@pytest.mark.parametrize("factory", [transformers_adafactor, Counting], ids=["adafactor", "own"])
def test_per_expert_states_without_a_batched_form_are_refused_at_construction(factory):
    model = tiny_model()
    with pytest.raises(UserError, match="granularity=expert with .*could not be saved.*granularity=tensor") as error:
        ScheduledOptimizer(model, factory, "sonar_per_expert")
    assert one_line(error)
    optimizer = ScheduledOptimizer(model, factory, "sonar")
    train(model, optimizer, batches(1))
    optimizer.state_dict()


@pytest.mark.parametrize("kind", [torch.optim.RAdam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adamax])
def test_per_expert_states_with_a_batched_form_are_taken_and_saved(kind):
    results = []
    for method in ("sonar", "sonar_per_expert"):
        model = tiny_model()
        optimizer = ScheduledOptimizer(model, kind, method, lr=1e-3)
        train(model, optimizer, batches(2))
        state = optimizer.state_dict()["state"][EXPERT]
        results.append(weights(model) | {key: torch.as_tensor(value) for key, value in state.items()})
    assert differing(*results) == []


class Plus(nn.Module):
    def forward(self, x):
        return x * 1.0


@pytest.mark.parametrize("method", ["sonar", "standard_no_expert_clip", "sonar_exact_clip"])
@pytest.mark.parametrize("names", [["gate_up_proj"], ["gate_up_proj", "down_proj"]])
def test_a_parametrized_expert_is_refused(method, names):
    model = tiny_model()
    for name in names:
        parametrize.register_parametrization(model.model.layers[0].mlp.experts, name, Plus())
    with pytest.raises(
        UserError, match=r"experts.gate_up_proj is an expert tensor under a parametrization \(Plus\)"
    ) as e:
        build(model, method)
    assert one_line(e)


def test_a_parametrization_elsewhere_or_frozen_is_none_of_our_business():
    model = tiny_model()
    parametrize.register_parametrization(model.lm_head, "weight", Plus())
    train(model, build(model, "sonar"), batches(1))


@pytest.mark.parametrize("first", ["sonar", "standard_global_clip", "optimizer_in_backward"])
@pytest.mark.parametrize("second", ["sonar", "standard_no_clip"])
def test_two_optimizers_on_one_model_are_refused(first, second):
    model = tiny_model()
    one = build(model, first)
    with pytest.raises(UserError, match=r"already has .*detach\(\) first"):
        build(model, second)
    one.detach()
    two = build(model, second)
    train(model, two, batches(1))
    two.circle = two  # dropped, but only the cycle collector can see it
    del two
    train(model, build(model, first), batches(1))


# ---- a checkpoint of torch's own AdamW ------------------------------------------------------------------------------


def torch_run(steps, named=False, frozen=False, groups=False, resume=None, dtype=torch.float32):
    """Plain torch: AdamW and a scheduler, no clipping. Returns the model and the optimizer."""
    model = tiny_model(dtype=dtype)
    if frozen:
        model.model.embed_tokens.weight.requires_grad_(False)
    parameters = list(model.named_parameters()) if named else list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True, **HYPER)
    for batch in batches(6)[:steps]:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("method", ["sonar", "sonar_per_expert", "standard_no_clip", "optimizer_in_backward"])
@pytest.mark.parametrize("how", ["order", "names", "frozen", "bf16"])
def test_a_torch_checkpoint_goes_on_bit_for_bit(method, how):
    options = {"named": how == "names", "frozen": how == "frozen"}
    options["dtype"] = torch.bfloat16 if how == "bf16" else torch.float32
    whole, _ = torch_run(6, **options)
    model, first = torch_run(3, **options)
    saved = copy.deepcopy(first.state_dict())
    optimizer = ScheduledOptimizer(model, make_factory("adamw", lr=0.5), method, max_grad_norm=None)
    optimizer.load_state_dict(from_torch_state(saved, optimizer))
    assert optimizer.steps == 3 and {g["lr"] for g in optimizer.param_groups} == {1e-2}
    for batch in batches(6)[3:]:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    assert differing(weights(whole), weights(model)) == []


def test_groups_without_names_need_names_and_equal_settings():
    model = tiny_model()
    named = list(model.named_parameters())
    decay = [(n, p) for n, p in named if p.ndim > 1]
    rest = [(n, p) for n, p in named if p.ndim <= 1]
    groups = [{"params": [p for _, p in decay]}, {"params": [p for _, p in rest], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, fused=True, **HYPER)
    backward(model, batches(1)[0])
    plain.step()
    model.zero_grad()
    order = [n for n, _ in decay + rest]
    optimizer = ScheduledOptimizer(model, FACTORY, "sonar")
    with pytest.raises(UserError, match="2 parameter groups and no names"):
        from_torch_state(plain.state_dict(), optimizer)
    with pytest.raises(UserError, match="weight_decay=.* for parameters of the group other"):
        from_torch_state(plain.state_dict(), optimizer, names=order)
    with pytest.raises(UserError, match="another order of parameters"):
        from_torch_state(plain.state_dict(), optimizer, names=order[::-1])
    optimizer.detach()

    def split(named_parameters, _):
        sides = ([p for _, p in named_parameters if p.ndim > 1], [p for _, p in named_parameters if p.ndim <= 1])
        both = [{"params": sides[0]}, {"params": sides[1], "weight_decay": 0.0}]
        return torch.optim.AdamW([group for group in both if group["params"]], fused=True, **HYPER)

    mine = ScheduledOptimizer(model, split, "sonar", max_grad_norm=None)
    mine.load_state_dict(from_torch_state(plain.state_dict(), mine, names=order))
    reference = copy.deepcopy(model)
    by_name = dict(reference.named_parameters())
    groups = [
        {"params": [by_name[n] for n, _ in decay]},
        {"params": [by_name[n] for n, _ in rest], "weight_decay": 0.0},
    ]
    again = torch.optim.AdamW(groups, fused=True, **HYPER)
    again.load_state_dict(plain.state_dict())
    for trained, optimizer in ((model, mine), (reference, again)):
        backward(trained, batches(1, seed=4)[0])
        optimizer.step()
    assert differing(weights(reference), weights(model)) == []


def test_what_is_no_checkpoint_of_this_model_is_refused():
    model, plain = torch_run(1)
    optimizer = ScheduledOptimizer(model, FACTORY, "sonar")
    with pytest.raises(UserError, match="from_torch_state"):
        optimizer.load_state_dict(plain.state_dict())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).state_dict()
    for broken, said in (
        ({}, "not a torch optimizer's"),
        (torch.optim.AdamW([nn.Parameter(torch.zeros(2))]).state_dict(), "1 parameters, the model 25"),
        (sgd | {"state": {0: {"momentum_buffer": 1}}}, "is not AdamW's"),
    ):
        with pytest.raises(UserError, match=said):
            from_torch_state(broken, optimizer)


# ---- factories (14.17) ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "factory, hyper",
    [
        (torch.optim.AdamW, {**HYPER, "fused": True}),
        (functools.partial(torch.optim.AdamW, fused=True, **HYPER), {}),
        ((torch.optim.AdamW, {**HYPER, "fused": True}), {}),
        (functools.partial(torch.optim.AdamW, fused=True, lr=3.0), HYPER),
        (lambda named, model: torch.optim.AdamW([p for _, p in named], fused=True, **HYPER), {}),
    ],
    ids=["class", "partial", "pair", "partial and keywords", "function"],
)
def test_a_class_with_its_settings_is_a_factory(factory, hyper):
    results = []
    for given, keywords in ((factory, hyper), (FACTORY, {})):
        model = tiny_model()
        train(model, ScheduledOptimizer(model, given, "sonar", **keywords), batches(3))
        results.append(weights(model))
    assert differing(*results) == []


@pytest.mark.parametrize(
    "factory, hyper, said",
    [
        (None, {}, "factory=None.*make_factory"),
        ("adamw", {}, "factory='adamw'.*make_factory"),
        (torch.optim.AdamW([nn.Parameter(torch.zeros(1))]), {}, "an? AdamW that exists already.*make_factory"),
        (lambda params: torch.optim.AdamW(params), {}, r"cannot be called with \(named_parameters, model\)"),
        (lambda named, model: None, {}, "factory returned NoneType"),
        (make_factory, {}, "factory make_factory|factory returned"),
        (torch.optim.AdamW, {"momentum": 0.9}, "AdamW.*momentum"),
        (torch.optim.AdamW, {"lr": -1.0}, "AdamW.*-1.0"),
        (torch.optim.AdamW, {"max_grad_nrom": 1.0}, "AdamW.*max_grad_nrom"),
        (FACTORY, {"lr": 1e-3}, "lr=.*no such argument"),
        (nn.Linear(1, 1), {}, "factory=Linear"),
    ],
)
def test_other_factories_are_refused_in_one_line(factory, hyper, said):
    with pytest.raises(UserError, match=said) as error:
        ScheduledOptimizer(tiny_model(), factory, "sonar", **hyper)
    assert one_line(error)


@pytest.mark.parametrize(
    "arguments, said", [((None, FACTORY, "sonar"), "model=None"), ((FACTORY, 1, "sonar"), "model=")]
)
def test_arguments_in_the_wrong_place_are_named(arguments, said):
    with pytest.raises(UserError, match=said):
        ScheduledOptimizer(*arguments)
    with pytest.raises(UserError, match="schedule=3"):
        ScheduledOptimizer(tiny_model(), FACTORY, 3)


# ---- a loss scaler, 8 bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sonar", "optimizer_in_backward", "sonar_exact_clip", "sonar_per_expert"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_loss_scaler_is_refused_before_any_tensor_moves(method, accumulate):
    model = tiny_model()
    optimizer = build(model, method)
    before = weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = model(**batches(1)[0]).loss
    with pytest.raises(UserError, match=f"GradScaler.*{method}.*nothing was updated") as error:
        for _ in optimizer.backward_passes():
            scaler.scale(loss / 2 if accumulate else loss).backward()
    assert one_line(error) and differing(before, weights(model)) == []


def test_a_scaler_that_scales_another_loss_or_is_off_is_no_reason():
    model = tiny_model()
    optimizer = build(model, "sonar")
    other = nn.Parameter(torch.ones(2))
    scaler, off = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(other.sum()).backward()
    off.scale(model(**batches(1)[0]).loss).backward()
    optimizer.step()
    optimizer = build(tiny_model(), "sonar")
    optimizer.gradients_are_unscaled = True
    (optimizer._attachment.model(**batches(1)[0]).loss * 0.5).backward()
    optimizer.step()
    assert scaler.is_enabled() and optimizer.hook_firings == 4


def test_expert_slices_that_stay_in_fp32_are_named():
    with pytest.warns(UserWarning, match=r"8 expert slices keep fp32 states.*1,024 elements.*min_8bit_size=4,096"):
        optimizer = build(tiny_model(), "sonar_per_expert", "adamw8bit")
    # gate_up [4, 32, 32] has 4,096 elements (8 bits as a whole), down [4, 32, 16] has 2,048 (fp32 either way)
    assert optimizer.slices_with_fp32_state == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(tiny_model(), "sonar", "adamw8bit").slices_with_fp32_state == 0
        large = tiny_model(hidden_size=64, intermediate_size=64)
        assert build(large, "sonar_per_expert", "adamw8bit").slices_with_fp32_state == 0
