"""Kernel time of a training step by kind, from torch.profiler (Sonar-MoE §5.3, Figure 3).

A step's time is split into ``busy``, the union of the intervals in which a kernel runs, and ``idle``, the rest. Busy
time is split by kind: ``clipping`` and ``optimizer`` are what was launched inside the ranges that
:mod:`sonar_repro.methods.ranges` puts around that work, wherever it runs (the optimizer's kernels of an in-backward
method run in the backward pass); all else is ``forward_backward``. Where kernels of several kinds run at once on
different streams, they share that time equally, so that the parts always add up to ``busy``.

The profiler slows the host down: steps that wait for kernel launches are longer, and more idle, than unprofiled ones.
"""

from __future__ import annotations

import bisect
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..methods.ranges import CLIP, OPTIMIZER

STEP = "sonar_repro::step"
FORWARD_BACKWARD = "forward_backward"
KINDS = (FORWARD_BACKWARD, "clipping", "optimizer")
KIND_OF_RANGE = {CLIP: "clipping", OPTIMIZER: "optimizer"}
SOURCES = {"cuda": "profiler (CUDA kernels)", "cpu": "profiler (cpu operators)"}

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
# Autograd's own events enclose hooks, and so Python code that is no operator.
ENCLOSING = ("autograd::engine::", "torch::autograd::")
# For a kernel whose launch is not in the trace.
KERNEL_NAMES = ((re.compile(r"lpnorm", re.I), "clipping"), (re.compile(r"adam|lion|optimizer", re.I), "optimizer"))

Span = tuple[float, float]
Labelled = tuple[float, float, str]
T = TypeVar("T")


@dataclass
class Trace:
    """What matters of a Chrome trace; times in microseconds, threads by the trace's ``tid``."""

    steps: list[Span] = field(default_factory=list)
    ranges: dict[Any, list[Labelled]] = field(default_factory=lambda: defaultdict(list))
    operators: dict[Any, list[Span]] = field(default_factory=lambda: defaultdict(list))
    kernels: list[tuple[float, float, str, Any]] = field(default_factory=list)  # start, end, name, correlation
    launches: dict[Any, tuple[Any, float]] = field(default_factory=dict)  # correlation -> thread, time


def read_trace(events: Iterable[dict[str, Any]]) -> Trace:
    """Sort the complete events (``ph == "X"``) of a Chrome trace as ``torch.profiler`` exports it."""
    trace = Trace()
    starts: dict[Any, tuple[Any, float]] = {}  # of operators, by external id
    launches: dict[Any, tuple[Any, float, Any]] = {}
    for event in events:
        if event.get("ph") != "X" or "cat" not in event:
            continue
        start, name, category = float(event["ts"]), event["name"], event["cat"]
        arguments, end = event.get("args", {}), start + float(event.get("dur", 0))
        correlation, external = arguments.get("correlation"), arguments.get("External id")
        if category == "user_annotation" and name == STEP:
            trace.steps.append((start, end))
        elif category == "user_annotation" and name in KIND_OF_RANGE:
            trace.ranges[event["tid"]].append((start, end, KIND_OF_RANGE[name]))
        elif category == "cpu_op" and not name.startswith(ENCLOSING):
            trace.operators[event["tid"]].append((start, end))
            starts[external] = (event["tid"], start)
        elif category in DEVICE_WORK:
            trace.kernels.append((start, end, name, correlation))
        elif category in LAUNCHES and correlation:
            launches[correlation] = (event["tid"], start, external)
    for correlation, (thread, start, external) in launches.items():
        # A launch on a thread that the CPU side does not know by this number: go by the operator that made it.
        known = thread in trace.operators or thread in trace.ranges
        trace.launches[correlation] = (thread, start) if known else starts.get(external, (thread, start))
    return trace


def flatten(ranges: Iterable[Labelled]) -> list[Labelled]:
    """Nested ranges of one thread as disjoint pieces in order; the innermost range names each."""
    pieces: list[Labelled] = []
    open_: list[Labelled] = []
    at = float("-inf")

    def advance(to: float) -> None:
        nonlocal at
        if open_ and to > at:
            pieces.append((at, to, open_[-1][2]))
        at = max(at, to)

    def close(before: float) -> None:
        while open_ and open_[-1][1] <= before:
            advance(open_[-1][1])
            open_.pop()

    for one in sorted(ranges, key=lambda r: (r[0], -r[1])):
        close(one[0])
        advance(one[0])
        open_.append(one)
    close(float("inf"))
    return pieces


