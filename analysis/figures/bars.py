"""Figure 3: kernel time of one step by kind, one bar a method, and what the paper prints."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from ..axes import display
from ..collection import Arm, Collection
from ..metrics import metric
from ..tables import TABLES
from ..tables.spec import TableSpec
from . import style
from .base import Drawn, FigureSpec

NAMES = {
    "forward_backward_ms": "Forward + backward",
    "clipping_ms": "Clipping",
    "optimizer_ms": "AdamW",
    "idle_ms": "Idle",
}


def _bars(axes: Axes, arms: list[tuple[str, Arm]], model: str, scale: str) -> None:
    longest = max(sum(a.value(k).mean or 0 for k in NAMES) for _, a in arms)
    for y, (_, arm) in enumerate(arms):
        left = 0.0
        for kind, name in NAMES.items():
            value = arm.value(kind).mean or 0.0
            axes.barh(
                y,
                value,
                left=left,
                color=style.KINDS[kind],
                edgecolor="#555555",
                linewidth=0.5,
                label=name,
                height=0.68,
            )
            if value > 0.09 * longest:
                axes.text(left + value / 2, y, f"{value:.1f}", ha="center", va="center", fontsize=7.5)
            left += value
        axes.text(left + 0.015 * longest, y, f"{left:.1f}", ha="left", va="center", fontsize=7.5, fontweight="bold")
    axes.set_yticks(range(len(arms)), [display("method", m, short=True) for m, _ in arms])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * longest)
    axes.grid(False, axis="y")
    axes.set_title(display("model", model, scale))
    axes.set_xlabel("Time of one step (ms)")


def draw(origins: Sequence[Collection], scale: str) -> Drawn:
    """One panel a model, one bar a method; total at the end of each bar."""
    spec = TABLES["kernel_time"]
    rows = spec.rows(scale) if isinstance(spec, TableSpec) else []
    for origin in origins:
        models: dict[str, list[tuple[str, Arm]]] = {}
        for axes in rows:
            arm = origin.arm(axes, scale, "figure3")
            if arm.value("forward_backward_ms").mean is not None:
                models.setdefault(axes["model"], []).append((axes["method"], arm))
        if models:
            break
    else:
        return Drawn(None, missing=True)
    figure, panels = style.new(len(models), 2.5)
    for panel, (model, bars) in zip(panels, models.items()):
        _bars(panel, bars, model, scale)
    style.outside_legend(figure, panels[0], 5)
    arms = [a for found in models.values() for _, a in found]
    sources = {a.value(metric("forward_backward_ms")).source or "measured" for a in arms}
    return Drawn(
        figure,
        f"Kernel time of one step by kind; {' and '.join(sorted(sources))}.",
        origin.label,
        missing=len(arms) < len(rows),
        setting=f"{display('backend', rows[0]['backend'])} · batch {rows[0]['batch_size']}",
    )


SPEC = FigureSpec(
    "figure3", "Figure 3: kernel time by kind", "figure3", ("smoke", "forecast", "paper"), draw, ("table1",)
)
