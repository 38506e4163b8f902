"""Figure 4: step time, its change, and the memory saving against batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from ..axes import display
from ..collection import Arm, Collection, paired_change
from ..metrics import metric
from ..published import paper
from ..tables import TABLES
from ..tables.spec import TableSpec
from . import style
from .base import Drawn, FigureSpec

BASE = "standard_global_clip"


def _series(
    arms: dict[tuple[str, int], Arm], method: str, value: Callable[[Arm, Arm | None], float | None]
) -> tuple[list[int], list[float]]:
    sizes = sorted(size for m, size in arms if m == method)
    found = [(size, value(arms[method, size], arms.get((BASE, size)))) for size in sizes]
    points = [(size, v) for size, v in found if v is not None]
    return [p[0] for p in points], [p[1] for p in points]


def _saving(name: str) -> Callable[[Arm, Arm | None], float | None]:
    def value(arm: Arm, base: Arm | None) -> float | None:
        mine, theirs = arm.value(name).mean, base.value(name).mean if base else None
        return theirs - mine if mine is not None and theirs is not None else None

    return value


def _plot(
    axes: Axes,
    arms: dict[tuple[str, int], Arm],
    method: str,
    value: Callable[[Arm, Arm | None], float | None],
    **kwargs: Any,
) -> None:
    x, y = _series(arms, method, value)
    if x:
        colour, marker = style.look("method", method)
        look = {"color": colour, "marker": marker, "label": display("method", method)}
        axes.plot(x, y, **{**look, **kwargs})


def _printed(axes: Axes, relation: str, metric_name: str) -> None:
    """What section 5.5 prints for Sonar-MoE, as hollow markers."""
    points = [
        (s.arm["batch_size"], s.value)
        for s in paper("sonar").statements
        if s.relation == relation and s.metric == metric_name and s.source == "§5.5" and s.arm["method"] == "sonar"
        and s.against is not None and s.against["method"] == BASE and not isinstance(s.value, list)
    ]  # fmt: skip
    axes.plot(
        *zip(*sorted(points)), linestyle="none", marker="o", markersize=8, markerfacecolor="none",
        markeredgecolor=style.look("method", "sonar")[0], label="Sonar-MoE, printed",
    )  # fmt: skip


def draw(origins: Sequence[Collection], scale: str) -> Drawn:
    """Three panels over batch size; printed points where the scale allows them."""
    spec = TABLES["batch_size"]
    rows = spec.rows(scale) if isinstance(spec, TableSpec) else []
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    for origin in origins:
        arms = {(row["method"], row["batch_size"]): origin.arm(row, scale, "figure4") for row in rows}
        arms = {key: arm for key, arm in arms.items() if arm.ok}
        if len(arms) > 3:
            break
    else:
        return Drawn(None, missing=True)
    time = metric("step_ms")
    has_time = any(a.value(time).mean is not None for a in arms.values())
    figure, panels = style.new(3 if has_time else 1, 2.9, width=style.WIDTH if has_time else 3.6)
    memory = panels[-1]
    for method in dict.fromkeys(row["method"] for row in rows):
        if has_time:
            _plot(panels[0], arms, method, lambda a, b: a.value(time).mean)
            _plot(panels[1], arms, method, lambda a, b: paired_change(a, b, time) if b else None)
        _plot(memory, arms, method, _saving("peak_allocated_gb"))
    _plot(memory, arms, "sonar", _saving("peak_reserved_gb"), linestyle=":", marker="x", label="Sonar-MoE, reserved")
    if scale != "smoke":
        _printed(memory, "saving", "peak_allocated_gb")
        if has_time:
            _printed(panels[1], "change", "step_ms")
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([str(s) for s in sizes])
        axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)
        axes.set_xlabel("Batch size (sequences)")
    if has_time:
        panels[0].set_ylabel("Step time (ms)")
        panels[0].set_ylim(bottom=0)
        panels[1].set_ylabel("Step time against global clip (%)")
    memory.set_ylabel("Peak memory saved (GB)")
    style.outside_legend(figure, memory, 3 if has_time else 2)
    sources = {a.value("peak_allocated_gb").source for a in arms.values()}
    kind = "forecast" if "forecast" in sources else "measured"
    model = display("model", rows[0]["model"], scale)
    caption = f"Step time and memory saving against batch size, {model}; {kind}; allocated unless said."
    setting = f"{model} · {display('backend', rows[0]['backend'])}"
    return Drawn(figure, caption, origin.label, len(arms) < len(rows), setting)


SPEC = FigureSpec(
    "figure4",
    "Figure 4: step time and memory saving against batch size",
    "figure4",
    ("smoke", "forecast", "paper"),
    draw,
)
