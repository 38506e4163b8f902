"""Bytes by owner over the events of one step, thinned to a few hundred points that keep every maximum (Figure 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import UserError
from .events import OWNERS, REGIONS, EventLog
from .tracker import AllocationTracker


def step_timeline(log: EventLog, step: str | int, points: int = 240) -> dict[str, Any]:
    """The memory of one step.

    Owners are final ones: a gradient is a gradient from its birth, an activation is what forward left for backward.

    Args:
        log: a recorded run with step marks.
        step: the step's label.
        points: at most about this many points are kept: in each stretch of events the largest total, and wherever any
            owner peaks or the region changes.

    Returns:
        ``position`` (event within the step), ``region`` and ``bytes`` (owner -> requested bytes) of the points kept,
        the number of ``events``, and ``peak_bytes`` (owner -> largest value in the step, and ``total``).

    Raises:
        UserError: no such step.
    """
    start, end = _span(log, str(step))
    live = [0] * len(OWNERS)
    for event in log.events[:start]:
        _apply(log, event, live)
    series, regions = [tuple(live)], [REGIONS.index("forward")]
    for event in log.events[start:end]:
        _apply(log, event, live)
        series.append(tuple(live))
        regions.append(log.regions[event - 1] if event > 0 else regions[-1])
    kept = _keep(series, regions, points)
    peaks = {owner: max(values[code] for values in series) for code, owner in enumerate(OWNERS)}
    return {
        "step": str(step),
        "events": end - start,
        "position": kept,
        "region": [REGIONS[regions[index]] for index in kept],
        "bytes": {owner: [series[index][code] for index in kept] for code, owner in enumerate(OWNERS)},
        "peak_bytes": {**peaks, "total": max(map(sum, series))},
    }


def traced_step(
    model: torch.nn.Module,
    experts: Iterable[torch.nn.Parameter],
    state: Iterable[torch.Tensor],
    step: Callable[[], Any],
) -> dict[str, Any]:
    """The timeline of one real training step, on any device: its storages as PyTorch creates and drops them.

    Args:
        model: with all its weights; no gradient is alive.
        experts: the parameters whose gradients are told from the others.
        state: the optimizer's tensors.
        step: runs the step; it is slowed down by the tracker and must not be timed.
    """
    tracker = AllocationTracker(events=True)
    with tracker:
        tracker.attach(model, experts)
        tracker.track(state, "optimizer_state")
        tracker.step(1)
        step()
        tracker.step("end")
    tracker.detach()
    assert tracker.log is not None
    return step_timeline(tracker.log, 1)


def _span(log: EventLog, step: str) -> tuple[int, int]:
    marks = [(position, label) for position, kind, label in log.marks if kind == "step"]
    labels = [label for _, label in marks]
    if step not in labels:
        raise UserError(f"timeline of step {step}: not recorded; steps are {', '.join(labels) or 'none'}")
    index = labels.index(step)
    end = marks[index + 1][0] if index + 1 < len(marks) else len(log.events)
    return marks[index][0], end


def _apply(log: EventLog, event: int, live: list[int]) -> None:
    block = abs(event) - 1
    live[log.owners[block]] += log.sizes[block] if event > 0 else -log.sizes[block]


def _keep(series: list[tuple[int, ...]], regions: list[int], points: int) -> list[int]:
    totals = [sum(values) for values in series]
    kept = {0, len(series) - 1}
    kept.update(max(range(len(series)), key=lambda index: series[index][code]) for code in range(len(OWNERS)))
    kept.update(
        index for index in range(1, len(series)) if regions[index] != regions[index - 1] and _outer(regions, index)
    )
    stretch = max(1, -(-len(series) // max(1, points - len(kept))))
    for first in range(0, len(series), stretch):
        kept.add(max(range(first, min(first + stretch, len(series))), key=totals.__getitem__))
    return sorted(kept)


def _outer(regions: list[int], index: int) -> bool:
    """Whether the change at ``index`` is of the step's course and not one hook's optimizer call in backward."""
    backward, optimizer = REGIONS.index("backward"), REGIONS.index("optimizer")
    return {regions[index], regions[index - 1]} != {backward, optimizer}
