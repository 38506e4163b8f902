"""MESH's rules inside the hook, with explicit momentum: bitwise the standard schedule; hidden momentum is refused."""

import pytest
import torch
from tiny_moe import batches, differing, tiny_model, train, warm_up, weights

from sonar_repro import ScheduledOptimizer, make_factory
from sonar_repro.errors import UserError


def run(kind, method):
    model = tiny_model(dtype=torch.float32)
    start = weights(model)
    optimizer = ScheduledOptimizer(model, make_factory(kind, lr=2e-3), method)
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