def merge(spans: Iterable[Span]) -> list[Span]:
    """The union of intervals as disjoint ones in order."""
    merged: list[list[float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def operator_work(trace: Trace) -> list[Labelled]:
    """When an operator runs on some CPU thread, cut at the ranges of that thread and named by them.

    For one thread this is the sum of operators' self times by range.
    """
    work: list[Labelled] = []
    for thread, operators in trace.operators.items():
        pieces = flatten(trace.ranges.get(thread, ()))
        ends = [piece[1] for piece in pieces]
        for start, end in merge(operators):
            at = start
            for index in range(bisect.bisect_right(ends, start), len(pieces)):
                left, right, kind = pieces[index]
                if left >= end:
                    break
                work += [(at, left, FORWARD_BACKWARD)] if left > at else []
                work.append((max(at, left), min(end, right), kind))
                at = min(end, right)
            work += [(at, end, FORWARD_BACKWARD)] if end > at else []
    return work


def kernel_work(trace: Trace) -> list[Labelled]:
    """When each kernel, copy and fill runs on the device, named by the range from which it was launched."""
    pieces = {thread: flatten(ranges) for thread, ranges in trace.ranges.items()}
    starts = {thread: [piece[0] for piece in flat] for thread, flat in pieces.items()}

    def kind_of(name: str, correlation: Any) -> str:
        if correlation not in trace.launches:
            return next((kind for pattern, kind in KERNEL_NAMES if pattern.search(name)), FORWARD_BACKWARD)
        thread, time = trace.launches[correlation]
        index = bisect.bisect_right(starts.get(thread, ()), time) - 1
        inside = index >= 0 and time < pieces[thread][index][1]
        return pieces[thread][index][2] if inside else FORWARD_BACKWARD

    return [(start, end, kind_of(name, correlation)) for start, end, name, correlation in trace.kernels]


def time_by_kind(work: Iterable[Labelled], windows: Iterable[Span]) -> dict[str, float]:
    """How long each kind runs inside the windows; kinds that run at once share the time equally.

    The values add up to the length of the union of all intervals inside the windows.
    """
    edges: list[tuple[float, int, str]] = []
    for start, end, kind in work:
        edges += [(start, 1, kind), (end, -1, kind)]
    for start, end in windows:
        edges += [(start, 1, ""), (end, -1, "")]
    running: dict[str, int] = defaultdict(int)
    total = dict.fromkeys(KINDS, 0.0)
    before = 0.0
    for time, change, kind in sorted(edges):
        if running[""] and time > before:
            active = [k for k in KINDS if running[k]]
            for k in active:
                total[k] += (time - before) / len(active)
        running[kind] += change
        before = time
    return total


def breakdown(events: Iterable[dict[str, Any]], device: str) -> dict[str, Any]:
    """The record's ``time.kernel_breakdown``: mean milliseconds of one profiled step.

    Args:
        events: ``traceEvents`` of the Chrome trace; each profiled step is inside a range named ``STEP``, which ends
            after the device is synchronised.
        device: ``cuda`` (kernels) or ``cpu`` (operators).

    Returns:
        ``forward_backward_ms``, ``clipping_ms``, ``optimizer_ms``, their sum ``busy_ms``, ``idle_ms``, ``step_ms``,
        ``source``, ``steps``; the times are None with a ``reason`` if the trace has no steps or no kernels.
    """
    trace = read_trace(events)
    work = kernel_work(trace) if device == "cuda" else operator_work(trace)
    found = {"source": SOURCES[device], "steps": len(trace.steps)}
    names = [f"{kind}_ms" for kind in (*KINDS, "busy", "idle", "step")]
    if not trace.steps or not work:
        what = "CUDA kernel (is profiling permitted on this machine?)" if device == "cuda" else "operator"
        return {**dict.fromkeys(names), **found, "reason": f"the profiler saw no {what if trace.steps else 'step'}"}
    parts = time_by_kind(work, trace.steps)
    busy, whole = sum(parts.values()), sum(end - start for start, end in trace.steps)
    times = (*parts.values(), busy, whole - busy, whole)
    return {**{name: time / 1e3 / len(trace.steps) for name, time in zip(names, times)}, **found}


def profile_steps(step: Callable[[T], Any], work: Sequence[T], device: torch.device) -> dict[str, Any]:
    """Run ``step`` on each item of ``work`` under the profiler and break its time down.

    The first item warms the profiler up and is left out. Not for timed steps: the profiler costs host time.
    """
    if len(work) < 2:
        return breakdown([], device.type)
    activities = [torch.profiler.ProfilerActivity.CPU]
    synchronize: Callable[[], Any] = lambda: None  # noqa: E731
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        synchronize = torch.cuda.synchronize
    plan = torch.profiler.schedule(wait=0, warmup=1, active=len(work) - 1, repeat=1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with torch.profiler.profile(
            activities=activities, schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(file))
        ) as profiler:
            for item in work:
                synchronize()
                with torch.profiler.record_function(STEP):
                    step(item)
                    synchronize()
                profiler.step()
        events = json.loads(file.read_text())["traceEvents"]
    return breakdown(events, device.type)
