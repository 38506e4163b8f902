"""Draw figures and turn them into files' bytes, two at a time where the system can fork."""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure

from ..collection import Collection
from .base import Drawn, FigureSpec
from .style import RC

# Without dates, so that equal input gives equal bytes.
METADATA = {
    "pdf": {"CreationDate": None, "ModDate": None},
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}
_SHARED: tuple[Sequence[Collection], dict[str, FigureSpec]] | None = None  # what forked workers inherit


@dataclass
class Rendered:
    """One figure at one scale: its bytes by format (empty if it could not be drawn), and what is said under it."""

    name: str
    scale: str
    files: dict[str, bytes]
    caption: str = ""
    label: str | None = None
    missing: bool = False


def draw(spec: FigureSpec, origins: Sequence[Collection], scale: str) -> Drawn:
    """Draw in the house style, whatever matplotlib is set to outside; the image itself says what it is of."""
    with matplotlib.rc_context(RC | {"svg.hashsalt": f"{spec.name}{scale}"}):
        drawn = spec.draw(origins, scale)
        if drawn.figure is not None:
            source = f"reference: {drawn.label}" if drawn.label else ""
            said = " · ".join(part for part in (f"{scale} scale", drawn.setting, source) if part)
            drawn.figure.supxlabel(said, x=0.995, ha="right", fontsize=7, color="#555555")
        return drawn


def encode(figure: Figure, formats: Sequence[str], salt: str = "") -> dict[str, bytes]:
    """The figure's bytes in each format; the layout is worked out once, at the first."""
    files = {}
    with matplotlib.rc_context(RC | {"svg.hashsalt": salt}):
        engine = figure.get_layout_engine()
        if engine is not None:
            engine.execute(figure)
        figure.set_layout_engine("none")
        for kind in formats:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, metadata=METADATA[kind])
            files[kind] = buffer.getvalue()
    return files


def render(spec: FigureSpec, origins: Sequence[Collection], scale: str, formats: Sequence[str]) -> Rendered:
    """Draw and encode one figure."""
    drawn = draw(spec, origins, scale)
    files = encode(drawn.figure, formats, f"{spec.name}{scale}") if drawn.figure is not None else {}
    return Rendered(spec.name, scale, files, drawn.caption, drawn.label, drawn.missing)


def _work(job: tuple[str, str, Sequence[str]]) -> Rendered:
    name, scale, formats = job
    assert _SHARED is not None, "set before the workers are forked"
    origins, specs = _SHARED
    return render(specs[name], origins, scale, formats)


def render_all(
    jobs: Sequence[tuple[FigureSpec, str]], origins: Sequence[Collection], formats: Sequence[str]
) -> list[Rendered]:
    """Render every (figure, scale), in order. Forked workers share the records; without fork it is done in turn."""
    global _SHARED
    workers = min(len(jobs), os.cpu_count() or 1, 4)
    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        return [render(spec, origins, scale, formats) for spec, scale in jobs]
    _SHARED = (origins, {spec.name: spec for spec, _ in jobs})
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
            return list(pool.map(_work, [(spec.name, scale, tuple(formats)) for spec, scale in jobs]))
    finally:
        _SHARED = None
