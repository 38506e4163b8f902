"""Figures: drawn from records alone, no text over another or outside, one colour a method, equal input equal bytes."""

import itertools
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from analysis_helpers import SONAR, G, N, arm, origins
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from synthetic import fill, timeline

from analysis.collection import collections
from analysis.figures import FIGURES, style
from analysis.figures.render import draw, render, render_all
from analysis.figures.timeline import Timeline, parse, thin
from analysis.records import load
from analysis.run import figure_jobs

JOBS = [(name, scale) for name, spec in FIGURES.items() for scale in spec.scales]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    fill(root, seeds=(42, 43))
    return collections(load(root))


def texts(figure: Figure) -> list[tuple[str, object]]:
    """(text, its box in pixels) of everything written that can be seen."""
    renderer, hidden = figure.canvas.get_renderer(), undrawn(figure)
    found = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in hidden]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in found]


def undrawn(figure: Figure) -> set[int]:
    """Labels of ticks beyond the limits of their axis: they exist and are not drawn."""
    hidden = set()
    for axis in (a for axes in figure.axes for a in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                hidden |= {id(tick.label1), id(tick.label2)}
    return hidden


def clashes(figure: Figure) -> list[str]:
    """Pairs of texts whose boxes overlap by more than a pixel, and texts outside the figure."""
    figure.canvas.draw()
    boxes = texts(figure)
    faults = []
    for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2):
        width = min(box_a.x1, box_b.x1) - max(box_a.x0, box_b.x0)
        height = min(box_a.y1, box_b.y1) - max(box_a.y0, box_b.y0)
        if width > 1 and height > 1:
            faults.append(f"{a!r} over {b!r}")
    edge = figure.bbox
    faults += [f"{t!r} outside" for t, b in boxes if b.x0 < -1 or b.y0 < -1 or b.x1 > edge.x1 + 1 or b.y1 > edge.y1 + 1]
    return faults


@pytest.mark.parametrize(("name", "scale"), JOBS)
def test_no_text_overlaps_or_leaves_the_figure_and_axes_have_units(everything, name: str, scale: str):
    drawn = draw(FIGURES[name], everything, scale)
    assert drawn.figure is not None and drawn.caption.endswith(".")
    assert clashes(drawn.figure) == []
    sizes = [t.get_fontsize() for t in drawn.figure.findobj(Text) if t.get_text().strip() and t.get_visible()]
    assert min(sizes) >= 7, "legible in print"
    if name != "fits_map":
        for axes in drawn.figure.axes:
            assert axes.get_xlabel()
        assert drawn.figure.axes[0].get_ylabel() or name == "figure3", "Figure 3 has a method at each bar"


def test_the_overlap_check_itself_finds_overlaps():
    figure = Figure(figsize=(3, 2))
    FigureCanvasAgg(figure)
    figure.text(0.5, 0.5, "one text")
    figure.text(0.52, 0.51, "another")
    figure.text(0.98, 0.1, "too far right")
    assert len(clashes(figure)) == 2


def test_a_method_has_the_same_colour_in_every_figure(everything):
    seen: dict[str, set[str]] = {}
    for name in ("figure4", "host_speed"):
        for axes in draw(FIGURES[name], everything, "forecast").figure.axes:
            for line in axes.get_lines():
                label = line.get_label()
                seen.setdefault(label, set()).add(to_hex(line.get_color()).upper())
    assert seen["Sonar-MoE"] == {style.look("method", SONAR)[0]}
    assert seen["Standard (no expert clip)"] == {style.look("method", N)[0]}
    for axis in style.FIRST:  # whatever conf/ adds: no two look alike
        assert len({style.look(axis, value) for value in style.order(axis)}) == len(style.order(axis))


def test_figure4_plots_the_records_numbers(tmp_path: Path):
    made = []
    for size, saved in ((2, 12e9), (8, 9e9), (32, 0)):
        for method in (G, N, SONAR):
            one = arm("forecast", "figure4", method=method, batch_size=size)
            peak = 60_000_000_000 - (int(saved) if method == SONAR else 0)
            one["memory"]["measured"] = {"peak_allocated_bytes": peak, "peak_reserved_bytes": None}
            made.append(one)
    figure = draw(FIGURES["figure4"], origins(tmp_path, made), "forecast").figure
    line = next(x for x in figure.axes[-1].get_lines() if x.get_label() == "Sonar-MoE")
    assert list(line.get_xdata()) == [2, 8, 32] and list(line.get_ydata()) == [12.0, 9.0, 0.0]
    printed = next(x for x in figure.axes[-1].get_lines() if x.get_label() == "Sonar-MoE, printed")
    assert dict(zip(printed.get_xdata(), printed.get_ydata())) == {2: 12.0, 8: 9.4, 16: 5.2, 32: 0.0}


