"""PyTorch's CUDA caching allocator, replayed in Python over a recorded sequence of allocations and frees.

Semantics follow ``c10/cuda/CUDACachingAllocator.cpp`` with default settings (no expandable segments, no
``max_split_size_mb``, no garbage collection, one stream):

- a request is rounded up to 512 bytes; up to 1 MiB it belongs to the small pool, else to the large pool;
- the smallest free block of the pool that is large enough is taken, ties by address;
- if none fits, a segment is reserved: 2 MiB for the small pool; 20 MiB for requests under 10 MiB; else the request
  rounded up to 2 MiB;
- a block is split if what remains is at least 512 bytes (small pool) or more than 1 MiB (large pool). What is not split
  off counts as allocated: ``max_memory_allocated`` sums *block* sizes, not requests;
- a freed block merges with free neighbours of its segment;
- a reservation above the cap first gives back every wholly free segment of both pools, then fails: out of memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ..instruments.events import REGIONS, EventLog

KIB, MIB = 1 << 10, 1 << 20
MIN_BLOCK = 512
SMALL_LIMIT = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_SEGMENT_LIMIT = 10 * MIB
LARGE_ROUNDING = 2 * MIB


class OutOfMemory(MemoryError):
    """A request that the cap cannot hold, even after the cache was given back."""

    def __init__(self, requested: int, allocated: int, reserved: int) -> None:
        super().__init__(f"tried to allocate {requested} bytes with {allocated} allocated and {reserved} reserved")
        self.requested, self.allocated, self.reserved = requested, allocated, reserved


class _Block:
    """A piece of a segment; neighbours in the segment are linked."""

    __slots__ = ("size", "address", "previous", "next", "free", "small")

    def __init__(self, size: int, address: int, small: bool) -> None:
        self.size, self.address, self.small = size, address, small
        self.previous: _Block | None = None
        self.next: _Block | None = None
        self.free = False


class CachingAllocator:
    """One device, one stream. ``malloc`` returns a handle for ``free``; all sizes are bytes.

    Args:
        cap_bytes: the most that may be reserved (``set_per_process_memory_fraction`` × total), or ``None``.
    """

    def __init__(self, cap_bytes: int | None = None) -> None:
        self.cap_bytes = cap_bytes
        self.allocated = self.reserved = self.requested = 0
        self.peak_allocated = self.peak_reserved = self.peak_requested = 0
        self.retries = self.segments = 0
        # Free blocks of each pool, sorted by (size, address): bisection is best fit with ties by address.
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._next_address = 0

    def reset_peak(self) -> None:
        """Start a new phase, as ``torch.cuda.reset_peak_memory_stats`` does."""
        self.peak_allocated, self.peak_reserved, self.peak_requested = self.allocated, self.reserved, self.requested

    def malloc(self, nbytes: int) -> _Block:
        """Allocate ``nbytes`` (> 0). Raises :class:`OutOfMemory` when the cap does not hold it."""
        size = -(-nbytes // MIN_BLOCK) * MIN_BLOCK
        small = size <= SMALL_LIMIT
        block = self._take_free(size, small)
        if block is None:
            block = self._reserve(size, small)
        remaining = block.size - size
        if remaining >= MIN_BLOCK if small else remaining > SMALL_LIMIT:
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.requested += nbytes
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        return block

    def free(self, block: _Block, nbytes: int) -> None:
        """Return ``block``, which was allocated for ``nbytes``, to its pool, merged with its free neighbours."""
        self.allocated -= block.size
        self.requested -= nbytes
        pool = self._free[block.small]
        before, after = block.previous, block.next
        if before is not None and before.free:
            self._forget(pool, before)
            before.size += block.size
            before.next = after
            if after is not None:
                after.previous = before
            block = before
        if after is not None and after.free:
            self._forget(pool, after)
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.previous = block
        block.free = True
        insort(pool, (block.size, block.address, block))

    def empty_cache(self) -> int:
        """Give back every wholly free segment; returns the bytes."""
        returned = 0
        for small, pool in self._free.items():
            kept = []
            for entry in pool:
                block = entry[2]
                if block.previous is None and block.next is None:
                    returned += block.size
                else:
                    kept.append(entry)
            self._free[small] = kept
        self.reserved -= returned
        return returned

    def _take_free(self, size: int, small: bool) -> _Block | None:
        pool = self._free[small]
        position = bisect_left(pool, (size, -1))
        return pool.pop(position)[2] if position < len(pool) else None

    @staticmethod
    def _forget(pool: list[tuple[int, int, _Block]], block: _Block) -> None:
        del pool[bisect_left(pool, (block.size, block.address))]

    def _reserve(self, size: int, small: bool) -> _Block:
        if small:
            segment = SMALL_SEGMENT
        elif size < LARGE_SEGMENT_LIMIT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
        if self.cap_bytes is not None and self.reserved + segment > self.cap_bytes:
            self.empty_cache()
            self.retries += 1
            if self.reserved + segment > self.cap_bytes:
                raise OutOfMemory(size, self.allocated, self.reserved)
        self.reserved += segment
        self.segments += 1
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        # Segments never touch each other: a gap keeps addresses of different segments apart.
        block = _Block(segment, self._next_address, small)
        self._next_address += segment + LARGE_ROUNDING
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.address + size, block.small)
        rest.previous, rest.next, rest.free = block, block.next, True
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        insort(self._free[block.small], (rest.size, rest.address, rest))


@dataclass
class PhaseReport:
    """Peaks of one phase in bytes: sums of block sizes, of segments, and of exact requests."""

    peak_allocated: int = 0
    peak_reserved: int = 0
    peak_requested: int = 0


@dataclass
class AllocatorReport:
    """What the replay found. ``oom`` is ``None`` or where it failed: phase, step, region, and the three sizes."""

    peak_allocated: int
    peak_reserved: int
    peak_requested: int
    phases: dict[str, PhaseReport] = field(default_factory=dict)
    retries: int = 0
    segments: int = 0
    oom: dict[str, int | str | None] | None = None


def replay(log: EventLog, cap_bytes: int | None = None, continuation: Continuation | None = None) -> AllocatorReport:
    """Replay ``log`` through a :class:`CachingAllocator`.

    Args:
        log: from :class:`~sonar_repro.instruments.tracker.AllocationTracker` with ``events=True``.
        cap_bytes: the allocator's cap, or ``None``.
        continuation: further steps to replay behind the recorded ones, in the phase that is open at the end.

    Returns:
        Peaks over the whole run and by phase; with ``oom`` set, up to the request that failed.
    """
    return _Replay(log, CachingAllocator(cap_bytes)).run(continuation)


class Continuation(Protocol):
    """Steps behind a recorded run (:class:`~sonar_repro.forecast.step_template.StepTemplate` over a row of lengths).

    ``actions`` of one step: 0 allocates its next block, ``k > 0`` frees its own block ``k - 1``, ``k < 0`` frees block
    ``-k - 1`` of the step before. ``first_block`` is the log's index of the last recorded step's first block, ``end``
    the position in the log's events where that step ends.
    """

    actions: list[int]
    first_block: int
    end: int

    def steps(self) -> Iterator[tuple[str, list[int]]]:
        """(label, block sizes in bytes) of each further step."""


class _Replay:
    """State of one replay: the allocator, the blocks that are live, and where the run is."""

    def __init__(self, log: EventLog, allocator: CachingAllocator) -> None:
        self.log, self.allocator = log, allocator
        self.report = AllocatorReport(0, 0, 0)
        self.live: dict[int, tuple[_Block, int]] = {}
        self.phase: str | None = None
        self.step: str | None = None
        self.region = 0

    def run(self, continuation: Continuation | None) -> AllocatorReport:
        report = self.report
        try:
            self._recorded(len(self.log.events) if continuation is None else continuation.end)
            if continuation is not None:
                self._continued(continuation)
        except OutOfMemory as error:
            report.oom = {
                "phase": self.phase,
                "step": self.step,
                "region": REGIONS[self.region],
                "requested_bytes": error.requested,
                "allocated_bytes": error.allocated,
                "reserved_bytes": error.reserved,
            }
        self._close_phase()
        report.retries, report.segments = self.allocator.retries, self.allocator.segments
        return report

    def _recorded(self, end: int) -> None:
        position = 0
        for at, kind, label in self.log.marks:
            self._events(position, min(at, end))
            position = at
            if at > end:
                return
            if kind == "phase":
                self._close_phase()
                self.allocator.reset_peak()
                self.phase = label
            elif kind == "step":
                self.step = label
        self._events(position, end)

    def _events(self, start: int, stop: int) -> None:
        malloc, free, live = self.allocator.malloc, self.allocator.free, self.live
        sizes, regions = self.log.sizes, self.log.regions
        for event in self.log.events[start:stop]:
            if event > 0:
                size = sizes[event - 1]
                self.region = regions[event - 1]
                live[event - 1] = (malloc(size), size)
            else:
                free(*live.pop(-event - 1))

    def _continued(self, continuation: Continuation) -> None:
        malloc, free = self.allocator.malloc, self.allocator.free
        actions, first = continuation.actions, continuation.first_block
        regions = self.log.regions
        before = {index - first: block for index, block in self.live.items() if index >= first}
        for self.step, sizes in continuation.steps():
            own: dict[int, tuple[_Block, int]] = {}
            position = 0
            for action in actions:
                if action == 0:
                    size = sizes[position]
                    self.region = regions[first + position]
                    own[position] = (malloc(size), size)
                    position += 1
                elif action > 0:
                    free(*own.pop(action - 1))
                else:
                    free(*before.pop(-action - 1))
            before = own

    def _close_phase(self) -> None:
        allocator, report = self.allocator, self.report
        peaks = PhaseReport(allocator.peak_allocated, allocator.peak_reserved, allocator.peak_requested)
        for whole in (
            report,
            report.phases.setdefault(self.phase, PhaseReport()) if self.phase is not None else report,
        ):
            whole.peak_allocated = max(whole.peak_allocated, peaks.peak_allocated)
            whole.peak_reserved = max(whole.peak_reserved, peaks.peak_reserved)
            whole.peak_requested = max(whole.peak_requested, peaks.peak_requested)
