"""Forecasts of one rank under data parallel: what stays on it is arithmetic, and so is what is asked of the group."""

import pytest
import torch

from sonar_repro.forecast import task as forecast

SIZES = dict(num_hidden_layers=3, hidden_size=128, intermediate_size=64, num_experts=6, vocab_size=64)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=4, num_experts_per_tok=2)
SMALL = [f"model.architecture.{key}={value}" for key, value in SIZES.items()]
# embedding and head; per layer: query, key, value, output, their two norms, router, experts, two norms; the last norm
DENSE = [(64, 128)] * 2 + 3 * ([(128, 128)] * 4 + [(128,)] * 2 + [(6, 128)] + [(128,)] * 2) + [(128,)]
EXPERTS = 3 * [(6, 128, 128), (6, 128, 64)]


def elements(shapes, ranks=1):
    """Of rank 0's parts: dimension 0 is cut, and the cut rounded up."""
    return sum(-(-first // ranks) * torch.Size(rest).numel() for first, *rest in shapes)


@pytest.fixture
def memory(compose_config, reporter):
    def run(method, parallel, ranks, *overrides):
        group = [f"parallel={parallel}", f"parallel.processes={ranks}"] if ranks > 1 else []
        config = compose_config("scale=forecast", f"method={method}", "threads=1", *group, *SMALL, *overrides)
        report = reporter(f"{method}-{parallel}{ranks}")
        forecast.run(config, report)
        assert not torch.distributed.is_initialized()
        return report.sections["memory"]

    return run


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_shards_and_their_moments(memory, ranks):
    block = memory("sonar", "fsdp2", ranks)
    shards = elements(DENSE + EXPERTS, ranks)
    frequencies = 2 * 16 * 4  # rotary, fp32, and their copy
    assert block["load"]["peak_requested_bytes"] == 2 * shards + frequencies
    steps = 4 * (len(DENSE) + len(EXPERTS))  # fp32 counters, one a tensor
    assert 0 <= block["optimizer_state_bytes"] - 2 * 2 * shards <= 2 * steps
    assert block["measured"]["peak_requested_bytes"] < memory("sonar", "", 1)["measured"]["peak_requested_bytes"]


@pytest.mark.parametrize(
    ("method", "bucketed"),
    [("sonar", DENSE), ("standard_no_expert_clip", DENSE + EXPERTS), ("optimizer_in_backward", [])],
)
def test_ddp_adds_a_gradient_of_what_it_averages(memory, method, bucketed):
    """Buckets, from the start and for good; a few lengths and offsets (int64, int32) beside them."""
    alone, rank = memory(method, "", 1), memory(method, "ddp", 2)
    added = rank["load"]["peak_requested_bytes"] - alone["load"]["peak_requested_bytes"]
    assert 2 * elements(bucketed) <= added <= 2 * elements(bucketed) + 12 * (len(bucketed) + 10)
    assert rank["optimizer_state_bytes"] == alone["optimizer_state_bytes"]
    eight = memory(method, "ddp", 8)
    for phase in ("load", "warmup", "measured"):
        assert eight[phase] == rank[phase]  # nothing is sharded


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_gradients_of_experts_are_freed_on_a_rank_too(memory, parallel):
    """All layers' but one. FSDP2's peak lies before the last layer's backward, while its weights are gathered already:
    of three layers, one has left gradients by then."""
    words = ["data.max_length=8", "batch_size=1"]
    sonar, standard = (memory(m, parallel, 2, *words)["measured"] for m in ("sonar", "standard_no_expert_clip"))
    kept, gone = (2 * elements(EXPERTS, 2), 1 / 3) if parallel == "fsdp2" else (2 * elements(EXPERTS), 2 / 3)
    saved = standard["peak_requested_bytes"] - sonar["peak_requested_bytes"]
    assert saved >= kept * gone
