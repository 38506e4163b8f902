"""One arm over several processes of one machine: torchrun's launcher, DDP or FSDP2, rank 0 reports."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..config.schema import Config

PROGRESS = "progress.jsonl"


def launch(config: Config, report: Any, execute: str) -> tuple[str, dict[str, Any] | None, dict[str, Any]]:
    """Run ``config`` in ``parallel.processes`` workers and return rank 0's (status, error, sections).

    The first worker that fails ends the group; its error is the arm's. Progress of rank 0 is passed on. ``execute`` is
    what each rank runs, ``module:function`` of (config, connection or None, folder): a rank imports it by this name.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder = report.arm_dir
    for old in [*folder.glob("rank*.json"), folder / PROGRESS]:
        old.unlink(missing_ok=True)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.parallel.processes,
        run_id=f"sonar-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.2,
    )
    done = threading.Event()
    relay = threading.Thread(target=_relay, args=(folder / PROGRESS, report, done), daemon=True)
    relay.start()
    try:
        elastic_launch(settings, _worker)(dataclasses.asdict(config), str(folder), execute)
    except ChildFailedError as error:
        failed = _outcomes(folder, failed=True)
        if not failed:
            raise RuntimeError(f"a worker ended without a result: {str(error).strip().splitlines()[-1]}") from None
    finally:
        done.set()
        relay.join()
        (folder / PROGRESS).unlink(missing_ok=True)
    outcome = next(iter(_outcomes(folder, failed=True)), None) or _outcomes(folder)[0]
    for path in folder.glob("rank*.json"):
        path.unlink()
    return outcome[0], outcome[1], outcome[2]


def _outcomes(folder: Path, failed: bool = False) -> list[Any]:
    """What the ranks left: all in rank order, or the failed ones, the first to fail first (the others fail of it)."""
    paths = sorted(folder.glob("rank*.json"))
    if not failed:
        return [json.loads(path.read_text()) for path in paths]
    outcomes = [json.loads(path.read_text()) for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)]
    return [outcome for outcome in outcomes if outcome[0] != "ok"]


class _ProgressFile:
    """Stands in for the runner's connection in rank 0: one JSON line a message."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)

    def send(self, message: Any) -> None:
        self.file.write(json.dumps(message) + "\n")


def _relay(path: Path, report: Any, done: threading.Event) -> None:
    position = 0
    while not done.wait(0.2):
        if path.is_file():
            with path.open() as file:
                file.seek(position)
                for line in iter(file.readline, ""):
                    if line.endswith("\n"):
                        position = file.tell()
                        kind, value = json.loads(line)
                        report.forward(kind, value)


def _worker(config_data: dict[str, Any], folder: str, execute: str) -> None:
    """One rank: join the group, run the task, leave the outcome in a file; a failure ends the group."""
    import os

    from ..config.schema import from_dict

    module, function = execute.split(":")
    run = getattr(importlib.import_module(module), function)
    config = from_dict(config_data)
    rank = int(os.environ["RANK"])
    backend = config.parallel.backend
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    try:
        connection = _ProgressFile(Path(folder) / PROGRESS) if rank == 0 else None
        outcome = run(config, connection, Path(folder))
        (Path(folder) / f"rank{rank}.json").write_text(json.dumps(outcome))
        if outcome[0] != "ok":
            raise RuntimeError(outcome[1]["message"])
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """This process's rank; 0 outside a group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Processes of the group; 1 outside one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def wrap(model: torch.nn.Module, config: Config) -> torch.nn.Module:
    """The model as it is trained: under DDP or sharded by FSDP2 in a group, itself outside one.

    DDP keeps ``.grad`` in its buckets, so that no gradient lies there twice; MESH needs buffers of its own.
    """
    if world_size() == 1:
        return model
    from ..methods import Schedule, data_parallel
    from ..optim.factory import MESH_NAMES

    name, method = config.parallel.name, config.method
    options: dict[str, Any] = {}
    if name == "ddp":
        options["gradient_as_bucket_view"] = config.optimizer.kind not in MESH_NAMES
        options["init_sync"] = config.scale.device != "fake"
    schedule = Schedule(in_backward=method.in_backward, granularity=method.granularity, clip=method.clip)
    return data_parallel(model, name, schedule, **options)


def gathered(model: torch.nn.Module, whole: torch.nn.Module) -> torch.nn.Module:
    """``whole`` with the weights of a sharded model of the same architecture; every rank must call it."""
    with torch.no_grad():
        for mine, part in zip(whole.parameters(), model.parameters(), strict=True):
            mine.copy_(part.full_tensor() if hasattr(part, "full_tensor") else part)
        for mine, part in zip(whole.buffers(), model.buffers(), strict=True):
            mine.copy_(part)
    return whole


def mean(value: torch.Tensor) -> float:
    """The mean over ranks of a 0-d tensor, as a float."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
        value /= world_size()
    return value.item()


def check_ranks_agree(model: torch.nn.Module) -> None:
    """Raise RuntimeError unless every rank holds the same weights bit for bit."""
    if world_size() == 1:
        return
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    digests: list[Any] = [None] * world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    if len(set(digests)) != 1:
        raise RuntimeError(f"ranks ended with different weights: {digests}")
