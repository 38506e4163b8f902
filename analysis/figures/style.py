"""How every figure looks: print sizes, Okabe–Ito colours (one for a method everywhere), Agg, no global state."""

from __future__ import annotations

import functools
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .. import conf

# Okabe and Ito, "Color Universal Design" (2008): distinguishable with any common colour-vision deficiency.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
# Paul Tol's "light" scheme for filled areas under black text; kept apart from the methods' colours.
AREAS = {
    "weights": "#DDDDDD",
    "optimizer_state": "#AAAAAA",
    "activations": "#99DDFF",
    "temporaries": "#EEDD88",
    "other_gradients": "#FFAABB",
    "expert_gradients": "#EE8866",
    "other": "#BBCC33",
}
KINDS = {"forward_backward_ms": "#99DDFF", "clipping_ms": "#EE8866", "optimizer_ms": "#44BB99", "idle_ms": "#EEEEEE"}
CYCLE = (VERMILLION, ORANGE, GREEN, BLUE, PURPLE, SKY, BLACK, "#666666")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
FIRST = {"method": "table1", "optimizer": "mesh_table1"}  # whose sweep takes the first colours

WIDTH = 7.0  # inches: a text block of two columns; 3.4 for one
RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # real text in the PDF
    "svg.fonttype": "path",  # looks the same wherever it is opened
}


@functools.cache
def order(axis: str) -> list[str]:
    """Every value of an axis, those of the papers' main tables first: it fixes each one's colour and marker."""
    return list(dict.fromkeys([*conf.arms(FIRST[axis], "paper")[axis], *conf.options(axis)]))


def look(axis: str, value: str) -> tuple[str, str]:
    """(colour, marker) of a method or an optimizer in every figure; beyond eight, colours repeat with other markers."""
    place = order(axis).index(value) if value in order(axis) else len(order(axis))
    return CYCLE[place % len(CYCLE)], MARKERS[(place + place // len(CYCLE)) % len(MARKERS)]


def new(
    columns: int = 1, height: float = 2.8, width: float = WIDTH, rows: int = 1, **kwargs: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with its axes as a flat list; the style is set by :func:`analysis.figures.render.draw`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs)
    return figure, list(axes.flat)


def outside_legend(figure: Figure, axes: Axes, columns: int, **kwargs: Any) -> None:
    """One legend above all axes, in the order the artists were drawn, each name once."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    figure.legend(
        unique.values(), unique.keys(), loc="outside upper center", ncols=columns, frameon=False, fontsize=8, **kwargs
    )
