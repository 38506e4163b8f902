"""How every figure looks: print sizes, Okabe–Ito colours (one for a method everywhere), Agg, no global state."""

from __future__ import annotations

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

matplotlib.use("Agg")  # no display is needed

# Okabe and Ito, "Color Universal Design" (2008): distinguishable with any common colour-vision deficiency.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
METHOD_COLOURS = {
    "standard_global_clip": VERMILLION,
    "standard_no_expert_clip": ORANGE,
    "standard_no_clip": PURPLE,
    "optimizer_in_backward": GREEN,
    "sonar": BLUE,
    "sonar_per_expert": SKY,
}
METHOD_MARKERS = {
    "standard_global_clip": "o",
    "standard_no_expert_clip": "s",
    "standard_no_clip": "v",
    "optimizer_in_backward": "D",
    "sonar": "^",
    "sonar_per_expert": "P",
}
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
CYCLE = (BLACK, VERMILLION, BLUE, GREEN, ORANGE, PURPLE, SKY, "#666666")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

WIDTH = 7.0  # inches: a text block of two columns; 3.4 for one
RC = {
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


def new(
    columns: int = 1, height: float = 2.8, width: float = WIDTH, rows: int = 1, **kwargs
) -> tuple[Figure, list[Axes]]:
    """A figure with its axes as a flat list; the style is set by :func:`analysis.figures.render.draw`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs)
    return figure, list(axes.flat)


def outside_legend(figure: Figure, axes: Axes, columns: int, **kwargs) -> None:
    """One legend above all axes, in the order the artists were drawn, each name once."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    figure.legend(
        unique.values(), unique.keys(), loc="outside upper center", ncols=columns, frameon=False, fontsize=8, **kwargs
    )
