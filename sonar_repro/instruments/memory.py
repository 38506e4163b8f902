"""Memory meters with one interface: what CUDA counted, what our tracker counted on a CPU, what a forecast says.

``phase(name)`` starts a phase (``load``, ``warmup``, ``measured``) and resets the peak; ``read()`` gives the record's
``memory`` block: bytes as integers, and ``None`` with a reason for what the source cannot know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, Self

import torch

from ..errors import Unsupported
from .tracker import AllocationTracker

PHASES = ("load", "warmup", "measured")


class MemoryMeter(Protocol):
    """What every meter offers. Meters are context managers; measured code runs inside."""

    source: str

    def __enter__(self) -> MemoryMeter: ...
    def __exit__(self, *exc: Any) -> None: ...
    def phase(self, name: str) -> None: ...
    def read(self) -> dict[str, Any]: ...


class TrackerMeter:
    """Peaks of a real CPU run from :class:`AllocationTracker`; for steps that are not timed (it slows each operator).

    ``peak_allocated_bytes`` rounds every storage up to 512 bytes, as ``torch.cuda.max_memory_allocated`` does, so that
    smoke and paper scale count alike; ``peak_requested_bytes`` is the exact sum of storage bytes.
    """

    source = "tracker"

    def __init__(self, tracker: AllocationTracker | None = None) -> None:
        self.tracker = tracker or AllocationTracker()

    def __enter__(self) -> Self:
        self.tracker.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.tracker.__exit__(*exc)

    def phase(self, name: str) -> None:
        """Start phase ``name`` with its peak at what is live now."""
        self.tracker.phase(name)

    def attach(self, model: torch.nn.Module, expert_parameters: Any = ()) -> None:
        """Count a model that was built outside the meter, and name its weights and gradients (timelines)."""
        self.tracker.attach(model, expert_parameters)

    def read(self) -> dict[str, Any]:
        """The record's ``memory`` block; phases that did not run are ``None`` with a reason."""
        block: dict[str, Any] = {"source": self.source}
        for name in PHASES:
            peak = self.tracker.peaks.get(name)
            block[name] = {
                "peak_allocated_bytes": peak.allocated if peak else None,
                "peak_reserved_bytes": None,
                "peak_requested_bytes": peak.requested if peak else None,
            }
            if peak is None:
                block[name]["reason"] = "phase did not run"
        block["reserved_reason"] = "the CPU tracker has no caching allocator"
        return block


class CudaMeter:
    """PyTorch's own statistics of one CUDA device: peak allocated and reserved, allocation retries and OOMs, by phase.

    Raises:
        Unsupported: torch sees no CUDA device.
    """

    source = "cuda"

    def __init__(self, device: torch.device | str | int = "cuda") -> None:
        if not torch.cuda.is_available():
            raise Unsupported("memory meter 'cuda': torch sees no CUDA device; use the tracker (CPU) or scale=forecast")
        self.device = torch.device(device)
        torch.cuda.init()  # statistics of a device that was never used can neither be read nor reset
        self._readings: dict[str, dict[str, int]] = {}
        self._name: str | None = None
        self._retries = self._ooms = 0

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._close()

    def phase(self, name: str) -> None:
        """End the phase before (synchronising first, so that its kernels are in it) and start ``name``."""
        self._close()
        self._name = name
        torch.cuda.reset_peak_memory_stats(self.device)
        self._retries, self._ooms = self._faults()

    def read(self) -> dict[str, Any]:
        """The record's ``memory`` block, the running phase up to now included."""
        self._close(keep=True)
        block: dict[str, Any] = {"source": self.source}
        for name in PHASES:
            block[name] = self._readings.get(name) or {
                "peak_allocated_bytes": None,
                "peak_reserved_bytes": None,
                "reason": "phase did not run",
            }
        return block

    def _close(self, keep: bool = False) -> None:
        if self._name is None:
            return
        torch.cuda.synchronize(self.device)
        retries, ooms = self._faults()
        self._readings[self._name] = {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(self.device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(self.device),
            "peak_requested_bytes": torch.cuda.memory_stats(self.device).get("requested_bytes.all.peak"),
            "allocation_retries": retries - self._retries,
            "out_of_memory_errors": ooms - self._ooms,
        }
        if not keep:
            self._name = None

    def _faults(self) -> tuple[int, int]:
        """(allocation retries, out-of-memory errors) so far; a fresh device has no statistics yet."""
        statistics = torch.cuda.memory_stats(self.device)
        return statistics.get("num_alloc_retries", 0), statistics.get("num_ooms", 0)


class CudaHistory:
    """A snapshot of the CUDA allocator on demand (``+task.options.snapshot=true``), for pytorch.org/memory_viz.

    Recording costs time at every allocation, so it covers loading and the untimed steps and ends before the first timed
    one; an out-of-memory before that is in it.

    Raises:
        Unsupported: torch sees no CUDA device.
    """

    FILE = "memory_snapshot.pickle"
    ENTRIES = 200_000  # the newest are kept

    def __init__(self, folder: Path) -> None:
        if not torch.cuda.is_available():
            raise Unsupported("task.options.snapshot=true: only the CUDA allocator keeps a history; drop the option")
        self.path = folder / self.FILE
        torch.cuda.memory._record_memory_history(max_entries=self.ENTRIES)
        self._recording = True

    def save(self) -> str | None:
        """Write the file and stop recording; returns its name, or None when that was done before."""
        if not self._recording:
            return None
        self._recording = False
        torch.cuda.memory._dump_snapshot(str(self.path))
        torch.cuda.memory._record_memory_history(enabled=None)
        return self.FILE
