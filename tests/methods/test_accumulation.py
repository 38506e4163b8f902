"""Accumulation and the reported norm (public bug reports): the right value or the right refusal."""

import pytest
import torch
from tiny_moe import HYPER, LAYERS, backward, batches, build, differing, tiny_model, train, warm_up, weights

from sonar_repro import ScheduledOptimizer, make_factory
from sonar_repro.errors import UserError

IN_BACKWARD = ("sonar", "sonar_per_expert", "optimizer_in_backward")
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


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
