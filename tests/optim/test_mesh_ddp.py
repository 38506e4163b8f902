"""Hidden momentum under DDP: two gloo processes, equal ranks, equal to one process on the joined batch; trap 8."""

from __future__ import annotations

import os
from contextlib import nullcontext

import processes
import pytest
import torch
from tiny_whale import Toy, mesh, run, toy_data

pytestmark = pytest.mark.slow
STEPS = 4
# name -> variant, accumulation, what the loop does wrong
RUNS = {
    "mesh_b": ("mesh_b", 1, ""),
    "mesh_b x3": ("mesh_b", 3, ""),
    "mesh": ("mesh", 1, ""),
    "mesh_full": ("mesh_full", 1, ""),
    "clip": ("mesh", 1, "clip"),
    "zero": ("mesh", 1, "zero"),
    "bucket_view": ("mesh", 1, "bucket_view"),
}


def _one_run(rank: int, variant: str, accumulation: int, fault: str) -> dict:
    from torch.nn.parallel import DistributedDataParallel

    from sonar_repro.methods.group_end import hold_group

    toy = Toy()
    model = DistributedDataParallel(toy, gradient_as_bucket_view=fault == "bucket_view")
    hold_group(model)
    optimizer = mesh(toy, variant)
    data = toy_data(2 * STEPS * accumulation)[rank::2]
    error = ""
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            optimizer.prepare()
            for a in range(accumulation):
                with nullcontext() if a == accumulation - 1 else model.no_sync():
                    (model(data[step * accumulation + a]) / accumulation).backward()
            if fault == "clip":
                torch.nn.utils.clip_grad_norm_(toy.parameters(), 1e-3)
            optimizer.step()
            if fault == "zero":
                optimizer.prepare()
                model.zero_grad(set_to_none=False)
    except ValueError as raised:
        error = str(raised)
    momentum = {n: optimizer.state[p].get("H") for n, p in toy.named_parameters()}
    return {"weights": toy.state_dict(), "H": momentum, "error": error}


def _all_runs(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.save({name: _one_run(rank, *how) for name, how in RUNS.items()}, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """The results of both ranks for every run, from one pair of processes."""
    folder = tmp_path_factory.mktemp("ddp")
    processes.spawn(_all_runs, (processes.free_port(), str(folder)))
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", ["mesh_b", "mesh_b x3", "mesh", "mesh_full"])
def test_ranks_agree_bit_for_bit(ranks, name):
    first, second = (r[name] for r in ranks)
    assert first["error"] == second["error"] == ""
    for key, value in first["weights"].items():
        assert torch.equal(value, second["weights"][key])


@pytest.mark.parametrize("name, accumulation", [("mesh_b", 1), ("mesh_b x3", 3)])
def test_ranks_equal_one_process_on_the_joined_batch(ranks, name, accumulation):
    """Averaging a preloaded gradient is right: H is equal on all ranks, so its mean is H."""
    toy = Toy()
    optimizer = mesh(toy, "mesh_b")
    run(toy, optimizer, toy_data(2 * STEPS * accumulation), accumulation=2 * accumulation)
    for key, p in toy.named_parameters():
        if key.startswith("experts"):
            h, theirs = optimizer.state[p]["H"], ranks[0][name]["H"][key]
            # Rounding of sums in another order, fed back through four steps of fp32 weights.
            assert ((theirs - h).norm() / h.norm()).item() < 1e-4
            assert torch.allclose(ranks[0][name]["weights"][key], p.detach(), atol=2e-4)


def test_mesh_full_is_mesh(ranks):
    for key, value in ranks[0]["mesh"]["weights"].items():
        # (β1H + g1 + β1H + g2)/2 against β1H + (g1 + g2)/2: the same up to fp32 rounding.
        assert torch.allclose(value, ranks[0]["mesh_full"]["weights"][key], atol=2e-4)


@pytest.mark.parametrize(
    "name, message",
    [("clip", "changed in place"), ("zero", "changed in place"), ("bucket_view", "gradient_as_bucket_view=True")],
)
def test_the_traps_are_caught(ranks, name, message):
    for rank in ranks:
        assert message in rank[name]["error"] and "experts" in rank[name]["error"]
