"""The forecast's step time: recorded operators, a card, a host, and the schedule of the two.

The step is recorded at two lengths. Bytes, operations and launches of each operator are lines in the length of its
micro-batch, and the weights of experts without a token are left out at the length asked for, so that the step can be
timed at any length. Constants have a public source each (:class:`Constants`); none is fitted to a measured step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..config.schema import GpuConfig
from .host_costs import LAUNCH_US, LIBRARY_LAUNCH_US, Host
from .recorder import KINDS, RecordedStep
from .two_resources import Kernels, Timeline, parts_us, schedule

#: PyTorch's grouped product is one kernel on Hopper and data-centre Blackwell only; elsewhere it reads the offsets on
#: the host and multiplies one group after the other (aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_fallback).
GROUPED_CAPABILITIES = (9, 10)
HOST_SPEEDS = tuple(round(2 ** (n / 4), 4) for n in range(-4, 9))  # 0.5 to 4 in quarter octaves
SHIFT = 0.2


@dataclass(frozen=True)
class Constants:
    """What the model takes as given, beside the card's datasheet and the measured host.

    Attributes:
        bandwidth_efficiency: of the datasheet's bandwidth that a streaming kernel reaches: 1.566 to 1.573 of 1.792 TB/s
            on a GeForce RTX 5090, the memory system of the RTX PRO 6000 (NVIDIA/cccl#9881, large arrays); 1727 of 1935
            GB/s on an A800 (mli/transformers-benchmarks#4).
        matmul_efficiency: of the datasheet's rate that large 16-bit products reach: 368 and 417 of 503.8 TFLOP/s on two
            RTX PRO 6000 (zzc0721/torch-performance-test-data#160, #162), their mean.
        shortest_kernel_us: duration of a kernel with next to no work; textbook value for current NVIDIA GPUs.
        gap_us: the device between two kernels that were both issued: 3.8 us a kernel of 2.9 us (NVIDIA, "Getting
            Started with CUDA Graphs", 2019).
        launch_us, library_launch_us: host time of a launch (:mod:`.host`).
        host_speed: relative to the host measured; all host times, launches too, are divided by it.
    """

    bandwidth_efficiency: float = 0.88
    matmul_efficiency: float = 0.78
    shortest_kernel_us: float = 2.0
    gap_us: float = 0.9
    launch_us: float = LAUNCH_US
    library_launch_us: float = LIBRARY_LAUNCH_US
    host_speed: float = 1.0

    def shifted(self, name: str, factor: float) -> Constants:
        return dataclasses.replace(self, **{name: getattr(self, name) * factor})


SENSITIVE = tuple(f.name for f in dataclasses.fields(Constants))


@dataclass
class StepProfile:
    """A recorded step as arrays, one entry an operator; ``low`` and ``high`` are the values at the two lengths."""

    names: list[str]
    lengths: tuple[float, float]
    micro_batch: np.ndarray
    kind: np.ndarray
    host_us: np.ndarray  # without launches
    library: np.ndarray
    grouped: np.ndarray
    waits: np.ndarray
    tensor_core: np.ndarray
    experts: np.ndarray
    top_k: np.ndarray
    lines: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    head_us: float = 0.0
    tail_us: float = 0.0
    grouped_host_us: float = 0.0  # of one product inside a grouped one that loops

    def at(self, name: str, lengths: Sequence[float]) -> np.ndarray:
        """A quantity of each operator, its micro-batch at its own length."""
        low, high = self.lines[name]
        wanted = np.asarray(lengths, dtype=float)[np.minimum(self.micro_batch, len(lengths) - 1)]
        a, b = self.lengths
        if a == b:
            return high
        return np.maximum(0.0, low + (high - low) * (wanted - a) / (b - a))


LINES = ("nbytes", "flops", "launches", "expert_bytes", "tokens")


def profile(steps: Sequence[RecordedStep], host: Host, parameters: int) -> StepProfile:
    """Arrays from the last recorded steps; from the last alone if the two are not the same operators."""
    last = steps[-1]
    other = steps[-2] if len(steps) > 1 and _same(steps[-2], last) else last
    rows = last.operators
    work = [operator.work for operator in rows]
    pairs = [[operator.work for operator in step.operators] for step in (other, last)]
    return StepProfile(
        names=[operator.name for operator in rows],
        lengths=(float(other.lengths[0]), float(last.lengths[0])),
        micro_batch=np.array([operator.micro_batch for operator in rows]),
        kind=np.array([operator.kind for operator in rows]),
        host_us=np.array([host.cost(operator) for operator in rows]),
        library=np.array([operator.library for operator in rows]),
        grouped=np.array([w.grouped for w in work]),
        waits=np.array([w.syncs for w in work]),
        tensor_core=np.array([w.tensor_core for w in work]),
        experts=np.array([w.experts for w in work]),
        top_k=np.array([w.top_k for w in work]),
        lines={
            **{n: tuple(np.array([getattr(w, n) for w in side], dtype=float) for side in pairs) for n in LINES},
            "live": tuple(np.array([o.live for o in s.operators], dtype=float) for s in (other, last)),
        },
        head_us=host.head_us * parameters,
        tail_us=host.tail_us * parameters,
        grouped_host_us=host.product_us,
    )


def _same(a: RecordedStep, b: RecordedStep) -> bool:
    return len(a.operators) == len(b.operators) and all(x.name == y.name for x, y in zip(a.operators, b.operators))


def kernels(step: StepProfile, gpu: GpuConfig, constants: Constants, lengths: Sequence[float]) -> tuple[Kernels, Any]:
    """The step's kernels on a card; also the index of the operator behind each."""
    moved = step.at("nbytes", lengths) + step.at("expert_bytes", lengths) * _share(step, lengths)
    rate = gpu.bf16_tflops * np.where(step.tensor_core, 1.0, fp32_share(gpu)) * constants.matmul_efficiency
    busy = np.maximum(
        moved / (gpu.bandwidth_gb_s * constants.bandwidth_efficiency * 1e3), step.at("flops", lengths) / (rate * 1e6)
    )
    launches = np.rint(step.at("launches", lengths)).astype(int)
    host = step.host_us / constants.host_speed
    # One kernel needs bfloat16 as well: float32 operands are multiplied in a loop on every card.
    looping = step.grouped & (~step.tensor_core | (gpu.compute_capability not in GROUPED_CAPABILITIES))
    launches = np.where(looping, step.experts, launches)
    looped = step.grouped_host_us * (step.experts - 1) / constants.host_speed
    host = host + np.where(looping, looped, 0.0)
    waits = step.waits | looping
    busy = np.maximum(busy, launches * constants.shortest_kernel_us)
    each = np.where(step.library, constants.library_launch_us, constants.launch_us) / constants.host_speed
    return _expand(step, host, each, busy, launches, waits, constants)


def _expand(
    step: StepProfile, host: Any, each: Any, busy: Any, launches: Any, waits: Any, constants: Constants
) -> tuple[Kernels, np.ndarray]:
    """One row a kernel: an operator's host time stands before its first launch, and what launches nothing before the
    next operator's; a looped grouped product spreads its host time over its launches."""
    before = np.cumsum(host + each * launches) + step.head_us / constants.host_speed
    launching = np.flatnonzero(launches)
    index = np.repeat(launching, launches[launching])
    first = np.cumsum(launches[launching]) - launches[launching]
    order = np.arange(len(index)) - np.repeat(first, launches[launching])
    remaining = launches[index] - 1 - order
    spread = np.where(step.grouped, (host + each * launches) / np.maximum(launches, 1), each)
    issued = before[index] - remaining * spread[index]
    host_us = np.diff(issued, prepend=0.0)
    total = before[-1] if len(before) else 0.0
    tail = total - (issued[-1] if len(issued) else 0.0) + step.tail_us / constants.host_speed
    # A grouped product waits for its offsets before its first kernel: for the kernel before it.
    waiting = np.zeros(len(index), dtype=bool)
    starts = first[np.isin(launching, np.flatnonzero(waits & step.grouped))]
    waiting[starts[starts > 0] - 1] = True
    waiting[np.flatnonzero((waits & ~step.grouped)[index] & (remaining == 0))] = True
    device = (busy / np.maximum(launches, 1))[index]
    return Kernels(host_us, device, step.kind[index], waiting, float(tail), constants.gap_us), index


def _share(step: StepProfile, lengths: Sequence[float]) -> np.ndarray:
    share = np.clip(1.0 - step.top_k / np.maximum(step.experts, 1), 0.0, 1.0)
    return 1.0 - share ** step.at("tokens", lengths)


def fp32_share(gpu: GpuConfig) -> float:
    """fp32 products run outside the matrix units by default; a sixteenth of the 16-bit rate if no figure is given."""
    return (gpu.fp32_tflops or gpu.bf16_tflops / 16) / gpu.bf16_tflops


def simulate(
    step: StepProfile, gpu: GpuConfig, lengths: Sequence[float], constants: Constants | None = None
) -> tuple[dict[str, float], Kernels, Timeline, np.ndarray]:
    """Times of a step in milliseconds (step, busy, idle, host, the three parts), and what they come from."""
    made, index = kernels(step, gpu, constants or Constants(), lengths)
    timeline = schedule(made)
    parts = dict(zip((f"{kind}_ms" for kind in KINDS), (us / 1e3 for us in parts_us(made, len(KINDS)))))
    times = {
        "step_ms": timeline.step_us / 1e3,
        **parts,
        "busy_ms": timeline.busy_us / 1e3,
        "idle_ms": timeline.idle_us / 1e3,
        "host_ms": (float(np.sum(made.host_us)) + made.tail_us) / 1e3,  # without waits
        "kernels": len(made.device_us),
    }
    return times, made, timeline, index


def host_curve(step: StepProfile, gpu: GpuConfig, lengths: Sequence[float]) -> list[dict[str, float]]:
    """The step over the host's speed, launches included: 1 is the host measured."""
    points = []
    for speed in HOST_SPEEDS:
        faster = dataclasses.replace(Constants(), host_speed=speed)
        points.append({"host_speed": speed, "step_ms": _rounded(simulate(step, gpu, lengths, faster)[0]["step_ms"])})
    return points


def sensitivity(step: StepProfile, gpu: GpuConfig, lengths: Sequence[float]) -> dict[str, dict[str, float]]:
    """The step in milliseconds with one constant a fifth lower and higher."""
    moved = {}
    for name in SENSITIVE:
        ends = {"low": 1 - SHIFT, "high": 1 + SHIFT}
        changed = {end: Constants().shifted(name, factor) for end, factor in ends.items()}
        moved[name] = {end: _rounded(simulate(step, gpu, lengths, c)[0]["step_ms"]) for end, c in changed.items()}
    return moved


def _rounded(value: float) -> float:
    return round(value, 4)
