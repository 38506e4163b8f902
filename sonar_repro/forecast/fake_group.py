"""Rank 0 of a process group that does not exist: data-parallel forecasts run in one process.

torch's ``fake`` backend does no communication; FSDP2 and DDP allocate what they would allocate. Rank 0 holds the
largest shard where a size does not divide. Two things in DDP's C++ reducer cannot run on it and are stood in for
(:func:`stand_in`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def fake_group(processes: int) -> Iterator[None]:
    """Be rank 0 of ``processes`` while the body runs; nothing for one process."""
    if processes == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _KeepsItsBuckets:
    """A reducer that does not regroup its buckets after the first step: same bytes, other borders.

    Regrouping sends the new order to the other ranks as values. The total of the flat buckets is what it was.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _in_place(state, bucket):  # torch takes annotations of these as objects only, and here they are strings
    """The all-reduce of a bucket, which works in the bucket; the fake backend's has no result."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


_in_place.__name__ = "allreduce_hook"  # it stands for the plain all-reduce


def stand_in(model: nn.Module) -> nn.Module:
    """Make a DDP wrapper run on fake tensors (build it with ``init_sync=False``); other models are left alone."""
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, _in_place)
        model.reducer = _KeepsItsBuckets(model.reducer)
    return model
