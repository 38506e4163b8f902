"""MESH's rules inside the hook, with explicit momentum: bitwise the standard schedule; hidden momentum is refused."""

import pytest
import torch
from tiny_moe import batches, differing, tiny_model, train, warm_up, weights

from sonar_repro import ScheduledOptimizer, make_factory
from sonar_repro.errors import UserError


def factory(kind):
    """By name; ``direct_sage`` is the ablation with all experts on SAGE."""
    return (
        make_factory("direct", lr=2e-3, roles={"routed": "sage"})
        if kind == "direct_sage"
        else make_factory(kind, lr=2e-3)
    )


def run(kind, method):
    model = tiny_model(dtype=torch.float32)
    start = weights(model)
    optimizer = ScheduledOptimizer(model, factory(kind), method)
    train(model, optimizer, batches(3), warm_up(optimizer))
    assert len(differing(start, weights(model))) == len(start)
    return weights(model), optimizer


@pytest.mark.parametrize("kind", ["mesh_full", "mesh_b_full", "direct", "sinkgd"])
def test_in_backward_is_the_standard_update(kind):
    reference, standard = run(kind, "standard_no_expert_clip")
    for method in ("sonar", "sonar_per_expert"):
        result, optimizer = run(kind, method)
        assert differing(reference, result) == []
        assert optimizer.optimizer_state_bytes() == standard.optimizer_state_bytes()
        assert all(p.grad is None for p in optimizer.expert_parameters)


def test_expert_momentum_stays_out_of_the_clipped_norm():
    """The sum of past gradients is no gradient: the joint norm of standard_global_clip leaves it out."""
    _, optimizer = run("mesh_full", "standard_global_clip")
    _, without = run("mesh_full", "standard_no_expert_clip")
    assert float(optimizer.last_clip.norm) == float(without.last_clip.norm) > 0


@pytest.mark.parametrize("method", ["sonar", "sonar_per_expert", "optimizer_in_backward"])
@pytest.mark.parametrize("kind", ["mesh", "mesh_b"])
def test_hidden_momentum_is_refused_inside_backward(kind, method):
    with pytest.raises(UserError, match=rf"{method} frees the gradient of .*mesh_full, mesh_b_full"):
        ScheduledOptimizer(tiny_model(), make_factory(kind, lr=2e-3), method)


@pytest.mark.parametrize("kind", ["mesh", "mesh_b"])
def test_hidden_momentum_is_the_full_state_variant_under_a_standard_method(kind):
    hidden, optimizer = run(kind, "standard_no_expert_clip")
    explicit, _ = run(f"{kind}_full", "standard_no_expert_clip")
    assert differing(hidden, explicit) == []
    assert optimizer.hidden_buffer_bytes() == sum(p.numel() * 4 for p in optimizer.expert_parameters)
    saved = optimizer.state_dict()["state"]
    assert all("H" in saved[name] for name in optimizer.expert_names), "or a resumed run would start from H = 0"


@pytest.mark.parametrize("kind", ["mesh_full", "mesh_b_full", "mesh_factored_v", "direct_sage"])
def test_the_state_is_the_same_by_tensor_and_by_expert_and_moves_between_them(kind):
    """MESH-B's V has one number a hidden neuron: by expert it is cut and stacked like the moments."""
    batched = run(kind, "sonar")[1].state_dict()
    by_expert = run(kind, "sonar_per_expert")[1].state_dict()
    for name, state in batched["state"].items():
        for key, value in state.items():
            other = by_expert["state"][name][key]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, (name, key)
    ends = []
    for first, second in (("sonar", "sonar_per_expert"), ("sonar_per_expert", "sonar"), ("sonar", "sonar")):
        model = tiny_model(dtype=torch.float32)
        start = ScheduledOptimizer(model, factory(kind), first)
        train(model, start, batches(2), warm_up(start))
        saved = start.state_dict()
        start.detach()
        resumed = ScheduledOptimizer(model, factory(kind), second)
        resumed.load_state_dict(saved)
        train(model, resumed, batches(4)[2:])
        ends.append(weights(model))
    assert differing(ends[0], ends[2]) == [] and differing(ends[1], ends[2]) == []
