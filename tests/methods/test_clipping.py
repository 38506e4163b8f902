"""Clipping with freed gradients: exact ways equal standard_global_clip bit for bit; the others equal a loop by hand."""

import pytest
import torch
from tiny_moe import HYPER, batches, build, differing, tiny_model, train, warm_up, weights
from torch import nn

from sonar_repro import Schedule, ScheduledOptimizer, make_factory
from sonar_repro.errors import UserError
from sonar_repro.training.step import training_step

EXACT = ("sonar_exact_clip", "sonar_delayed_clip", "sonar_offload_clip")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def run(method, dtype=torch.float32, name="olmoe", optimizer="adamw", steps=5, prepare=None, schedule=None, **kwargs):
    model = tiny_model(name, dtype, **({"attention_dropout": 0.1} if name == "olmoe" else {}))
    if prepare:
        prepare(model)
    factory = make_factory(optimizer, **HYPER[optimizer])
    scheduled = ScheduledOptimizer(model, factory, schedule or method, **kwargs)
    torch.manual_seed(3)
    reports = []
    accumulation = kwargs.get("accumulation", 1)
    data = batches(steps * accumulation)
    train(model, scheduled, data, warm_up(scheduled), accumulation, lambda k: reports.append(scheduled.last_clip))
    return weights(model), reports, scheduled


@DTYPES
@pytest.mark.parametrize("name, optimizer", [("olmoe", "adamw"), ("granite", "lion")])
def test_exact_ways_are_global_clipping_bit_for_bit(name, optimizer, dtype):
    """With dropout (OLMoE), so the second pass must see the first one's random numbers."""
    reference, expected, _ = run("standard_global_clip", dtype, name, optimizer)
    assert all(float(r.norm) > 1.0 for r in expected), "the clip must be active"
    for method in EXACT:
        result, reports, scheduled = run(method, dtype, name, optimizer)
        assert differing(reference, result) == [], method
        assert [(float(r.norm), r.scope) for r in reports] == [(float(r.norm), "all") for r in expected]
        passes = 2 if method == "sonar_exact_clip" else 1
        assert scheduled.hook_firings == 5 * 4 * passes
        assert scheduled.optimizer_calls == 5 * (4 + 1)


def fp32_head(model):
    """A bf16 model with some fp32 parameters: clip_grad_norm_ sums norms group by group, in an order of its own."""
    model.model.norm.float()
    model.lm_head.float()


def test_exact_ways_with_mixed_dtypes():
    reference, _, _ = run("standard_global_clip", torch.bfloat16, prepare=fp32_head)
    for method in EXACT:
        assert differing(reference, run(method, torch.bfloat16, prepare=fp32_head)[0]) == []


@pytest.mark.parametrize("knobs", [("all", "tensor"), ("experts", "expert")])
@pytest.mark.parametrize("clip", ["exact", "kept", "offloaded"])
def test_exact_ways_with_other_knobs(knobs, clip):
    reference, _, _ = run("standard_global_clip")
    result, _, _ = run(None, schedule=Schedule(*knobs, clip))
    assert differing(reference, result) == []


@DTYPES
@pytest.mark.parametrize("method", ["sonar_delayed_clip", "sonar_offload_clip"])
def test_kept_gradients_accumulate_as_in_the_standard_schedule(method, dtype):
    reference, expected, _ = run("standard_global_clip", dtype, steps=3, accumulation=3)
    result, reports, scheduled = run(method, dtype, steps=3, accumulation=3)
    assert differing(reference, result) == []
    assert [float(r.norm) for r in reports] == [float(r.norm) for r in expected]
    assert (scheduled.hook_firings, scheduled.optimizer_calls) == (3 * 3 * 4, 3 * 5)


