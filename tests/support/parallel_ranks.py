"""What the tests of data parallel run on each of two gloo ranks; imported by the spawned processes."""

from __future__ import annotations

import os
from pathlib import Path

import processes
import torch
import torch.distributed as dist
from tiny_moe import batches, build, tiny_model, train, weights

from sonar_repro import data_parallel, find_expert_tensors
from sonar_repro.instruments.tracker import AllocationTracker
from sonar_repro.training.step import training_step

STEPS, LAYERS = 4, 3
# name -> mode, method, optimizer, experts, accumulation, accumulation mode
RUNS = {
    f"{mode} {method} {optimizer}": (mode, method, optimizer, 4, 1, "standard")
    for mode in ("ddp", "fsdp2")
    for optimizer in ("sgd", "adamw")
    for method in ("sonar", "standard_no_expert_clip", "standard_global_clip", "optimizer_in_backward")
    if optimizer == "sgd" or method in ("sonar", "standard_no_expert_clip")
}
RUNS |= {f"{mode} odd": (mode, "sonar", "sgd", 3, 1, "standard") for mode in ("ddp", "fsdp2")}
RUNS |= {f"{mode} update_each": (mode, "sonar", "sgd", 4, 2, "update_each") for mode in ("ddp", "fsdp2")}
RUNS |= {f"{mode} standard_no_clip": (mode, "standard_no_clip", "sgd", 4, 1, "standard") for mode in ("ddp", "fsdp2")}
RUNS |= {
    "ddp fold": ("ddp", "sonar", "sgd", 4, 2, "fold"),
    "ddp per_expert": ("ddp", "sonar_per_expert", "sgd", 4, 1, "standard"),
    "ddp exact": ("ddp", "sonar_exact_clip", "sgd", 4, 1, "standard"),
    "fsdp2 lion": ("fsdp2", "sonar", "lion", 4, 1, "standard"),
}


def one_run(rank: int | None, mode: str, method: str, optimizer: str, experts: int, accumulation: int, how: str):
    """Train on half of each batch (``rank`` None: on all of it, in this process alone) and say what came of it."""
    model = tiny_model(num_experts=experts, num_hidden_layers=LAYERS)
    trained = model if rank is None else data_parallel(model, mode, method)
    tensors = [tensor.parameter for tensor in find_expert_tensors(model)]
    alive: list[int] = []

    def count(parameter):
        alive.append(sum(p.grad is not None for p in tensors))

    for p in tensors:  # before the optimizer's own hooks, which free
        p.register_post_accumulate_grad_hook(count)
    mine = build(trained, method, optimizer, accumulation=accumulation, accumulation_mode=how)
    data = batches(STEPS * accumulation, size=4)
    if rank is not None:
        data = [{k: v[2 * rank : 2 * rank + 2] for k, v in batch.items()} for batch in data]
    norms = []
    train(trained, mine, data, accumulation=accumulation, after_step=lambda _: norms.append(mine.last_clip.norm))
    whole = {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in weights(model).items()}
    return {"weights": whole, "norms": norms, "alive": max(alive), "calls": mine.optimizer_calls}


def peaks(
    mode: str, method: str, make=tiny_model, wrap=data_parallel, batch=batches, options: dict | None = None
) -> dict[str, int]:
    """Requested bytes by the tracker: live once model and optimizer stand, and the lowest peak of six short steps.

    The lowest, because gloo's threads drop the tensors of a finished collective in their own time: that only adds.
    ``make``, ``wrap`` and ``batch`` are replaced where the same is run on fake tensors.
    """
    model = make(dtype=torch.bfloat16, num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128, num_experts=8)
    if options is None:
        options = {"gradient_as_bucket_view": True} if mode == "ddp" else {}
    with AllocationTracker() as tracker:
        tracker.phase("load")
        tracker.attach(model)
        trained = wrap(model, mode, method, **options)
        optimizer = build(trained, method)
        loaded = tracker.live_requested
        measured = [f"step {k}" for k in range(6)]
        for phase in ("warmup", "warmup", *measured):
            tracker.phase(phase)
            training_step(trained, optimizer, None, batch(1, size=1, length=4))
    return {"load": loaded, "measured": min(tracker.peaks[phase].requested for phase in measured)}


def equality(rank: int) -> dict:
    torch.use_deterministic_algorithms(True)
    results = {name: one_run(rank, *how) for name, how in RUNS.items()}
    for mode in ("ddp", "fsdp2"):
        for method in ("sonar", "standard_no_expert_clip"):
            results[f"peaks {mode} {method}"] = peaks(mode, method)
    return results


def _bypass(model, layers):
    """Leave the experts of some layers out of the computation, as a hand-written skip for empty batches would."""
    for index in layers:
        mlp = model.model.layers[index].mlp
        mlp.forward = lambda hidden: hidden * 1.0


def _fault(rank: int, layers) -> str:
    model = tiny_model(num_hidden_layers=LAYERS)
    trained = data_parallel(model, "ddp", "sonar", timeout_s=3)
    optimizer = build(trained, "sonar")
    if rank == 1:
        _bypass(model, layers)
    try:
        train(trained, optimizer, batches(1))
    except RuntimeError as error:
        return str(error)
    return ""


def skips_one(rank: int) -> str:
    """Rank 1 does not use the experts of the middle layer."""
    return _fault(rank, [1])


def skips_last_hook(rank: int) -> str:
    """Rank 1 does not use the experts whose gradients come last."""
    return _fault(rank, [0])


def skips_all(rank: int) -> str:
    """No hook fires on rank 1: it says nothing at all."""
    return _fault(rank, range(LAYERS))


def _worker(rank: int, work, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.save(work(rank), f"{folder}/{rank}.new")
    os.rename(f"{folder}/{rank}.new", f"{folder}/{rank}.pt")
    if work is equality:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # after a fault, collectives of DDP are still under way


def on_two_ranks(work, folder: Path, timeout_s: float = processes.LIMIT_S) -> list:
    """``work(rank)`` of both ranks, from two processes; a hang is an error."""
    processes.spawn(_worker, (work, processes.free_port(), str(folder)), timeout_s=timeout_s)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]
