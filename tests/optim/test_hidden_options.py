"""Hidden momentum beside the main road: idle experts, diagnostics, closures, moved models (trap 7 and around)."""

from __future__ import annotations

import pytest
import torch
from tiny_whale import Toy, differing, mesh, run, toy_data, weights

from sonar_repro.errors import UserError

PAIRS = [("mesh", "mesh_full"), ("mesh_b", "mesh_b_full")]


# ---- trap 7: idle experts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["mesh", "mesh_full"])
def test_an_idle_expert_keeps_moving_at_full_length_and_stays_finite(variant):
    """Documented: Sinkhorn ignores scale, so an expert without tokens follows its decaying H, 800 steps on."""
    toy = Toy()
    optimizer = mesh(toy, variant, weight_decay=0.0)
    run(toy, optimizer, toy_data(2))
    p = toy.experts.down
    lengths = []
    for _ in range(800):
        optimizer.zero_grad()
        optimizer.prepare()
        mask = torch.ones_like(p)
        mask[1] = 0.0
        ((p * mask).sum() + toy.experts.gate_up.sum()).backward()
        before = p[1].detach().clone()
        optimizer.step()
        lengths.append((p[1].detach() - before).norm().item())
    expected = 2e-3 * 10 * 6**0.5  # lr·τ times the norm of a direction with 6 columns of norm 1
    assert min(lengths) == pytest.approx(expected, rel=1e-3) and max(lengths) == pytest.approx(expected, rel=1e-3)
    assert torch.isfinite(p).all()


@pytest.mark.parametrize("hidden, full", PAIRS)
def test_idle_hold_keeps_the_weights_and_statistics_of_idle_experts(hidden, full):
    toys = Toy(), Toy()
    optimizers = [mesh(toy, variant, idle="hold") for toy, variant in zip(toys, (hidden, full))]
    for toy, optimizer in zip(toys, optimizers):
        run(toy, optimizer, toy_data(2))
        p, before = toy.experts.gate_up, toy.experts.gate_up.detach().clone()
        state = {k: v.clone() for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
        optimizer.zero_grad()
        optimizer.prepare()
        mask = torch.ones_like(p)
        mask[1] = 0.0
        for first_expert in (0.0, 1.0):  # two micro-batches; expert 0 is live in the second only
            mask[0] = first_expert
            ((p * mask).sum() / 2 + toy.experts.down.square().sum()).backward()
        optimizer.step()
        assert torch.equal(p[1], before[1]) and not torch.equal(p[0], before[0]) and not torch.equal(p[2], before[2])
        assert torch.allclose(optimizer.state[p]["H"][1], state["H"][1] * 0.9)  # H still decays
        if "V" in state:
            assert torch.equal(optimizer.state[p]["V"][1], state["V"][1])
            assert not torch.equal(optimizer.state[p]["V"][0], state["V"][0])
    assert torch.allclose(toys[0].experts.gate_up, toys[1].experts.gate_up, atol=1e-6)


def test_a_hand_written_all_reduce_can_be_accepted(trained):
    toy, optimizer, data = trained
    optimizer.prepare()
    toy(data[0]).backward()
    for p in toy.parameters():
        p.grad.add_(p.grad).div_(2)  # the mean over two equal ranks
    optimizer.accept_gradients()
    optimizer.step()


def test_a_parameter_without_any_gradient_moves_alike_hidden_and_full():
    a, b = Toy(), Toy()
    first, second = mesh(a, "mesh"), mesh(b, "mesh_full")
    for toy, optimizer in ((a, first), (b, second)):
        run(toy, optimizer, toy_data(2))
        optimizer.zero_grad()
        optimizer.prepare()
        toy.experts.down.sum().backward()  # gate_up is not part of this graph
        optimizer.step()
    assert differing(weights(a), weights(b)) == []


# ---- diagnostics -----------------------------------------------------------------------------------------------------


def test_diagnostics_report_what_the_paper_reports():
    toy = Toy()
    optimizer = mesh(toy, "mesh", diagnostics=True)
    assert optimizer.diagnostics() == {"prepare_calls_per_step": None, "cosine": None, "relative_error": None}
    run(toy, optimizer, toy_data(3))
    found = optimizer.diagnostics()
    assert found["prepare_calls_per_step"] == 1.0 and found["relative_error"] == 0.0
    assert found["cosine"] == pytest.approx(1.0, abs=1e-6)
    run(toy, optimizer, toy_data(8), accumulation=4)
    assert 0 < optimizer.diagnostics()["relative_error"] < 1e-6  # another order of summation
    assert mesh(Toy(), "direct").diagnostics()["prepare_calls_per_step"] is None


def test_diagnostics_would_show_a_lost_momentum():
    toy = Toy()
    optimizer = mesh(toy, "mesh", diagnostics=True)
    run(toy, optimizer, toy_data(3))
    optimizer.state[toy.experts.down]["H"].zero_()  # what a silent loss would look like
    run(toy, optimizer, toy_data(1))
    found = optimizer.diagnostics()
    assert found["cosine"] < 0.95 and found["relative_error"] > 0.1


# ---- around ----------------------------------------------------------------------------------------------------------


def test_a_closure_is_prepared():
    a, b = Toy(), Toy()
    plain, closing = mesh(a, "mesh"), mesh(b, "mesh")
    for ids in toy_data(3):
        run(a, plain, [ids])

        def closure(ids=ids):
            closing.zero_grad()
            loss = b(ids)
            loss.backward()
            return loss

        closing.step(closure)
    assert differing(weights(a), weights(b)) == []


def test_a_dropped_optimizer_leaves_no_hook_that_acts():
    import gc

    toy = Toy()
    optimizer = mesh(toy, "mesh")
    optimizer.prepare()
    del optimizer
    gc.collect()
    toy.zero_grad()
    toy(toy_data(1)[0]).backward()
    fresh = mesh(toy, "mesh")
    fresh.zero_grad()
    run(toy, fresh, toy_data(1))


def test_a_model_that_moved_keeps_its_momentum(trained):
    toy, optimizer, data = trained
    kept = optimizer.state[toy.experts.down]["H"].clone()
    toy.to(torch.float64)
    optimizer.prepare()
    assert toy.experts.down.grad.dtype == torch.float64
    assert torch.allclose(toy.experts.down.grad, kept.double() * 0.9)
    toy(data[0]).backward()
    optimizer.step()


def test_the_error_messages_are_one_line(trained):
    toy, optimizer, data = trained
    optimizer.prepare()
    toy(data[0]).backward()
    toy.experts.down.grad.mul_(2)
    with pytest.raises(UserError) as caught:
        optimizer.step()
    assert "\n" not in str(caught.value) and "mesh_full" in str(caught.value)