class NoisyModel(nn.Module):
    """Everything a forward pass may change besides gradients: dropout, running statistics, Python's generator."""

    def __init__(self):
        super().__init__()
        self.num_experts = 2
        self.w = nn.Parameter(torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)))
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, input_ids, use_cache=None):
        import random

        hidden = self.drop(self.norm(input_ids)) @ self.w * random.random()
        return type("Output", (), {"loss": 9 * hidden.square().mean()})


def test_second_pass_replays_random_numbers_and_running_statistics():
    import random

    results = []
    for method in ("standard_global_clip", "sonar_exact_clip"):
        torch.manual_seed(0)
        random.seed(0)
        model = NoisyModel().train()
        optimizer = build(model, method, "sgd", max_grad_norm=0.5)
        for k in range(4):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(k))
            training_step(model, optimizer, None, [{"input_ids": x}])
        results.append(weights(model) | {name: b.clone() for name, b in model.named_buffers()})
    assert differing(*results) == []
    assert results[1]["norm.num_batches_tracked"] == 4


@pytest.mark.parametrize("method", ["sonar", "sonar_exact_clip", "sonar_tensor_clip", "sonar_lagged_clip"])
def test_no_expert_gradient_outlives_its_hook(method):
    """After every gradient of the model, at most one expert tensor (the one at hand) has a gradient."""
    model = tiny_model()
    optimizer = build(model, method)
    alive = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(e.grad is not None for e in optimizer.expert_parameters))
        )
    train(model, optimizer, batches(2))
    assert len(alive) == 2 * optimizer.passes * len(list(model.parameters()))
    assert set(alive) == {0}


def test_plain_loop_and_closure_drive_both_passes():
    data = batches(3)
    reference, _, _ = run("standard_global_clip", steps=3)
    for way in ("loop", "closure"):
        model = tiny_model(attention_dropout=0.1)
        optimizer = build(model, "sonar_exact_clip")
        scheduler = warm_up(optimizer)
        torch.manual_seed(3)
        for batch in data:

            def closure(batch=batch, model=model):
                loss = model(**batch, use_cache=False).loss
                loss.backward()
                return loss

            optimizer.zero_grad()
            if way == "closure":
                assert float(optimizer.step(closure).detach()) > 0
            else:
                for _ in optimizer.backward_passes():
                    closure()
                optimizer.step()
            scheduler.step()
        assert differing(reference, weights(model)) == [], way


def test_one_pass_alone_is_refused_with_the_way_out():
    model = tiny_model()
    optimizer = build(model, "sonar_exact_clip")
    with pytest.raises(RuntimeError, match=r"two backward passes.*optimizer.backward_passes\(\)"):
        model(**batches(1)[0], use_cache=False).loss.backward()
    optimizer.abandon_step()
    for _ in optimizer.backward_passes():
        model(**batches(1)[0], use_cache=False).loss.backward()
        break
    with pytest.raises(RuntimeError, match="two backward passes"):
        optimizer.step()
    optimizer.abandon_step()
    optimizer.zero_grad()
    train(model, optimizer, batches(1))
    assert optimizer.steps == 1


def test_interrupted_first_pass_leaves_no_trace():
    reference, _, _ = run("sonar_exact_clip", steps=1)
    model = tiny_model(attention_dropout=0.1)
    optimizer = build(model, "sonar_exact_clip")
    scheduler = warm_up(optimizer)
    with pytest.raises(MemoryError):
        for _ in optimizer.backward_passes():
            model(**batches(1, seed=9)[0], use_cache=False).loss.backward()
            raise MemoryError
    optimizer.abandon_step()
    torch.manual_seed(3)
    train(model, optimizer, batches(1), scheduler)
    assert differing(reference, weights(model)) == []


def by_hand(dtype, scale_experts, steps=5):
    """Reference: plain fused AdamW over everything; ``scale_experts(experts, step)`` clips the experts' gradients."""
    model = tiny_model("olmoe", dtype, attention_dropout=0.1)
    experts = [p for p in model.parameters() if p.ndim == 3]
    rest = [p for p in model.parameters() if p.ndim != 3]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER["adamw"])
    scheduler = warm_up(optimizer)
    torch.manual_seed(3)
    for batch in batches(steps):
        optimizer.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        scale_experts(model, experts, rest)
        optimizer.step()
        scheduler.step()
    return weights(model)


