"""Figure 2: the memory of one step by owner, standard training beside Sonar-MoE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from .. import conf
from ..axes import display
from ..collection import Collection
from ..metrics import GB
from ..records import Record
from . import style
from .base import Drawn, FigureSpec

NAMES = {
    "weights": "Weights",
    "optimizer_state": "Optimizer state",
    "activations": "Activations",
    "temporaries": "Temporaries",
    "other_gradients": "Other gradients",
    "expert_gradients": "Expert gradients",
}
MOST_POINTS = 1200  # a step has some ten thousand allocations; print cannot show more


@dataclass
class Timeline:
    """Live bytes by owner over the events of a step: ``live`` is [owners, events], ``marks`` are (event, name)."""

    owners: list[str]
    events: np.ndarray
    live: np.ndarray
    marks: list[tuple[float, str]]


def parse(data: Any) -> Timeline | None:
    """Read a record's ``timeline`` (README.md, "Timeline"); None if there is nothing that can be drawn.

    ``position`` [n] (event within the step), ``region`` [n] and ``bytes`` {owner: [n]}, as the instruments write it; or
    ``owners`` with ``bytes`` [n][owners] or [owners][n], ``events`` [n] and ``marks`` [{event, label}].
    """
    if not isinstance(data, dict):
        return None
    try:
        made = _by_owner(data) if isinstance(data.get("bytes"), dict) else _by_event(data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    if made.live.ndim != 2 or made.live.shape != (len(made.owners), len(made.events)) or not len(made.events):
        return None
    if not (np.isfinite(made.live).all() and np.isfinite(made.events).all()):
        return None
    return thin(made)


def _by_owner(data: dict[str, Any]) -> Timeline:
    owners = list(data["bytes"])
    events = np.array(data["position"], dtype=float)
    return Timeline(
        owners, events, np.array([data["bytes"][o] for o in owners], dtype=float), _marks(events, data["region"])
    )


def _marks(events: np.ndarray, regions: Sequence[str]) -> list[tuple[float, str]]:
    """Where forward, backward and the closing optimizer step begin; a call inside backward begins nothing."""
    marks = [(float(events[regions.index(name)]), name) for name in ("forward", "backward") if name in regions]
    start = len(regions)
    while start and regions[start - 1] == "optimizer":
        start -= 1
    return marks + ([(float(events[start]), "optimizer")] if start < len(regions) else [])


def _by_event(data: dict[str, Any]) -> Timeline:
    owners = [str(o) for o in data["owners"]]
    live = np.array(data["bytes"], dtype=float)
    live = live if live.shape[0] == len(owners) and live.shape[1] != len(owners) else live.T
    listed = data.get("events")
    named = isinstance(listed, list) and len(listed) == live.shape[1]
    events = np.array(listed, dtype=float) if named else np.arange(live.shape[1], dtype=float)
    return Timeline(owners, events, live, [(float(m["event"]), str(m["label"])) for m in data.get("marks") or []])


def thin(timeline: Timeline, most: int = MOST_POINTS) -> Timeline:
    """At most ``most`` events: of each bin the one with the highest total, so that no peak is lost."""
    n = timeline.live.shape[1]
    if n <= most:
        return timeline
    totals = timeline.live.sum(axis=0)
    edges = np.linspace(0, n, most + 1).astype(int)
    keep = np.array([a + int(np.argmax(totals[a:b])) for a, b in zip(edges, edges[1:]) if b > a])
    return Timeline(timeline.owners, timeline.events[keep], timeline.live[:, keep], timeline.marks)


def _panel(axes: Axes, timeline: Timeline, unit: float, title: str) -> None:
    order = [o for o in style.AREAS if o in timeline.owners] + [o for o in timeline.owners if o not in style.AREAS]
    rows = [timeline.live[timeline.owners.index(o)] / unit for o in order]
    share = 100 * (timeline.events - timeline.events[0]) / max(timeline.events[-1] - timeline.events[0], 1)
    colours = [style.AREAS.get(o, style.AREAS["other"]) for o in order]
    axes.stackplot(
        share, rows, labels=[NAMES.get(o, o.replace("_", " ")) for o in order], colors=colours, step="post", linewidth=0
    )
    axes.plot(share, np.sum(rows, axis=0), color="black", linewidth=0.8, drawstyle="steps-post")
    first, span = timeline.events[0], max(timeline.events[-1] - timeline.events[0], 1)
    for event, _ in timeline.marks:
        axes.axvline(100 * (event - first) / span, color="#555555", linewidth=0.7, linestyle=(0, (3, 2)))
    axes.set_title(title)
    axes.set_xlim(0, 100)
    axes.set_xlabel("Events of one step (%)")


def _name_marks(axes: Axes, timeline: Timeline) -> None:
    """Names of the phases under the top edge, each in the middle of its span, where it is wide enough for its name."""
    first, span = timeline.events[0], max(timeline.events[-1] - timeline.events[0], 1)
    starts = [(100 * (event - first) / span, name) for event, name in timeline.marks]
    for (start, name), (end, _) in zip(starts, [*starts[1:], (100.0, "")]):
        if end - start > 3.2 * len(name):
            axes.text(
                (start + end) / 2, 0.99, name, ha="center", va="top", fontsize=7.5, transform=axes.get_xaxis_transform()
            )


def draw(origins: Sequence[Collection], scale: str) -> Drawn:
    """Standard and Sonar-MoE side by side, on one y axis; the first origin that has both timelines."""
    found: dict[str, Timeline] = {}
    record: Record | None = None
    label, methods = None, conf.arms("figure2", scale)["method"]
    for origin in origins:
        for method in methods:
            for r in origin.of("figure2", scale):
                timeline = parse(r.data.get("timeline")) if r.arm.get("method") == method else None
                if timeline and method not in found:
                    found[method], record, label = timeline, r, origin.label
        if found:
            break
    if record is None:
        return Drawn(None, missing=True)
    figure, panels = style.new(len(found), 3.4, sharey=True)
    top = max(t.live.sum(axis=0).max() for t in found.values())
    unit, name = (GB, "GB") if top >= 1e9 else (1e6, "MB")
    for axes, (method, timeline) in zip(panels, found.items()):
        peak = timeline.live.sum(axis=0).max() / unit
        _panel(axes, timeline, unit, f"{display('method', method)}: peak {peak:.1f} {name}")
        axes.set_ylim(0, 1.18 * top / unit)
        _name_marks(axes, timeline)
    panels[0].set_ylabel(f"Live memory ({name})")
    style.outside_legend(figure, panels[0], 3)
    source = "forecast" if record.get("memory.source") == "forecast" else "measured"
    model = display("model", record.arm.get("model"), scale)
    caption = f"Memory over one training step by owner, {model}; {source}; 1 GB = 1e9 bytes."
    backend = display("backend", record.arm.get("backend"))
    setting = f"{model} · {backend} · batch {record.arm.get('batch_size')}"
    return Drawn(figure, caption, label, len(found) < len(methods), setting)


SPEC = FigureSpec("figure2", "Figure 2: memory over one step", "figure2", ("smoke", "forecast", "paper"), draw)
