"""The allocator model against segments and blocks worked out by hand from PyTorch's rules."""

import random

import pytest

from sonar_repro.forecast.allocator import MIB, CachingAllocator, OutOfMemory, replay
from sonar_repro.instruments.events import EventLog

KIB = 1024


@pytest.mark.parametrize(
    ("request_bytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest small request
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # 2 MiB - 512 remain: split off
        (514 * MIB - 900_000, 514 * MIB, 514 * MIB),  # 899 584 bytes remain: too little to split
    ],
)
def test_first_request(request_bytes, block, segment):
    allocator = CachingAllocator()
    allocator.malloc(request_bytes)
    assert (allocator.allocated, allocator.reserved) == (block, segment)


def test_large_blocks_split_only_if_more_than_one_mib_remains():
    allocator = CachingAllocator()
    allocator.malloc(9 * MIB)  # of a 20 MiB segment, 11 MiB remain
    allocator.malloc(10 * MIB)  # exactly 1 MiB would remain: not more, so the whole 11 MiB are handed out
    assert (allocator.allocated, allocator.requested, allocator.reserved) == (20 * MIB, 19 * MIB, 20 * MIB)
    other = CachingAllocator()
    other.malloc(9 * MIB)
    other.malloc(10 * MIB - 512)  # 1 MiB + 512 remain: split
    assert other.allocated == 19 * MIB - 512


def test_small_blocks_split_down_to_512_bytes():
    allocator = CachingAllocator()
    for _ in range(4096):
        allocator.malloc(512)
    assert allocator.reserved == 2 * MIB == allocator.allocated
    allocator.malloc(1)
    assert allocator.reserved == 4 * MIB


def test_best_fit_takes_the_smallest_block_and_then_the_lowest_address():
    allocator = CachingAllocator()
    sizes = [4 * MIB, 2 * MIB, 3 * MIB, 2 * MIB, 9 * MIB]  # one 20 MiB segment, full
    blocks = [allocator.malloc(size) for size in sizes]
    for index in (0, 1, 3):
        if index != 1:
            allocator.free(blocks[index], sizes[index])
    taken = allocator.malloc(2 * MIB)
    assert taken.address == blocks[3].address  # 2 MiB fits exactly, the 4 MiB block does not
    allocator.free(taken, 2 * MIB)
    allocator.free(blocks[1], 2 * MIB)  # joins the 4 MiB block before it: 6 MiB free there
    assert allocator.malloc(5 * MIB).address == blocks[0].address
    assert allocator.reserved == 20 * MIB


def test_freed_neighbours_join_and_segments_never_do():
    allocator = CachingAllocator()
    first, second = [allocator.malloc(10 * MIB) for _ in range(2)]  # a segment each
    allocator.free(first, 10 * MIB)
    allocator.free(second, 10 * MIB)
    allocator.malloc(20 * MIB)
    assert allocator.reserved == 40 * MIB
    other = CachingAllocator()
    pieces = [other.malloc(5 * MIB) for _ in range(4)]  # one segment
    for piece in (pieces[0], pieces[2], pieces[1], pieces[3]):
        other.free(piece, 5 * MIB)
    other.malloc(18 * MIB)
    assert other.reserved == 20 * MIB


def test_per_expert_moments_of_granite_lose_half_a_mib_at_a_time():
    """1.5 MiB moments (512 x 1536 bf16): 13 fill a 20 MiB segment, the 13th keeps the last half MiB."""
    allocator = CachingAllocator()
    for _ in range(13):
        allocator.malloc(512 * 1536 * 2)
    assert (allocator.allocated, allocator.requested) == (20 * MIB, 13 * 1536 * KIB)
    olmoe = CachingAllocator()  # 8 MiB and 4 MiB moments: nothing is lost
    for size in (8 * MIB, 8 * MIB, 4 * MIB):
        olmoe.malloc(size)
    assert olmoe.allocated == olmoe.requested == 20 * MIB


