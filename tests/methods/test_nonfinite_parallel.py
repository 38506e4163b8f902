"""A gradient that is not finite on one rank: every rank skips the same tensors, under DDP and FSDP2 (gloo)."""

import pytest
from nonfinite_ranks import RUNS, bad_on_rank_1
from parallel_ranks import on_two_ranks
from tiny_moe import differing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return on_two_ranks(bad_on_rank_1, tmp_path_factory.mktemp("ranks"), timeout_s=300)


@pytest.mark.parametrize("name", RUNS)
def test_ranks_stay_equal_and_no_expert_below_the_fault_moves(ranks, name):
    first, second = (ranks[rank][name] for rank in (0, 1))
    for when in ("before", "after", "end"):
        assert differing(first[when], second[when]) == [], when
    moved = set(differing(first["before"], first["after"]))
    assert not any("experts" in key for key in moved)
    assert first["skipped"] == second["skipped"] > 0
    assert all(bool(value.isfinite().all()) for value in first["end"].values())
    assert any("experts" in key for key in differing(first["after"], first["end"]))
