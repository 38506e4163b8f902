"""Two resources: the host issues kernels in order, the device runs each once it is issued and the one before is done.

For kernel j, issued at ``a_j`` and running for ``g_j``: ``end_j = max(a_j, end_{j-1}) + g_j``. Without waits of the
host that has a closed form, ``end_j = G_j + max_{i <= j} (a_i - G_{i-1})`` with ``G`` the running sum of ``g``, so that
a step of 20,000 kernels takes a millisecond; where the host waits for the device (a value is read), the next stretch
starts at the end of the kernel. The step ends when both are done: a timed run synchronises the device at its end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Kernels:
    """Kernels of a step, arrays of length n in launch order.

    ``host_us``: host time from the issue of the kernel before to the issue of this one. ``device_us``: how long it
    runs. ``gap_us``: the device is idle at least so long between two kernels. ``kind``: index of the part it counts to.
    ``waits``: the host waits for it. ``tail_us``: host time behind the last launch.
    """

    host_us: np.ndarray
    device_us: np.ndarray
    kind: np.ndarray
    waits: np.ndarray
    tail_us: float = 0.0
    gap_us: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """When each kernel was issued, started and ended, in microseconds from the start of the step."""

    issued: np.ndarray
    start: np.ndarray
    end: np.ndarray
    step_us: float
    host_us: float  # when the host was done, waits included

    @property
    def busy_us(self) -> float:
        """Time in which a kernel ran."""
        return float(np.sum(self.end - self.start))

    @property
    def idle_us(self) -> float:
        return self.step_us - self.busy_us


def schedule(kernels: Kernels) -> Timeline:
    """Run the kernels on the two resources."""
    count = len(kernels.device_us)
    issued, start, end = (np.empty(count) for _ in range(3))
    host, device = 0.0, -kernels.gap_us
    edges = [*(np.flatnonzero(kernels.waits) + 1), count]
    first = 0
    for last in edges:
        if last == first:
            continue
        part = slice(first, last)
        occupied = kernels.device_us[part] + kernels.gap_us
        done = np.cumsum(occupied)
        issued[part] = host + np.cumsum(kernels.host_us[part])
        earliest = np.maximum(np.maximum.accumulate(issued[part] - (done - occupied)), device + kernels.gap_us)
        start[part] = earliest + done - occupied
        end[part] = start[part] + kernels.device_us[part]
        host, device = float(issued[last - 1]), float(end[last - 1])
        if kernels.waits[last - 1]:
            host = max(host, device)
        first = last
    host += kernels.tail_us
    return Timeline(issued, start, end, max(host, device, 0.0), host)


def parts_us(kernels: Kernels, kinds: int) -> list[float]:
    """Kernel time of each kind; their sum is the busy time."""
    return np.bincount(kernels.kind, weights=kernels.device_us, minlength=kinds).tolist()


def write_trace(
    path: Path, names: Sequence[str], kernels: Kernels, timeline: Timeline, live: Sequence[float] = ()
) -> None:
    """A Chrome trace (chrome://tracing, Perfetto): a row for the host, one for the device, and a memory counter.

    Args:
        live: bytes allocated when each kernel's operator was issued; empty leaves the counter out.
    """
    events: list[dict[str, Any]] = []
    before = 0.0
    for issued, size in zip(timeline.issued, live):  # an allocation is the host's: it is counted as it is issued
        counted = {"GB": round(size / 1e9, 6)}
        events.append({"ph": "C", "name": "allocated", "pid": 0, "ts": round(issued, 3), "args": counted})
    for name, issued, start, end, wait in zip(names, timeline.issued, timeline.start, timeline.end, kernels.waits):
        common = {"ph": "X", "name": name, "pid": 0}
        events.append({**common, "tid": "host", "ts": round(before, 3), "dur": round(issued - before, 3)})
        events.append({**common, "tid": "device", "ts": round(start, 3), "dur": round(end - start, 3)})
        before = max(issued, end) if wait else issued
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
