"""accumulation_mode=fold: one update a step from moments that took each micro-batch's gradient as it was freed."""

import pytest
import torch
from tiny_moe import batches, build, differing, tiny_model, train, warm_up, weights
from torch import nn

from sonar_repro import Schedule, ScheduledOptimizer, make_factory
from sonar_repro.errors import UserError

SONAR_NO_CLIP = Schedule("experts", "tensor", "none")
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
BETAS = (0.9, 0.95)
ADAMW = {"lr": 0.05, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.1}


class Experts(nn.Module):
    """float64 experts; ``forward`` of micro-batch a may touch all of them or expert a alone."""

    def __init__(self):
        super().__init__()
        self.num_experts = 3
        self.w = nn.Parameter(torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def loss(self, x, expert=None):
        w = self.w if expert is None else self.w[expert]
        return torch.tanh(x @ w).square().sum()


def inputs(count, seed=1):
    return list(torch.randn(count, 3, 6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def step(model, optimizer, data, experts=None):
    for a, x in enumerate(data):
        alone = None if experts is None else experts[a]
        (model.loss(x if alone is None else x[0], alone) / len(data)).backward()
    optimizer.step()


def both(kind, hyper, accumulation, steps, experts=None):
    """(model, optimizer) after ``steps`` steps, for the standard schedule and for fold."""
    results = []
    for schedule, mode in (("standard_no_clip", "standard"), (SONAR_NO_CLIP, "fold")):
        model = Experts()
        factory = make_factory(kind, **hyper)
        optimizer = ScheduledOptimizer(model, factory, schedule, accumulation=accumulation, accumulation_mode=mode)
        for k in range(steps):
            optimizer.zero_grad()
            step(model, optimizer, inputs(accumulation, seed=k), experts)
        results.append((model, optimizer.state_dict()["state"]["w"]))
    return results


def gradients(accumulation):
    grads = []
    for x in inputs(accumulation, seed=0):
        model = Experts()
        (model.loss(x) / accumulation).backward()
        grads.append(model.w.grad)
    return grads


def test_first_moment_is_exact_and_second_moment_as_derived():
    a = 3
    (_, standard), (_, folded) = both("adamw", ADAMW, a, 1)
    grads = gradients(a)
    total = sum(grads)
    tight = {"rtol": 1e-12, "atol": 1e-15}
    torch.testing.assert_close(folded["exp_avg"], (1 - BETAS[0]) * total, **tight)
    torch.testing.assert_close(folded["exp_avg"], standard["exp_avg"], **tight)
    torch.testing.assert_close(folded["exp_avg_sq"], (1 - BETAS[1]) * sum(g * g for g in grads), **tight)
    cross = sum(grads[i] * grads[j] for i in range(a) for j in range(a) if i != j)
    torch.testing.assert_close(standard["exp_avg_sq"] - folded["exp_avg_sq"], (1 - BETAS[1]) * cross, **tight)
    assert cross.abs().max() > 0.1 * (total * total).max(), "the difference must be visible here"
    assert folded["step"] == standard["step"] == 1


def test_one_update_a_step_by_the_formula_over_several_steps():
    """AdamW written out in float64 with v_fold."""
    a, steps = 2, 4
    _, (model, _) = both("adamw", ADAMW, a, steps)
    w = Experts().w.detach().clone()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for k in range(steps):
        grads = []
        for x in inputs(a, seed=k):
            copy = Experts()
            copy.w.data.copy_(w)
            (copy.loss(x) / a).backward()
            grads.append(copy.w.grad)
        m = BETAS[0] * m + (1 - BETAS[0]) * sum(grads)
        v = BETAS[1] * v + (1 - BETAS[1]) * sum(g * g for g in grads)
        m_hat, v_hat = m / (1 - BETAS[0] ** (k + 1)), v / (1 - BETAS[1] ** (k + 1))
        w = (1 - 0.05 * 0.1) * w - 0.05 * m_hat / (v_hat.sqrt() + 1e-8)
    torch.testing.assert_close(model.w.detach(), w, rtol=1e-6, atol=1e-7)  # bias correction runs on an fp32 step count


def test_fold_is_the_standard_schedule_where_micro_batches_do_not_overlap():
    """Each micro-batch touches an expert of its own: no cross terms, so the whole update agrees."""
    (standard, a), (folded, b) = both("adamw", ADAMW, 3, 4, experts=[0, 1, 2])
    torch.testing.assert_close(a["exp_avg_sq"], b["exp_avg_sq"], rtol=1e-6, atol=1e-15)
    torch.testing.assert_close(standard.w, folded.w, rtol=1e-6, atol=1e-7)


def test_equal_micro_batches_are_the_worst_case():
    """All g_a equal: the new part of v_std is A times v_fold's, so a first update is sqrt(A) times longer."""
    a = 4
    hyper = {**ADAMW, "betas": (0.0, 0.95), "weight_decay": 0.0, "eps": 1e-30}
    lengths = []
    for schedule, mode in (("standard_no_clip", "standard"), (SONAR_NO_CLIP, "fold")):
        model = Experts()
        start = model.w.detach().clone()
        optimizer = ScheduledOptimizer(
            model, make_factory("adamw", **hyper), schedule, accumulation=a, accumulation_mode=mode
        )
        step(model, optimizer, inputs(1) * a)
        assert torch.count_nonzero(model.w.detach() - start) == start.numel()
        # bias correction multiplies v by 1/(1-b2) in both
        lengths.append((model.w.detach() - start).abs().mean())
    torch.testing.assert_close(lengths[1] / lengths[0], torch.tensor(2.0, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_with_momentum_folds_exactly(weight_decay):
    hyper = {"lr": 0.05, "momentum": 0.9, "weight_decay": weight_decay}
    (standard, _), (folded, _) = both("sgd", hyper, 3, 5)
    assert not torch.equal(standard.w, Experts().w)
    torch.testing.assert_close(standard.w, folded.w, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_update_agrees_with_the_fused_kernel(dtype, tolerance):
    """A second micro-batch of zero gradient: the fold of g and 0 is the fused AdamW step on g."""
    results = []
    for accumulation in (1, 2):
        model = tiny_model(dtype=dtype)
        optimizer = build(model, "sonar", accumulation=accumulation, accumulation_mode="fold")
        model(**batches(1)[0], use_cache=False).loss.backward()
        if accumulation == 2:
            (model(**batches(1)[0], use_cache=False).loss * 0.0).backward()
        optimizer.step()
        results.append(weights(model)[GATE_UP].float())
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance * 1e-2)


def test_one_micro_batch_is_plain_sonar():
    results = []
    for mode in ("standard", "update_each", "fold"):
        model = tiny_model(dtype=torch.bfloat16)
        optimizer = build(model, "sonar", accumulation_mode=mode)
        train(model, optimizer, batches(3), warm_up(optimizer))
        results.append(weights(model))
    assert differing(results[0], results[1]) == differing(results[1], results[2]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_counts_memory_and_per_expert_on_a_real_model(dtype):
    results = []
    for method in ("sonar", "sonar_per_expert"):
        model = tiny_model(dtype=dtype)
        start = weights(model)
        optimizer = build(model, method, accumulation=3, accumulation_mode="fold")
        scheduler = warm_up(optimizer)
        alive = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(
                lambda _, o=optimizer, seen=alive: seen.append(sum(e.grad is not None for e in o.expert_parameters))
            )
        train(model, optimizer, batches(6), scheduler, accumulation=3)
        assert set(alive) == {0}, "a freed gradient must not wait for the end of the step"
        assert optimizer.hook_firings == 2 * 3 * 4
        assert optimizer.optimizer_calls == 2 * ((4 if method == "sonar" else 16) + 1)
        assert len(differing(start, weights(model))) == len(start)
        assert {int(s["step"]) for s in optimizer.state_dict()["state"].values()} == {2}
        results.append(weights(model))
    assert differing(*results) == []


def test_state_of_a_folded_run_goes_on_under_other_methods():
    model = tiny_model()
    optimizer = build(model, "sonar", accumulation=2, accumulation_mode="fold")
    train(model, optimizer, batches(4), accumulation=2)
    saved = optimizer.state_dict()
    for method in ("standard_no_expert_clip", "sonar_per_expert"):
        other = tiny_model()
        other.load_state_dict(model.state_dict())
        resumed = build(other, method)
        resumed.load_state_dict(saved)
        train(other, resumed, batches(1))
        assert resumed.steps == 3


@pytest.mark.parametrize(
    "kind, hyper, said",
    [
        ("lion", {}, "Lion cannot fold"),
        ("adamw8bit", {}, "AdamW8bit cannot fold"),
        ("sgd", {"momentum": 0.9, "nesterov": True}, "SGD with nesterov=True cannot fold"),
        ("sgd", {"momentum": 0.9, "dampening": 0.5}, "SGD with dampening=0.5 cannot fold"),
        ("sgd", {}, "momentum=0 leaves no state"),
    ],
)
def test_optimizers_that_cannot_fold_are_refused(kind, hyper, said):
    if kind == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    with pytest.raises(UserError, match=said) as error:
        ScheduledOptimizer(
            tiny_model(), make_factory(kind, lr=0.1, **hyper), "sonar", accumulation=2, accumulation_mode="fold"
        )
    assert "\n" not in str(error.value)


def test_fold_of_everything_is_the_standard_schedule_up_to_v():
    """optimizer_in_backward can fold too, when told to."""
    model = tiny_model()
    optimizer = build(model, "optimizer_in_backward", "sgd", accumulation=2, accumulation_mode="fold")
    train(model, optimizer, batches(4), accumulation=2)
    reference = tiny_model()
    standard = build(reference, "standard_no_clip", "sgd", accumulation=2)
    train(reference, standard, batches(4), accumulation=2)
    for name, value in weights(model).items():
        torch.testing.assert_close(value, weights(reference)[name], rtol=1e-5, atol=1e-6)
