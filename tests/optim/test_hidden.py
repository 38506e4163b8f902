"""Hidden momentum: bitwise equal to an explicit H, and each way to lose it silently raises (the eight traps)."""

from __future__ import annotations

import pytest
import torch
from tiny_whale import Toy, differing, mesh, run, toy_data, weights
from torch.nn.utils import clip_grad_norm_

from sonar_repro.errors import UserError

PAIRS = [("mesh", "mesh_full"), ("mesh_b", "mesh_b_full")]


def refused(match: str):
    """One line that names the parameter or setting."""
    return pytest.raises(UserError, match=match)


def one_step(toy: Toy, optimizer, ids) -> None:
    run(toy, optimizer, [ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden, full", PAIRS)
def test_hidden_equals_full_bit_for_bit_at_accumulation_1(hidden, full, dtype):
    a, b = Toy(dtype=dtype), Toy(dtype=dtype)
    first, second = mesh(a, hidden), mesh(b, full)
    assert run(a, first, toy_data(8)) == run(b, second, toy_data(8))
    assert differing(weights(a), weights(b)) == []
    for p, q in zip(a.experts.parameters(), b.experts.parameters()):
        assert torch.equal(first.state[p]["H"], second.state[q]["H"])


@pytest.mark.parametrize("hidden, full", PAIRS)
def test_hidden_equals_full_up_to_summation_order_above_1(hidden, full):
    a, b = Toy(), Toy()
    first, second = mesh(a, hidden), mesh(b, full)
    run(a, first, toy_data(8), accumulation=4)
    run(b, second, toy_data(8), accumulation=4)
    for p, q in zip(a.experts.parameters(), b.experts.parameters()):
        h, g = first.state[p]["H"], second.state[q]["H"]
        # The stated difference: fp32 sums in another order, a few 1e-7.
        assert ((h - g).norm() / g.norm()).item() < 1e-6
    assert differing(weights(a), weights(b)) != []  # the test distinguishes the two


def test_momentum_is_not_direct_sinkhorn():
    a, b = Toy(), Toy()
    run(a, mesh(a, "mesh"), toy_data(3))
    run(b, mesh(b, "direct"), toy_data(3))
    assert "experts.down" in differing(weights(a), weights(b))


def test_the_gradient_holds_h_only_between_prepare_and_step(trained):
    toy, optimizer, data = trained
    p = toy.experts.down
    h = optimizer.state[p]["H"].clone()
    assert p.grad is None
    optimizer.zero_grad()
    optimizer.prepare()
    assert torch.equal(p.grad, h * 0.9)
    toy(data[0]).backward()
    g = p.grad - h * 0.9
    before = p.grad.clone()
    optimizer.step()
    assert p.grad is None and torch.equal(optimizer.state[p]["H"], before) and g.any()


# ---- trap 1: zero_grad between prepare and backward ------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_models_zero_grad_after_prepare_is_caught_at_backward(trained, set_to_none):
    toy, optimizer, data = trained
    optimizer.prepare()
    toy.zero_grad(set_to_none=set_to_none)
    with refused("experts.*zero_grad"):
        toy(data[0]).backward()


def test_the_models_zero_grad_after_backward_is_caught_at_step(trained):
    toy, optimizer, data = trained
    optimizer.prepare()
    toy(data[0]).backward()
    toy.zero_grad()
    with refused("zero_grad"):
        optimizer.step()


def test_the_optimizers_zero_grad_after_prepare_is_harmless(trained):
    toy, optimizer, data = trained
    other = Toy()
    reference = mesh(other, "mesh")
    run(other, reference, toy_data(3))
    for set_to_none in (True, False):
        optimizer.prepare()
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.prepare()
        toy(data[0]).backward()
        optimizer.step()
        run(other, reference, [data[0]])
    assert differing(weights(toy), weights(other)) == []


def test_the_optimizers_zero_grad_after_backward_is_refused(trained):
    toy, optimizer, data = trained
    optimizer.prepare()
    toy(data[0]).backward()
    with refused("zero_grad.*erase the momentum of experts"):
        optimizer.zero_grad()


# ---- trap 2: preparing at each micro-batch ---------------------------------------------------------------------------


def test_prepare_is_idempotent_until_the_step():
    a, b = Toy(), Toy()
    once, often = mesh(a, "mesh"), mesh(b, "mesh")
    data = toy_data(8)
    run(a, once, data, accumulation=4)
    for start in (0, 4):
        often.zero_grad()
        for ids in data[start : start + 4]:
            often.prepare()
            (b(ids) / 4).backward()
        often.step()
    assert differing(weights(a), weights(b)) == []
    assert often.diagnostics()["prepare_calls_per_step"] == 1.0


def test_a_step_without_prepare_is_refused_the_first_time_too():
    toy = Toy()
    optimizer = mesh(toy, "mesh")
    toy(toy_data(1)[0]).backward()
    with refused("step\\(\\) without prepare\\(\\): experts.gate_up"):
        optimizer.step()
    with refused("prepare\\(\\) found a gradient in experts.gate_up: call zero_grad"):
        optimizer.prepare()
    optimizer.zero_grad()
    one_step(toy, optimizer, toy_data(1)[0])  # and the way out works


def test_a_step_without_backward_is_refused(trained):
    _, optimizer, _ = trained
    optimizer.prepare()
    with refused("without a backward pass"):
        optimizer.step()


# ---- trap 3: clipping over p.grad ------------------------------------------------------------------------------------


def test_clipping_all_parameters_is_caught(trained):
    toy, optimizer, data = trained
    optimizer.prepare()
    toy(data[0]).backward()
    clip_grad_norm_(toy.parameters(), 1e-3)
    with refused("changed in place.*clip_grad_norm_"):
        optimizer.step()


def test_clipping_the_clippable_parameters_is_fine(trained):
    toy, optimizer, data = trained
    optimizer.prepare()
    toy(data[0]).backward()
    clip_grad_norm_(optimizer.clippable_parameters(), 1e-3)
    optimizer.step()


def test_scaling_between_micro_batches_is_caught(trained):
    toy, optimizer, data = trained
    optimizer.prepare()
    toy(data[0]).backward()
    toy.experts.down.grad.mul_(0.5)
    with refused("experts.down was changed in place"):
        toy(data[1]).backward()


# ---- traps 4 and 5: GradScaler, create_graph -------------------------------------------------------------------------


def test_grad_scaler_is_refused_before_it_can_skip_a_step(trained):
    toy, optimizer, data = trained
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.prepare()
    scaler.scale(toy(data[0])).backward()
    with refused("GradScaler.*bf16"):
        scaler.step(optimizer)
    # Stateless and explicit variants keep nothing in the gradient: a scaler may run.
    other = Toy()
    full = mesh(other, "mesh_full")
    scaler.scale(other(data[0])).backward()
    before = weights(other)
    scaler.step(full)
    assert differing(before, weights(other)) != []


def test_a_disabled_scaler_is_no_scaler(trained):
    toy, optimizer, data = trained
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer.prepare()
    scaler.scale(toy(data[0])).backward()
    scaler.step(optimizer)


@pytest.mark.filterwarnings("ignore:Using backward.*create_graph")
def test_create_graph_is_refused(trained):
    toy, optimizer, data = trained
    optimizer.prepare()
    with refused("create_graph=True"):
        toy(data[0]).backward(create_graph=True)


# ---- trap 6: H in the state dict -------------------------------------------------------------------------------------


def test_a_resume_without_h_would_differ():
    """test_mesh checks that resuming is exact; this checks that the check can fail: without H it is not."""
    a, b = Toy(), Toy()
    first, second = mesh(a, "mesh"), mesh(b, "mesh")
    run(a, first, toy_data(3))
    b.load_state_dict(a.state_dict())
    saved = first.state_dict()
    indices = [i for g in saved["param_groups"] if g["name"] == "routed" for i in g["params"]]
    assert all("H" in saved["state"][i] for i in indices) and len(indices) == 2
    stripped = {i: {k: v for k, v in s.items() if k != "H"} for i, s in saved["state"].items()}
    second.load_state_dict({**saved, "state": stripped})
    run(a, first, toy_data(1))
    run(b, second, toy_data(1))
    assert differing(weights(a), weights(b)) == ["experts.gate_up", "experts.down"]


def test_state_between_prepare_and_step_is_refused(trained):
    toy, optimizer, data = trained
    saved = optimizer.state_dict()
    optimizer.prepare()
    with refused("state_dict\\(\\) between prepare"):
        optimizer.state_dict()
    with refused("load_state_dict\\(\\) between prepare"):
        optimizer.load_state_dict(saved)
    toy(data[0]).backward()
    optimizer.state[toy.experts.down]["H"] = torch.zeros_like(toy.experts.down)  # as a wrapper's loader writes it
    with refused("state of experts.down was replaced"):
        optimizer.step()
