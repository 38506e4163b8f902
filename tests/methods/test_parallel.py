"""Updates inside backward under DDP and FSDP2 on two gloo ranks: equal ranks, one process's result, one layer alive."""

from __future__ import annotations

import pytest
import torch
from parallel_ranks import (
    LAYERS,
    RUNS,
    STEPS,
    equality,
    on_two_ranks,
    one_run,
    peaks,
    skips_all,
    skips_last_hook,
    skips_one,
)
from tiny_moe import differing, tiny_config

from sonar_repro import data_parallel
from sonar_repro.forecast.fake_group import fake_group, stand_in
from sonar_repro.forecast.fake_model import fake_environment

pytestmark = pytest.mark.slow
TENSORS = 2 * LAYERS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """Both ranks' results of every run, from one pair of processes."""
    return on_two_ranks(equality, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", RUNS)
def test_ranks_agree_bit_for_bit(ranks, name):
    assert differing(ranks[0][name]["weights"], ranks[1][name]["weights"]) == []
    assert ranks[0][name]["norms"] == ranks[1][name]["norms"]


@pytest.mark.parametrize("name", [name for name, how in RUNS.items() if how[2] == "sgd"])
def test_two_ranks_equal_one_process_on_the_joined_batch(ranks, name):
    """SGD, because it is proportional to the gradient: only the order of the sums differs.

    A step moves a weight by lr |g| with lr = 0.3 (momentum 0.9: at most 4 terms) and |g| <= 1 after clipping; the sums'
    order is good for a few units of 2^-24 of that a step: 4 steps x 4 x 0.3 x 4 x 6e-8 = 1.2e-6.
    """
    alone = one_run(None, *RUNS[name])
    for key, value in alone["weights"].items():
        off = (ranks[0][name]["weights"][key] - value).abs().max()
        assert off <= 1.2e-6, (key, off)
    for ours, theirs in zip(ranks[0][name]["norms"], alone["norms"], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
            assert float(theirs) > 0.1  # a norm of something


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_sonar_is_standard_without_expert_clipping_bit_for_bit(ranks, mode, optimizer):
    sonar, standard = (ranks[0][f"{mode} {method} {optimizer}"] for method in ("sonar", "standard_no_expert_clip"))
    assert differing(sonar["weights"], standard["weights"]) == []
    assert sonar["norms"] == standard["norms"] and len(sonar["norms"]) == STEPS
    assert (sonar["calls"], standard["calls"]) == (STEPS * (TENSORS + 1), STEPS)


def test_exact_clipping_and_per_expert_hooks_under_ddp(ranks):
    assert differing(ranks[0]["ddp per_expert"]["weights"], ranks[0]["ddp sonar sgd"]["weights"]) == []
    exact, clipped = (ranks[0][name]["weights"] for name in ("ddp exact", "ddp standard_global_clip sgd"))
    for key in exact:  # the norm's sum runs over other buffers (DDP's buckets)
        torch.testing.assert_close(exact[key], clipped[key], rtol=0, atol=1.2e-6)


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_one_layers_expert_gradients_are_alive(ranks, mode):
    """DDP: the one that has just arrived and the one before it; FSDP2: a group of two shares one buffer."""
    assert ranks[0][f"{mode} standard_no_expert_clip adamw"]["alive"] == TENSORS
    for name in (f"{mode} sonar adamw", f"{mode} update_each", f"{mode} odd"):
        assert ranks[0][name]["alive"] <= 2 == TENSORS // LAYERS


EXPERT_BYTES = LAYERS * 8 * 3 * 64 * 128 * 2  # of parallel_ranks.peaks: L x E x 3 x h x m in bf16


def test_ddp_keeps_no_expert_gradient(ranks):
    """DDP's buckets hold a gradient of all it looks after for good: with experts in them nothing would be freed."""
    for rank in ranks:
        sonar, standard = (rank[f"peaks ddp {name}"] for name in ("sonar", "standard_no_expert_clip"))
        assert abs(standard["load"] - sonar["load"] - EXPERT_BYTES) <= 256  # and the buckets' lengths and offsets
        assert standard["measured"] - sonar["measured"] >= EXPERT_BYTES * (1 - 1 / LAYERS)


def on_fake_tensors(mode, method):
    """The same peaks as a forecast's rank 0 of two has them."""
    with fake_group(2), fake_environment() as fake:
        return peaks(
            mode,
            method,
            make=lambda dtype, **sizes: fake.build(tiny_config("olmoe", **sizes), dtype=dtype),
            wrap=lambda *args, **options: stand_in(data_parallel(*args, **options)),
            batch=lambda count, size, length: [fake.batch(size, length)] * count,
            options={"gradient_as_bucket_view": True, "init_sync": False} if mode == "ddp" else {},
        )


def test_fsdp2_keeps_no_expert_shard(ranks):
    """On two ranks half of what one process saves, less what lies between the two peaks' places."""
    saved = EXPERT_BYTES / 2 * (1 - 1 / LAYERS)
    sonar, standard = (on_fake_tensors("fsdp2", name) for name in ("sonar", "standard_no_expert_clip"))
    assert sonar["load"] == standard["load"]
    assert standard["measured"] - sonar["measured"] >= 0.85 * saved
    for rank in ranks:
        sonar, standard = (rank[f"peaks fsdp2 {name}"] for name in ("sonar", "standard_no_expert_clip"))
        assert sonar["load"] == standard["load"]
        assert standard["measured"] - sonar["measured"] >= 0.85 * saved


@pytest.mark.parametrize("method", ["sonar", "standard_no_expert_clip"])
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_rank_0_on_fake_tensors_allocates_what_rank_0_does(ranks, mode, method):
    """The forecast's path against two real processes, in bytes."""
    forecast = on_fake_tensors(mode, method)
    real = ranks[0][f"peaks {mode} {method}"]
    if mode == "ddp":  # buckets are not regrouped: their offsets differ
        assert abs(real["load"] - forecast["load"]) <= 256 and abs(real["measured"] - forecast["measured"]) <= 256
    else:  # gloo, unlike NCCL, copies the input of a reduce-scatter: at most one group's gradient
        assert real["load"] == forecast["load"]
        assert forecast["measured"] <= real["measured"] <= forecast["measured"] + EXPERT_BYTES / LAYERS


@pytest.mark.parametrize(
    ("work", "places"),
    [
        (
            skips_one,
            ["rank 0 is at the gradient of model.layers.1.mlp.experts.", "rank 1 is at the gradient of model.layers.0"],
        ),
        (skips_last_hook, ["rank 0 is at the gradient of model.layers.0", "rank 1 is at the end of its backward pass"]),
    ],
)
def test_a_hook_that_does_not_fire_on_one_rank_is_an_error_on_both(tmp_path, work, places):
    for said in on_two_ranks(work, tmp_path):
        assert "a hook did not fire on every rank" in said and "\n" not in said
        for place in places:
            assert place in said


def test_a_rank_without_any_hook_is_waited_for_and_named(tmp_path):
    first, second = on_two_ranks(skips_all, tmp_path)
    assert "rank 0 is at the gradient of model.layers.2" in first and "after at most 3 s" in first
    assert "no in-backward hook fired" in second
