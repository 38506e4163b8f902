"""What the tracker writes down: owners, regions, and a run's allocations and frees in order. Imports no torch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

OWNERS = ("temporaries", "activations", "expert_gradients", "other_gradients", "optimizer_state", "weights")
TEMPORARY, ACTIVATION, EXPERT_GRADIENT, OTHER_GRADIENT, STATE, WEIGHT = range(6)
REGIONS = ("load", "forward", "backward", "optimizer")
LOAD, FORWARD, BACKWARD, OPTIMIZER = range(4)

#: CUDA's caching allocator hands out multiples of 512 bytes (``kMinBlockSize`` in c10/cuda/CUDACachingAllocator.cpp).
CUDA_ROUNDING = 512


def round_to_block(nbytes: int) -> int:
    """Bytes that a request of ``nbytes`` occupies under CUDA's 512-byte rounding (0 stays 0: no block is made)."""
    return -(-nbytes // CUDA_ROUNDING) * CUDA_ROUNDING


@dataclass
class PhasePeak:
    """Peak of one phase: ``requested`` in exact storage bytes, ``allocated`` with each storage rounded to 512 bytes."""

    requested: int = 0
    allocated: int = 0


@dataclass
class EventLog:
    """Allocations and frees of a run, in order, at 8 bytes an event.

    ``events`` holds ``+(i + 1)`` where block ``i`` is allocated and ``-(i + 1)`` where it is freed. ``sizes`` (bytes),
    ``owners`` (index into :data:`OWNERS`) and ``regions`` (index into :data:`REGIONS`: where it was allocated) are
    indexed by block, and so is ``places``: an index into ``place_names``, the tracker's ``place`` at the allocation.
    ``workspaces`` are the blocks that no tensor shows. ``marks`` are ``(position in events, kind, label)``; kinds:
    ``phase``, ``step``, ``micro_batch``.
    """

    events: array = field(default_factory=lambda: array("q"))
    sizes: array = field(default_factory=lambda: array("q"))
    owners: array = field(default_factory=lambda: array("b"))
    regions: array = field(default_factory=lambda: array("b"))
    places: array = field(default_factory=lambda: array("l"))
    place_names: list[str] = field(default_factory=lambda: [""])
    workspaces: list[int] = field(default_factory=list)
    marks: list[tuple[int, str, str]] = field(default_factory=list)

    def place(self, name: str) -> int:
        """The index of a place's name, new or known."""
        if name not in self._known:
            self._known[name] = len(self.place_names)
            self.place_names.append(name)
        return self._known[name]

    def add(self, size: int, owner: int, region: int, place: int = 0) -> int:
        """Append an allocation of ``size`` bytes; returns its block index."""
        block = len(self.sizes)
        self.places.append(place)
        self.sizes.append(size)
        self.owners.append(owner)
        self.regions.append(region)
        self.events.append(block + 1)
        return block

    def __post_init__(self) -> None:
        self._known = {"": 0}

    def free(self, block: int) -> None:
        """Append the free of ``block``."""
        self.events.append(-block - 1)
