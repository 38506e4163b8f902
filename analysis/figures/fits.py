"""Heat map of the fits page: peak memory by method, optimizer and model, with the smallest card that holds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch

from ..axes import display
from ..collection import Collection
from ..conf import cards, smallest
from ..records import Record
from ..tables.coverage import setup
from ..tables.fits import fits_records, peak_gb
from . import style
from .base import Drawn, FigureSpec

# Light to dark by card size (ColorBrewer YlGnBu, safe for colour-blind readers); grey where no listed card is enough.
SHADES = ("#ffffd9", "#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")
TOO_LARGE = "#BDBDBD"


def draw(origins: Sequence[Collection], scale: str) -> Drawn:
    """Rows are optimizer and method, columns models."""
    found: dict[tuple, Record] = {}
    sources: list[str | None] = []
    for origin in origins:  # the user's own forecasts first; of a reference set those that are not among them
        added = {(_row(r), str(r.arm.get("model"))): r for r in fits_records(origin, scale)}
        sources += [origin.label] if added.keys() - found.keys() else []
        found = {**added, **found}
    if not found:
        return Drawn(None, missing=True)
    rows = sorted(dict.fromkeys(row for row, _ in found))
    models = sorted(dict.fromkeys(model for _, model in found))
    listed = cards()
    levels, texts = np.full((len(rows), len(models)), np.nan), {}
    for (row, model), r in found.items():
        place = rows.index(row), models.index(model)
        peak = peak_gb(r) or 0.0
        card = smallest(peak)
        levels[place] = listed.index(card) if card else len(listed)
        texts[place] = f"{peak:.1f} GB\n" + (_short(card.title) if card else "no listed card")
    shades = [SHADES[round(i * (len(SHADES) - 1) / max(len(listed) - 1, 1))] for i in range(len(listed))] + [TOO_LARGE]
    figure, (axes,) = style.new(1, 0.9 + 0.52 * len(rows), width=2.6 + 1.25 * len(models))
    norm = BoundaryNorm(np.arange(len(shades) + 1) - 0.5, len(shades))
    axes.imshow(levels, cmap=ListedColormap(shades), norm=norm, aspect="auto")
    for (i, j), text in texts.items():
        dark = _dark(shades[int(levels[i, j])])
        axes.text(j, i, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axes.set_xticks(range(len(models)), [display("model", m) for m in models])
    axes.set_yticks(range(len(rows)), [f"{display('optimizer', o)}: {what}" for o, what in rows])
    axes.xaxis.tick_top()
    axes.grid(False)
    axes.set_xticks([j - 0.5 for j in range(1, len(models))], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, len(rows))], minor=True)
    axes.grid(True, which="minor", color="white", linewidth=2)
    axes.tick_params(which="minor", length=0)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    if np.isnan(levels).any():
        blank = Patch(facecolor="white", edgecolor="#888888", label="white: no forecast recorded")
        figure.legend(handles=[blank], loc="outside lower left", frameon=False, fontsize=7.5)
    batches = ", ".join(str(b) for b in sorted({r.arm.get("batch_size") or 0 for r in found.values()}))
    caption = "Forecast reserved peak (GB = 1e9 bytes) and the smallest listed card that holds it with a CUDA context."
    return Drawn(
        figure,
        caption,
        " and ".join(label or "your runs" for label in sources) if any(sources) else None,
        setting=f"batch {batches}",
    )


def _row(record: Record) -> tuple[str, str]:
    """(optimizer, method with what differs from the usual set-up)."""
    return str(record.arm.get("optimizer")), setup({**record.arm, "optimizer": "adamw", "batch_size": 2})


def _short(title: str) -> str:
    """A card's title on two lines, without its maker: H100 SXM / (80 GB)."""
    return title.removeprefix("NVIDIA ").replace(" (", "\n(").replace(" Blackwell", "")


def _dark(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


SPEC = FigureSpec("fits_map", "Which card holds what: heat map", "fits", ("forecast",), draw)
