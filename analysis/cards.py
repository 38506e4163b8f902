"""Graphics cards of ``conf/gpu``: what a run may allocate on each."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Card:
    """A card and its bytes: ``usable_gb`` is its memory less the allowance for the CUDA context (1e9 bytes)."""

    name: str
    title: str
    memory_gb: float
    usable_gb: float


def folder() -> Path:
    """``conf/gpu``, inside the installed package or beside it in a checkout."""
    package = Path(str(resources.files("sonar_repro")))
    inside = package / "conf" / "gpu"
    return inside if inside.is_dir() else package.parent / "conf" / "gpu"


@functools.cache
def cards() -> tuple[Card, ...]:
    """All cards, smallest first; a file without memory is left out."""
    found = []
    for path in sorted(folder().glob("*.yaml")):
        data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        memory = data.get("memory_gb")
        if isinstance(memory, (int, float)) and memory > 0:
            usable = memory - (data.get("context_gb") or 0.0)
            found.append(Card(path.stem, str(data.get("title") or path.stem), float(memory), float(usable)))
    return tuple(sorted(found, key=lambda c: (c.usable_gb, c.name)))


def smallest(peak_gb: float) -> Card | None:
    """The smallest card that holds a reserved peak, or None."""
    return next((card for card in cards() if peak_gb <= card.usable_gb), None)
