"""Figures of MESH: loss curves with seed bands, and the memory–quality frontier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import conf
from ..axes import display
from ..collection import Collection
from ..records import Record
from . import style
from .base import Drawn, FigureSpec

EXPERIMENTS = tuple(e for e in conf.options("experiment") if e.startswith("mesh_table"))


Point = tuple[str, float, float, float | None]  # optimizer, state in GB, mean loss, spread


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Centred running mean; at the ends over what is there."""
    if width <= 1:
        return values
    kernel = np.ones(width)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")


def curves(records: Sequence[Record]) -> np.ndarray | None:
    """Training losses [seeds, steps] of one optimizer, cut to the shortest run; skipped steps are interpolated."""
    rows = []
    for record in records:
        series = record.get("loss.train")
        listed = series if isinstance(series, list) else []
        values = np.array([np.nan if v is None else v for v in listed], dtype=float)
        if np.isfinite(values).sum() > 1:
            steps, known = np.arange(len(values)), np.isfinite(values)
            rows.append(np.interp(steps, steps[known], values[known]))
    return np.array([row[: min(map(len, rows))] for row in rows]) if rows else None


def draw_curves(origins: Sequence[Collection], scale: str) -> Drawn:
    """Mean training loss over the seeds, a band from the lowest to the highest, and the last fifth enlarged."""
    shown = conf.arms("mesh_table1", scale)["optimizer"]
    for origin in origins:
        found = {o: origin.arm({"model": "nanowhale", "optimizer": o}, scale, "mesh_table1").ok for o in shown}
        series = {o: c for o, records in found.items() if (c := curves(records)) is not None}
        if series:
            break
    else:
        return Drawn(None, missing=True)
    figure, panels = style.new(2, 3.0, width=style.WIDTH)
    steps = max(c.shape[1] for c in series.values())
    width = max(1, steps // 40)
    for name, values in series.items():
        colour, _ = style.look("optimizer", name)
        smoothed = np.array([smooth(row, width) for row in values])
        x = np.arange(1, smoothed.shape[1] + 1)
        late = x > 0.8 * steps
        for axes, part in zip(panels, (slice(None), late)):
            axes.plot(x[part], smoothed.mean(axis=0)[part], color=colour, label=display("optimizer", name))
            low, high = smoothed.min(axis=0)[part], smoothed.max(axis=0)[part]
            axes.fill_between(x[part], low, high, color=colour, alpha=0.18, linewidth=0)
    for axes, title in zip(panels, ("Whole run", "Last fifth")):
        axes.set_title(title)
        axes.set_xlabel("Optimizer step")
    panels[0].set_ylabel("Training loss (nats per token)")
    style.outside_legend(figure, panels[0], 4)
    seeds = max(len(c) for c in series.values())
    caption = f"Training loss, mean of up to {seeds} seeds with their range, running mean over {width} steps; measured."
    return Drawn(figure, caption, origin.label, len(series) < len(shown), _setting(scale))


def draw_frontier(origins: Sequence[Collection], scale: str) -> Drawn:
    """Optimizer state plus hidden buffer against evaluation loss, one marker an optimizer, bars for the seeds."""
    expected = {o for e in EXPERIMENTS for o in conf.arms(e, scale)["optimizer"]}
    points: list[Point] = []
    for origin in origins:
        points = _points(origin, scale)
        if len(points) > 1:
            break
    else:
        return Drawn(None, missing=True)
    near = _near(points)
    groups = [points, near] if len(near) < len(points) else [points]
    figure, panels = style.new(len(groups), 3.6, width=6.0 if len(groups) == 1 else 8.6)
    unit, symbol = (1e-3, "MB") if max(p[1] for p in points) < 1 else (1, "GB")
    for axes, group in zip(panels, groups):
        for optimizer, size, loss, spread in group:
            colour, marker = style.look("optimizer", optimizer)
            look: dict[str, Any] = {
                "color": colour,
                "marker": marker,
                "linestyle": "none",
                "alpha": 0.85,
            }
            name = display("optimizer", optimizer)
            axes.errorbar(size / unit, loss, yerr=spread, capsize=3, elinewidth=1, markersize=7, label=name, **look)
        axes.set_xlabel(f"Optimizer state and hidden buffer ({symbol})")
        axes.margins(x=0.08, y=0.12)
    panels[0].set_ylabel("Evaluation loss (nats per token)")
    panels[0].set_xlim(left=0)
    if len(groups) == 2:
        panels[0].set_title("All arms")
        panels[1].set_title("The lowest of them, enlarged")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=7.5, frameon=False)
    caption = "Memory–quality frontier: lower left is better; bars are a standard deviation over seeds; measured."
    return Drawn(figure, caption, origin.label, len(points) < len(expected), _setting(scale))


def _near(points: list[Point]) -> list[Point]:
    """The points in the lowest quarter of the range of losses, if they are more than one; else all."""
    losses = [loss for _, _, loss, _ in points]
    bound = min(losses) + 0.25 * (max(losses) - min(losses))
    near = [point for point in points if point[2] <= bound]
    return near if len(near) > 1 else points


def _setting(scale: str) -> str:
    """Model and batch of the MESH experiments."""
    usual = {axis: values[0] for axis, values in conf.arms("mesh_table1", scale).items()}
    return f"{display('model', usual['model'], scale)} · batch {usual['batch_size']} × {usual['accumulation']}"


def _points(origin: Collection, scale: str) -> list[Point]:
    """(optimizer, state in GB, mean loss, spread) of every optimizer that was recorded."""
    recorded = [str(r.arm.get("optimizer")) for e in EXPERIMENTS for r in origin.of(e, scale)]
    known, points = style.order("optimizer"), []
    for name in sorted(set(recorded), key=lambda n: (known.index(n) if n in known else len(known), str(n))):
        arm = origin.arm({"model": "nanowhale", "optimizer": name}, scale, "mesh_table1")
        loss, state = arm.value("heldout_loss"), arm.value("optimizer_state_gb").mean
        hidden = arm.value("hidden_buffer_gb").mean or 0.0
        if loss.mean is not None and state is not None:
            points.append((name, state + hidden, loss.mean, loss.spread))
    return points


CURVES_SPEC = FigureSpec(
    "mesh_curves", "MESH: training loss by optimizer", "mesh_table1", ("smoke", "paper"), draw_curves
)
FRONTIER_SPEC = FigureSpec(
    "mesh_frontier", "MESH: memory–quality frontier", "mesh_table1", ("smoke", "paper"), draw_frontier, EXPERIMENTS[1:]
)
