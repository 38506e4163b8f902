"""What a figure is: a drawing function over records, registered once, drawn at the scales that have records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from ..collection import Collection


@dataclass
class Drawn:
    """A drawn figure, or none with ``missing`` set.

    ``label`` is the reference set it was drawn from, if not own runs; ``setting`` is written into the image.
    """

    figure: Figure | None
    caption: str = ""
    label: str | None = None
    missing: bool = False
    setting: str = ""  # model, backend, batch: what the image must say of itself


@dataclass(frozen=True)
class FigureSpec:
    """One figure. ``draw(collections, scale)`` returns :class:`Drawn`."""

    name: str
    title: str
    experiment: str
    scales: tuple[str, ...]
    draw: Callable[[Sequence[Collection], str], Drawn]
    experiments: tuple[str, ...] = ()

    def reads(self) -> tuple[str, ...]:
        """Experiments whose records it can show."""
        return (self.experiment, *self.experiments)
