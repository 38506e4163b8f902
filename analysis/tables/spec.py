"""What a table is: a declarative spec in, a laid-out table of text cells out. Builders and renderers meet here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)  # hashed by identity: two columns of one table are never the same
class Column:
    """One metric as a column; it unfolds into ours, the printed value and the error where the scale allows a
    comparison.

    ``where`` are axes in which this column's arm differs from the row's (Table 8 has a method a column). ``status``
    makes the column show whether the arm ran, in place of a metric.
    """

    metric: str
    header: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    delta: bool = False
    bold: bool = False
    published: bool = True
    error: bool = True
    status: bool = False
    only: tuple[str, ...] = ()  # scales; empty: those of the metric
    applies: Mapping[str, Any] = field(default_factory=dict)  # rows in which the column says anything; empty: all
    note: str | None = None  # said under the table where the column is shown
    panel: str = "memory"  # columns of a panel stay together when a terminal is too narrow


@dataclass(frozen=True, eq=False)
class TableSpec:
    """A table of a paper or of ours.

    ``rows(scale)`` gives the expected arms; ``labels`` are the axes that name a row; ``group`` are the axes within
    which changes and bold lowest values are taken; ``baseline`` is what the change is against. ``remarks(block)``
    computes sentences that go under the table.
    """

    name: str
    title: str
    experiment: str
    rows: Callable[[str], list[dict[str, Any]]]
    labels: tuple[tuple[str, str], ...]
    columns: tuple[Column, ...] | Callable[..., tuple[Column, ...]]  # a function of scale and collections, if not fixed
    paper: str | None = "sonar"
    source: str | None = None  # "Table 1"
    group: tuple[str, ...] = ("model", "backend")
    baseline: Mapping[str, Any] = field(default_factory=lambda: {"method": "standard_global_clip"})
    scales: tuple[str, ...] = ("smoke", "forecast", "paper")
    extras: bool = True  # arms of the experiment outside the grid get rows too
    notes: tuple[str, ...] = ()
    remarks: Callable[..., list[str]] | None = None
    names: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)  # printed axis values of this table
    whole: bool = False  # missing arms are made by the whole experiment (its sweep is over something else than axes)
    from_scratch: bool = (
        False  # the paper itself trains from random weights, so at paper scale ours may stand beside it
    )

    @property
    def experiments(self) -> tuple[str, ...]:
        return (self.experiment,)


@dataclass(frozen=True)
class Custom:
    """A table with a builder of its own: ``make(table, scale, collections)`` fills the given empty table."""

    name: str
    title: str
    experiments: tuple[str, ...]  # those whose records it reads; it is built at the scales that they have
    scales: tuple[str, ...]
    make: Callable[..., None]

    @property
    def experiment(self) -> str:
        return self.experiments[0]


@dataclass
class Cell:
    """Text of one cell, in plain Unicode; renderers escape and decorate it.

    ``reasons`` are what must be said about it; ``Table.number`` turns them into ``marks``, the numbers of footnotes.
    """

    text: str = "–"
    bold: bool = False
    kind: str = "ours"  # label | ours | published | error | status
    reasons: list[str] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)


@dataclass
class Header:
    """A column's heading: ``group`` is the metric, ``sub`` tells the printed value and the error from ours."""

    group: str
    sub: str = ""
    panel: str = "label"
    kind: str = "label"  # label | ours | published | error

    @property
    def text(self) -> str:
        """The heading on one line, complete without its neighbours."""
        if not self.sub:
            return self.group
        bare = self.group.removesuffix(" (Δ)")
        return f"{bare.removesuffix(' GB').removesuffix(' ms').removesuffix(' %')}: {self.sub}"


@dataclass
class Block:
    """Rows of one origin: the user's runs, or one reference set."""

    title: str | None
    headers: list[Header]
    rows: list[list[Cell]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)  # indices of rows that start a new group


@dataclass
class Table:
    """A table ready to print. ``raw`` has one dict of plain numbers a row, for CSV; ``commands`` make what is
    missing.
    """

    name: str
    title: str
    scale: str
    blocks: list[Block] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    footnotes: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)
    refused: str | None = None
    has_records: bool = False

    def number(self) -> None:
        """Give each reason that is still in a cell one footnote number, in reading order."""
        for cell in (cell for block in self.blocks for row in block.rows for cell in row):
            for reason in cell.reasons:
                if reason not in self.footnotes:
                    self.footnotes.append(reason)
                cell.marks.append(self.footnotes.index(reason) + 1)