def test_printed_points_are_left_out_at_smoke_scale(everything):
    figure = draw(FIGURES["figure4"], everything, "smoke").figure
    assert not [x for axes in figure.axes for x in axes.get_lines() if "printed" in str(x.get_label())]


# -- timelines ---------------------------------------------------------------------------------------------------------


def test_both_forms_of_a_timeline_are_read_alike():
    made = timeline("sonar", 4, 1_000_000, 2_000_000)
    regions = ["forward"] * 16 + ["backward"] * 16 + ["optimizer"] * (len(made["events"]) - 32)
    by_owner = {
        "step": "2",
        "position": made["events"],
        "region": regions,
        "bytes": {o: [row[i] for row in made["bytes"]] for i, o in enumerate(made["owners"])},
    }
    one, other = parse(made), parse(by_owner)
    assert one.owners == other.owners and np.array_equal(one.live, other.live)
    assert one.marks == other.marks == [(0.0, "forward"), (16.0, "backward"), (32.0, "optimizer")]
    turned = {**made, "bytes": [list(column) for column in zip(*made["bytes"])]}
    assert np.array_equal(parse(turned).live, one.live)


def test_an_optimizer_call_inside_backward_is_no_phase():
    regions = ["forward", "backward", "optimizer", "backward", "optimizer", "optimizer"]
    data = {"position": list(range(6)), "region": regions, "bytes": {"weights": [1] * 6}}
    assert parse(data).marks == [(0.0, "forward"), (1.0, "backward"), (4.0, "optimizer")]


@pytest.mark.parametrize(
    "data", [None, {}, [], {"owners": []}, {"owners": ["a"], "bytes": [[1, 2], [3]]}, {"bytes": {"a": [1]}}]
)
def test_a_timeline_that_cannot_be_read_is_not_drawn(data):
    assert parse(data) is None


def test_thinning_keeps_every_peak():
    rng = np.random.default_rng(0)
    live = rng.random((3, 50_000))
    live[:, 31_415] = 10
    thinned = thin(Timeline(list("abc"), np.arange(50_000.0), live, []), 500)
    assert thinned.live.shape[1] <= 500 and thinned.live.sum(axis=0).max() == 30
    assert (np.diff(thinned.events) > 0).all()


def test_sonar_holds_at_most_one_layer_of_expert_gradients_in_figure2(tmp_path: Path):
    found = origins(tmp_path, [arm("forecast", "figure2", method=m) for m in (G, SONAR)])
    figure = draw(FIGURES["figure2"], found, "forecast").figure
    assert [axes.get_title().split(":")[0] for axes in figure.axes] == ["Standard (global clip)", "Sonar-MoE"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


# -- files -------------------------------------------------------------------------------------------------------------


def test_equal_records_give_equal_bytes_and_real_files(everything):
    one, two = (render(FIGURES["figure4"], everything, "forecast", ("png", "pdf", "svg")) for _ in range(2))
    assert one.files == two.files
    assert (
        one.files["png"].startswith(b"\x89PNG") and one.files["pdf"].startswith(b"%PDF") and b"<svg" in one.files["svg"]
    )
    assert b"Type3" not in one.files["pdf"], "publishers refuse Type 3 fonts"


def test_workers_and_one_process_draw_the_same(everything):
    jobs = figure_jobs(everything, "figure4")
    inside = [render(spec, everything, scale, ("svg",)).files for spec, scale in jobs]
    assert [r.files for r in render_all(jobs, everything, ("svg",))] == inside and len(jobs) == 3


@pytest.mark.parametrize("name", FIGURES)
def test_without_records_nothing_is_drawn_and_the_figure_is_missing(name: str):
    drawn = FIGURES[name].draw([], "forecast")
    assert drawn.figure is None and drawn.missing


def test_drawing_needs_no_display_and_leaves_no_global_state(everything):
    before = dict(matplotlib.rcParams)
    draw(FIGURES["figure4"], everything, "forecast")
    assert dict(matplotlib.rcParams) == before and matplotlib.get_backend().lower() == "agg"
