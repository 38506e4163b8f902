"""Forecasts held against the paper: the error of each printed peak, and step time over the speed of the host."""

from __future__ import annotations

from collections.abc import Sequence

from .. import conf
from ..axes import display
from ..collection import Collection
from ..published import paper
from ..tables.coverage import rows
from ..tables.forecast_memory import MEMORY_SOURCES, PEAKS
from ..tables.forecast_time import curve
from . import style
from .base import Drawn, FigureSpec

BASE = "standard_global_clip"


def draw_errors(origins: Sequence[Collection], scale: str) -> Drawn:
    """Error in percent of every printed peak that has a forecast, allocated and reserved."""
    pairs = [
        p for p in rows("sonar", scale, list(origins), MEMORY_SOURCES) if p.metric in PEAKS and p.error is not None
    ]
    if not pairs:
        return Drawn(None, missing=True)
    figure, panels = style.new(2, 2.7, sharey=True)
    for axes, name, title, goal in zip(panels, PEAKS, PEAKS.values(), (1.0, 2.0)):
        axes.axhspan(-goal, goal, color="#EEEEEE", zorder=0)
        axes.axhline(0, color="#888888", linewidth=0.8)
        for source, colour, marker in zip(
            MEMORY_SOURCES, (style.BLUE, style.ORANGE, style.VERMILLION, style.GREEN), "o^sD"
        ):
            found = [p for p in pairs if p.metric == name and p.source == source]
            errors = [p.error or 0.0 for p in found]
            axes.plot([p.published for p in found], errors, marker, color=colour, label=source, alpha=0.85)
        axes.set_title(f"{title} (grey: goal of ±{goal:g}%)")
        axes.set_xlabel("Printed peak (GB)")
    panels[0].set_ylabel("Error of the forecast (%)")
    largest = max(abs(p.error or 0.0) for p in pairs)
    panels[0].set_ylim(-max(2.5, 1.2 * largest), max(2.5, 1.2 * largest))
    style.outside_legend(figure, panels[0], 5)
    caption = "Forecast peak memory against every printed peak of Tables 1, 3, 6 and 8; nothing is fitted."
    models = " and ".join(dict.fromkeys(display("model", p.axes["model"]) for p in pairs))
    return Drawn(figure, caption, setting=f"{models} · batch {pairs[0].axes['batch_size']}")


def draw_hosts(origins: Sequence[Collection], scale: str) -> Drawn:
    """Change of step time against global clipping over the host's speed, with the printed changes as dashed lines."""
    backend = conf.arms("table1", scale)["backend"][0]
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for origin in origins:
        found = {}
        for r in origin.of("table1", scale):
            points = curve(r) if r.arm.get("backend") == backend else []
            if points:
                found.setdefault(str(r.arm.get("model")), {})[str(r.arm.get("method"))] = points
        found = {m: c for m, c in found.items() if BASE in c and len(c) > 1}
        if found:
            break
    else:
        return Drawn(None, missing=True)
    figure, panels = style.new(len(found), 3.0, width=style.WIDTH if len(found) > 1 else 4.2)
    for axes, (model, methods) in zip(panels, found.items()):
        base = dict(methods[BASE])
        for method, points in methods.items():
            if method == BASE:
                continue
            line = [(x, 100 * (y - base[x]) / base[x]) for x, y in points if base.get(x)]
            colour, marker = style.look("method", method)
            axes.plot(*zip(*line), color=colour, marker=marker, label=display("method", method))
            row = paper("sonar").find("Table 1", {"model": model, "backend": backend, "method": method})
            if row and "step_ms" in row.changes_pct:
                axes.axhline(row.changes_pct["step_ms"], color=colour, linewidth=1, linestyle=(0, (4, 2)))
        axes.axvline(1, color="#888888", linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"×{x:g}")
        axes.set_title(display("model", model))
        axes.set_xlabel("Host speed (1: the host measured)")
    panels[0].set_ylabel("Step time against global clip (%)")
    panels[0].plot(
        [], [], color="#555555", linewidth=1, linestyle=(0, (4, 2)), label="printed (its colour: the method)"
    )
    style.outside_legend(figure, panels[0], 2)
    caption = "Forecast change of step time over the host's speed; dashed: printed. No host is picked to fit."
    return Drawn(figure, caption, origin.label, setting=display("backend", backend))


ERRORS_SPEC = FigureSpec(
    "forecast_error",
    "Forecast accuracy: error of every printed peak",
    "table1",
    ("forecast",),
    draw_errors,
    ("table3", "table6", "table8"),
)
HOSTS_SPEC = FigureSpec("host_speed", "Forecast step time over the host's speed", "table1", ("forecast",), draw_hosts)
