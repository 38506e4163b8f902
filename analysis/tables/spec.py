"""What a table is: a declarative spec in, a laid-out table of text cells out. Builders and renderers meet here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import conf
from .. import format as fmt
from ..axes import product
from ..collection import Collection
from ..metrics import metric

# Axes of a paper's row: those that an experiment does not sweep come first.
ROW_AXES = ("model", "backend", "optimizer", "batch_size", "accumulation", "checkpointing", "memory_cap_gb", "method")


@dataclass(frozen=True, eq=False)  # hashed by identity: two columns of one table are never the same
class Column:
    """One metric as a column; it unfolds into ours, the printed value and the error where the scale allows it.

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

    ``labels`` are the axes that name a row; ``group`` are the axes within which changes and bold lowest values are
    taken; ``baseline`` is what the change is against. ``remarks`` names a function that computes sentences below it.
    """

    name: str
    title: str
    experiment: str
    labels: tuple[tuple[str, str], ...]
    columns: tuple[Column, ...]
    axes: tuple[str, ...] = ()  # that make a row; empty: ROW_AXES
    paper: str | None = "sonar"
    source: str | None = None  # "Table 1"
    group: tuple[str, ...] = ("model", "backend")
    baseline: Mapping[str, Any] = field(default_factory=dict)
    scales: tuple[str, ...] = conf.SCALES
    extras: bool = True  # arms of the experiment outside the grid get rows too
    notes: tuple[str, ...] = ()
    remarks: str | None = None
    names: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)  # printed axis values of this table
    whole: bool = False  # missing arms are made by the whole experiment (its sweep is over something else than axes)
    from_scratch: bool = False  # the paper itself trains from random weights: at paper scale ours may stand beside it
    recorded: str | None = None  # a section whose entries are the columns at other scales than paper

    @property
    def experiments(self) -> tuple[str, ...]:
        return (self.experiment,)

    def rows(self, scale: str) -> list[dict[str, Any]]:
        """The expected arms: what the experiment file sweeps at this scale, in the order of the labels."""
        if not conf.experiment(self.experiment):
            return []
        values = conf.arms(self.experiment, scale)
        elsewhere = set.intersection(*(set(c.where) for c in self.columns)) if self.columns else set()
        labels = [name for name, _ in self.labels]
        taken = {a: values[a] if a in labels else values[a][:1] for a in self.axes or ROW_AXES if a not in elsewhere}
        if not self.axes:
            order = sorted(taken, key=lambda a: (len(taken[a]) > 1, labels.index(a) if len(taken[a]) > 1 else 0))
            taken = {a: taken[a] for a in order}
        return product(taken)

    def columns_at(self, scale: str, origins: Iterable[Collection]) -> list[Column]:
        """The columns at one scale: those declared, or one for each entry of a section that was recorded."""
        if self.recorded and scale != "paper":
            found = [r.get(self.recorded, {}) for o in origins for r in o.of(self.experiment, scale)]
            names = list(dict.fromkeys(name for entries in found for name in entries)) or ["local"]
            return [Column(f"downstream:{name}", published=False) for name in names]
        return [c for c in self.columns if scale in (c.only or metric(c.metric).scales)]


@dataclass(frozen=True)
class Custom:
    """A table with rows of its own: ``make(table, scale, collections)`` fills the given empty table."""

    name: str
    title: str
    experiments: tuple[str, ...]  # those whose records it reads; it is built at the scales that they have
    scales: tuple[str, ...]
    make: Callable[[Table, str, list[Collection]], None]

    @property
    def experiment(self) -> str:
        return self.experiments[0]


@dataclass
class Cell:
    """Text of one cell, in plain Unicode; renderers escape and decorate it.

    ``reasons`` are what must be said about it; ``Table.number`` turns them into ``marks``, the numbers of footnotes.
    """

    text: str = fmt.DASH
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

    def members(self) -> list[range]:
        """Row indices of each group; a block without groups is one."""
        starts = self.groups or [0]
        return [range(a, b) for a, b in zip(starts, [*starts[1:], len(self.rows)])]

    def headings(self) -> list[int]:
        """Label columns that are the same within every group of rows: renderers make them headings of the groups."""
        groups = self.members()
        if len(groups) < 2 or all(len(g) == 1 for g in groups):
            return []
        labels = [i for i, h in enumerate(self.headers) if h.kind == "label"]
        return [i for i in labels[:-1] if all(len({self.rows[n][i].text for n in g}) == 1 for g in groups)]

    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of each metric's columns: ours and what stands beside it; a label column is alone."""
        starts = [i for i, h in enumerate(self.headers) if h.kind in ("ours", "label")]
        return list(zip(starts, [*starts[1:], len(self.headers)]))


@dataclass
class Table:
    """A table ready to print. ``raw`` has plain numbers, a dict per row, for CSV; ``commands`` make what is missing."""

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

    def add(
        self, title: str | None, fields: Sequence[Field], rows: Sequence[dict[str, Any]], group: Sequence[str] = ()
    ) -> Block:
        """Lay out rows of plain values as a block, and keep them for CSV. A new group starts where ``group`` changes.

        A row's ``"cells"`` are cells made by hand, by key; a key that begins with ``_`` is shown and not kept.
        """
        block = Block(title, [Header(f.heading, f.sub, f.panel, f.kind) for f in fields])
        last: Any = None
        for row in rows:
            made = row.get("cells", {})
            if (key := [row.get(k) for k in group]) != last:
                block.groups.append(len(block.rows))
                last = key
            block.rows.append([made.get(f.key) or Cell(f.text(row.get(f.key)), kind=f.kind) for f in fields])
            self.raw.append({k: v for k, v in row.items() if k != "cells" and not k.startswith("_")})
        self.blocks.append(block)
        return block


@dataclass(frozen=True)
class Field:
    """How one key of plain rows is shown: its heading and its text (``show``; a dash where there is no value)."""

    key: str
    heading: str
    kind: str = "ours"
    show: Callable[[Any], str] = str
    sub: str = ""
    panel: str = "memory"

    def text(self, value: Any) -> str:
        """The cell's text."""
        return fmt.DASH if value is None else self.show(value)


def labels(**headings: str) -> list[Field]:
    """Label columns by key: an axis is shown by its printed name."""

    def named(axis: str) -> Callable[[Any], str]:
        from ..axes import display

        return lambda value: display(axis, value)

    return [Field(key, heading, "label", named(key), panel="label") for key, heading in headings.items()]


def number(decimals: int) -> Callable[[Any], str]:
    """Shows a number with fixed decimals, a range as low to high."""
    return lambda v: (
        " to ".join(fmt.fixed(x, decimals) for x in v) if isinstance(v, (list, tuple)) else fmt.fixed(v, decimals)
    )


def triple(key: str, name: str, decimals: int, error: Field | None = None, panel: str = "memory") -> list[Field]:
    """Ours, the paper's and the error of one quantity, the error in percent under ``<key>.error_pct``."""
    percent = Field(f"{key}.error_pct", name, "error", lambda v: fmt.percent(v, 2), "error", panel)
    printed = Field(f"{key}.published", name, "published", number(decimals), "paper", panel)
    return [Field(key, name, "ours", number(decimals), "", panel), printed, error or percent]
