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


@pytest.fixture
def trained():
    """A toy with three steps of hidden momentum behind it."""
    toy = Toy()
    optimizer = mesh(toy, "mesh")
    run(toy, optimizer, toy_data(3))
    return toy, optimizer, toy_data(6)[3:]


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
    one_step(toy, fresh, toy_data(1)[0])


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