def test_cap_gives_the_cache_back_first_and_then_fails():
    allocator = CachingAllocator(cap_bytes=60 * MIB)
    cached, kept = allocator.malloc(30 * MIB), allocator.malloc(20 * MIB)
    allocator.free(cached, 30 * MIB)
    allocator.malloc(36 * MIB)  # 50 + 36 > 60; the free 30 MiB segment goes back first
    assert (allocator.reserved, allocator.retries, kept.free) == (56 * MIB, 1, False)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(10 * MIB)
    assert (caught.value.requested, caught.value.allocated, caught.value.reserved) == (10 * MIB, 56 * MIB, 56 * MIB)


def test_a_partly_used_segment_is_not_given_back():
    allocator = CachingAllocator(cap_bytes=40 * MIB)
    big, _ = allocator.malloc(9 * MIB), allocator.malloc(2 * MIB)
    allocator.free(big, 9 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(22 * MIB)
    assert allocator.reserved == 20 * MIB


def test_invariants_of_a_random_run():
    chance = random.Random(0)
    allocator, live = CachingAllocator(), []
    for _ in range(4000):
        if live and chance.random() < 0.5:
            allocator.free(*live.pop(chance.randrange(len(live))))
        else:
            size = int(2 ** chance.uniform(0, 26))
            live.append((allocator.malloc(size), size))
        assert allocator.requested <= allocator.allocated <= allocator.reserved
        assert allocator.allocated == sum(block.size for block, _ in live)
    free = sum(size for pool in allocator._free.values() for size, _, _ in pool)
    assert free + allocator.allocated == allocator.reserved
    for block, size in live:
        allocator.free(block, size)
    assert allocator.allocated == 0 and allocator.empty_cache() and allocator.reserved == 0


def log_of(*entries):
    log = EventLog()
    for entry in entries:
        if isinstance(entry, tuple):
            log.marks.append((len(log.events), *entry))
        elif entry > 0:
            log.add(entry, 0, 1)
        else:
            log.free(-entry - 1)
    return log


def test_replay_reports_peaks_by_phase():
    log = log_of(("phase", "load"), 10 * MIB, 30 * MIB, -2, ("phase", "measured"), ("step", "1"), 1, -3)
    report = replay(log)
    assert report.phases["load"].peak_allocated == 40 * MIB
    assert report.phases["measured"].peak_allocated == 10 * MIB + 512
    assert report.phases["measured"].peak_reserved == 42 * MIB  # the freed segment stays reserved
    assert report.peak_reserved == 42 * MIB and report.oom is None


def test_replay_says_where_the_cap_was_too_small():
    log = log_of(("phase", "load"), 10 * MIB, ("phase", "measured"), ("step", "7"), 30 * MIB, 40 * MIB)
    report = replay(log, cap_bytes=50 * MIB)
    assert report.oom == {
        "phase": "measured",
        "step": "7",
        "region": "forward",
        "requested_bytes": 40 * MIB,
        "allocated_bytes": 40 * MIB,
        "reserved_bytes": 40 * MIB,
    }
    assert report.phases["measured"].peak_allocated == 40 * MIB


class TwoMoreSteps:
    """Each step allocates (size, 1 MiB), frees the step before's second block, and its own first."""

    actions, first_block, end = [0, 0, -2, 1], 2, 6

    def __init__(self, *sizes):
        self.sizes = sizes

    def steps(self):
        for number, size in enumerate(self.sizes, 3):
            yield str(number), [size, MIB]


def test_continuation_equals_the_same_steps_recorded():
    head = [("phase", "measured"), ("step", "1"), 10 * MIB, MIB, -1, ("step", "2"), 12 * MIB, MIB, -2, -3]
    recorded = log_of(*head, ("step", "3"), 16 * MIB, MIB, -4, -5, ("step", "4"), 30 * MIB, MIB, -6, -7)
    continued = log_of(*head)
    continuation = TwoMoreSteps(16 * MIB, 30 * MIB)
    continuation.end = len(continued.events)
    assert replay(continued, None, continuation) == replay(recorded)
    assert replay(continued, 30 * MIB, continuation).oom == replay(recorded, 30 * MIB).oom
    assert replay(recorded, 30 * MIB).oom["step"] == "4"
