"""Numbers printed in the papers: data files with their table and arm, and look-ups by axes.

A row of ``published/*.json``: ``source`` (table or section), ``arm`` (axes; the file's ``defaults`` fill the rest),
``values`` by metric name, and optionally ``changes_pct`` (printed changes), ``status`` (a printed out-of-memory). A
statement: a number from the text, with its metric, arm, what it is taken against, and the relation between them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from .metrics import METRICS

FILES = ("sonar", "mesh")
# At smoke scale grouped_mm plays the part of the paper's fast backend: one batched gradient a tensor, as SonicMoE
# makes.
STAND_INS = {"grouped_mm": "sonicmoe"}


@dataclass(frozen=True)
class Row:
    """One printed row. ``axes`` has the paper's defaults filled in; ``stated`` only what the row itself names."""

    source: str
    axes: dict[str, Any]
    stated: dict[str, Any]
    values: dict[str, float]
    changes_pct: dict[str, float] = field(default_factory=dict)
    status: str | None = None


@dataclass(frozen=True)
class Statement:
    """One printed relation between arms. ``relation``: saving (against minus arm), change_pct, difference (arm minus
    against), slope, per_call or value. ``value`` is a number or a (low, high) range."""

    name: str
    source: str
    metric: str
    relation: str
    value: Any
    arm: dict[str, Any]
    against: dict[str, Any] | None
    quote: str


@dataclass(frozen=True)
class Paper:
    """All that one paper prints."""

    name: str
    title: str
    defaults: dict[str, Any]
    rows: tuple[Row, ...]
    statements: tuple[Statement, ...]
    about: dict[str, Any]

    def find(self, source: str, axes: Mapping[str, Any]) -> Row | None:
        """What table ``source`` prints for these axes (all matching rows together); an absent axis is the default."""
        found = [
            row
            for row in self.rows
            if row.source == source and all(axes.get(k, self.defaults.get(k)) == v for k, v in row.axes.items())
        ]
        if len(found) < 2:
            return found[0] if found else None
        values = {k: v for row in found for k, v in row.values.items()}
        changes = {k: v for row in found for k, v in row.changes_pct.items()}
        status = next((row.status for row in found if row.status), None)
        return replace(found[-1], values=values, changes_pct=changes, status=status)

    def statement(self, name: str) -> Statement:
        """The statement of that name; KeyError if the data file has none."""
        found = next((s for s in self.statements if s.name == name), None)
        if found is None:
            raise KeyError(f"published statement {name!r} of {self.name}")
        return found


@functools.cache
def paper(name: str) -> Paper:
    """Read one published file, wherever the package is installed."""
    text = resources.files(__package__).joinpath("published", f"{name}.json").read_text(encoding="utf-8")
    data = json.loads(text)
    defaults = data["defaults"]
    rows = tuple(
        Row(r["source"], {**defaults, **r["arm"]}, r["arm"], r["values"], r.get("changes_pct", {}), r.get("status"))
        for r in data["rows"]
    )
    statements = tuple(
        Statement(
            s["name"], s["source"], s["metric"], s["relation"], s["value"], {**defaults, **s["arm"]},
            {**defaults, **s["against"]} if s.get("against") else None, s["quote"],
        )
        for s in data["statements"]
    )  # fmt: skip
    about = {k: v for k, v in data.items() if k not in ("rows", "statements", "defaults")}
    return Paper(name, data["title"], defaults, rows, statements, about)


def metrics_of(name: str) -> list[str]:
    """Names of the registered metrics that a paper prints."""
    return [m for m in METRICS if any(m in row.values for row in paper(name).rows)]