@DTYPES
def test_tensor_clip_is_each_tensor_by_its_own_norm(dtype):
    norms = []

    def scale(model, experts, rest):
        norms.extend(torch.nn.utils.clip_grad_norm_([p], 0.005) for p in experts)
        torch.nn.utils.clip_grad_norm_(rest, 0.005)

    reference = by_hand(dtype, scale)
    result, reports, _ = run("sonar_tensor_clip", dtype, max_grad_norm=0.005)
    assert min(norms) > 0.005
    assert differing(reference, result) == []
    assert {r.scope for r in reports} == {"non_expert"}


@DTYPES
def test_lagged_clip_uses_the_previous_norm_for_experts(dtype):
    norms = [None]

    def scale(model, experts, rest):
        total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if norms[-1] is not None:
            torch.nn.utils.clip_grads_with_norm_(experts, 1.0, norms[-1])
        torch.nn.utils.clip_grads_with_norm_(rest, 1.0, total)
        norms.append(total)

    reference = by_hand(dtype, scale)
    result, reports, _ = run("sonar_lagged_clip", dtype)
    assert differing(reference, result) == []
    assert [float(r.norm) for r in reports] == [float(n) for n in norms[1:]]


def test_lagged_norm_is_part_of_the_state():
    reference, _, _ = run("sonar_lagged_clip", steps=6)
    model = tiny_model(attention_dropout=0.1)
    optimizer = build(model, "sonar_lagged_clip")
    scheduler = warm_up(optimizer)
    torch.manual_seed(3)
    train(model, optimizer, batches(6)[:3], scheduler)
    saved = optimizer.state_dict()
    optimizer.detach()
    resumed = build(model, "sonar_lagged_clip")
    scheduler_again = warm_up(resumed)
    resumed.load_state_dict(saved)
    scheduler_again.load_state_dict(scheduler.state_dict())
    train(model, resumed, batches(6)[3:], scheduler_again)
    assert differing(reference, weights(model)) == []


def test_inactive_clip_changes_nothing():
    """With an unreachable bound every way of clipping is the unclipped update (x * 1.0 is exact)."""
    reference, _, _ = run("standard_no_clip")
    for method in (*EXACT, "sonar_tensor_clip", "sonar_lagged_clip", "sonar"):
        assert differing(reference, run(method, max_grad_norm=1e9)[0]) == [], method


@pytest.mark.parametrize("method", ["sonar_exact_clip", "sonar_lagged_clip"])
@pytest.mark.parametrize("mode", ["standard", "update_each", "fold"])
def test_accumulation_is_refused_where_the_norm_would_be_wrong(method, mode):
    with pytest.raises(UserError, match=f"accumulation=2 with {method}.*use accumulation=1"):
        build(tiny_model(), method, accumulation=2, accumulation_mode=mode)


def test_refusals_name_the_way_out():
    with pytest.raises(UserError, match="sonar_tensor_clip and accumulation_mode=standard.*'update_each'"):
        build(tiny_model(), "sonar_tensor_clip", accumulation=2)
    with pytest.raises(UserError, match="sonar_offload_clip and accumulation_mode=update_each.*'standard'"):
        build(tiny_model(), "sonar_offload_clip", accumulation=2, accumulation_mode="update_each")
    with pytest.raises(UserError, match="max_grad_norm=None with clip=exact"):
        build(tiny_model(), "sonar_exact_clip", max_grad_norm=None)
    with pytest.raises(UserError, match="clip=all with in_backward=experts.*sonar_exact_clip"):
        Schedule("experts", "tensor", "all")
    with pytest.raises(UserError, match="clip=exact with in_backward=none.*in_backward=experts"):
        Schedule("none", "tensor", "exact")
