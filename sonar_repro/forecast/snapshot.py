"""A forecast's allocations as a memory snapshot that torch's own viewer reads (pytorch.org/memory_viz).

The layout is that of ``torch.cuda.memory._snapshot()``: ``segments`` with their blocks at the end of the run, and
``device_traces``, one event per change (``alloc``, ``free_requested``, ``free_completed``, ``segment_alloc``). Pickle
protocol 4: the viewer shows an empty page for a newer one (pytorch/torchtitan#3375).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ..instruments.events import OWNERS, REGIONS, EventLog
from .allocator import CachingAllocator

PROTOCOL = 4


def snapshot(log: EventLog, first_step: int = 1) -> dict[str, Any]:
    """The recorded run as a snapshot.

    Args:
        log: a recorded run; blocks carry the module that was running (``places``) and their owner.
        first_step: events before this recorded step are replayed but left out of the trace (the load, say).
    """
    begin = next((at for at, kind, label in log.marks if kind == "step" and label == str(first_step)), 0)
    allocator = _Traced()
    trace: list[dict[str, Any]] = []
    live: dict[int, tuple[Any, int]] = {}
    for position, event in enumerate(log.events):
        index = abs(event) - 1
        frames = _frames(log, index)
        allocator.new_segments.clear()
        if event > 0:
            block = allocator.malloc(log.sizes[index])
            live[index] = (block, log.sizes[index])
            entries = [_entry("segment_alloc", s.address, s.size, frames, position) for s in allocator.new_segments]
            entries.append(_entry("alloc", block.address, block.size, frames, position))
        else:
            block, size = live.pop(index)
            entries = [_entry(action, block.address, block.size, frames, position) for action in _FREE]
            allocator.free(block, size)
        if position >= begin:
            trace += entries
    return {
        "segments": [_segment(first, live, log) for first in allocator.firsts],
        "device_traces": [trace],
        "allocator_settings": {"expandable_segments": False},
    }


def write(path: Path, log: EventLog, first_step: int = 1) -> None:
    """Write :func:`snapshot` for the viewer; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(snapshot(log, first_step), file, protocol=PROTOCOL)


_FREE = ("free_requested", "free_completed")


class _Traced(CachingAllocator):
    """Keeps each segment's first block, and the segments that the last request reserved."""

    def __init__(self) -> None:
        super().__init__()
        self.firsts: list[Any] = []
        self.new_segments: list[Any] = []

    def _reserve(self, size: int, small: bool) -> Any:
        block = super()._reserve(size, small)
        self.firsts.append(block)
        self.new_segments.append(_Whole(block.address, block.size))
        return block


class _Whole:
    """A segment when it was reserved: its first block is split later."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size


def _frames(log: EventLog, index: int) -> list[dict[str, Any]]:
    """From the inside out: what the block is, the module that ran, the region of the step."""
    place = log.place_names[log.places[index]] or "loss and step"
    owner, region = OWNERS[log.owners[index]], REGIONS[log.regions[index]]
    names = ((owner, "owner"), (place, "module"), (region, "region"))
    return [{"name": name, "filename": kind, "line": 0} for name, kind in names]


def _entry(action: str, address: int, size: int, frames: list[dict[str, Any]], time_us: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames, "time_us": time_us}


def _segment(first: Any, live: dict[int, tuple[Any, int]], log: EventLog) -> dict[str, Any]:
    named = {id(block): (index, size) for index, (block, size) in live.items()}
    blocks, block, total, allocated = [], first, 0, 0
    while block is not None:
        index, requested = named.get(id(block), (None, 0))
        state = "inactive" if index is None else "active_allocated"
        frames = [] if index is None else _frames(log, index)
        sizes = {"size": block.size, "requested_size": requested}
        blocks.append({"address": block.address, "state": state, "frames": frames, **sizes})
        total += block.size
        allocated += 0 if index is None else block.size
        block = block.next
    kind = "small" if first.small else "large"
    counted = {"total_size": total, "allocated_size": allocated, "active_size": allocated, "requested_size": 0}
    counted["requested_size"] = sum(block["requested_size"] for block in blocks)
    head = {"device": 0, "address": first.address, "stream": 0, "segment_type": kind, "segment_pool_id": (0, 0)}
    return {**head, **counted, "is_expandable": False, "frames": [], "blocks": blocks}
