"""All figures by name. A new figure is one module with a ``SPEC`` and its line here."""

from __future__ import annotations

import difflib
import os

from sonar_repro.errors import UserError

_BACKEND = os.environ.pop("MPLBACKEND", None)  # a notebook's would be loaded, or refused, at import; we draw with Agg
import matplotlib  # noqa: E402

matplotlib.use("Agg")  # no display is needed
if _BACKEND is not None:
    os.environ["MPLBACKEND"] = _BACKEND  # as it was, for whoever is started next

from . import bars, fits, forecast, lines, mesh, timeline  # noqa: E402
from .base import Drawn, FigureSpec  # noqa: E402

_ALL: tuple[FigureSpec, ...] = (
    timeline.SPEC,
    bars.SPEC,
    lines.SPEC,
    forecast.ERRORS_SPEC,
    forecast.HOSTS_SPEC,
    fits.SPEC,
)
_ALL += (mesh.CURVES_SPEC, mesh.FRONTIER_SPEC)
FIGURES: dict[str, FigureSpec] = {s.name: s for s in _ALL}
__all__ = ["FIGURES", "Drawn", "FigureSpec", "figure"]


def figure(name: str) -> FigureSpec:
    """The spec of that name. Raises UserError with near matches."""
    if name not in FIGURES:
        near = difflib.get_close_matches(name, FIGURES, 3) or list(FIGURES)
        raise UserError(f"--figure {name}: unknown; choose {', '.join(near)}")
    return FIGURES[name]
