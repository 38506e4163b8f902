"""From a spec and records to a laid-out table: rows, groups, changes, footnotes, sources, commands of missing arms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sonar_repro.errors import UserError

from .. import format as fmt
from ..axes import DEFAULTS, GROUPS, axis, command, display
from ..collection import Arm, Collection, check_same_data, is_further
from ..metrics import metric
from ..published import STAND_INS, Paper, Row, paper
from ..records import Record
from . import remarks
from .cells import Line, Setting, Style, applies, cells, headers
from .notes import noise_notes, notes_of
from .spec import Block, Cell, Column, Custom, Header, Table, TableSpec

# Axes of a record that are no column and no label of any table.
UNSHOWN = ("accumulation_mode", "outputs", "data", "parallel", "processes", "gpu")


class Builder:
    """Builds one table at one scale from one or more collections (the user's own first, then reference sets)."""

    def __init__(self, spec: TableSpec, scale: str, origins: Iterable[Collection]):
        self.spec, self.scale = spec, scale
        self.origins = list(origins)
        self.paper: Paper | None = paper(spec.paper) if spec.paper and spec.source else None
        self.columns = spec.columns_at(scale, self.origins)
        self.setting = Setting(scale, self.paper, spec.from_scratch)
        self.grid = [{**row, **c.where} for row in spec.rows(scale) for c in self.columns]
        self.table = Table(spec.name, spec.title, scale)
        self.used: dict[str, Record] = {}
        self.dropped: set[str] = set()  # headings of columns that no row has

    def build(self) -> Table:
        """The table; ``refused`` holds the line of a comparison that must not be made."""
        try:
            for origin in self.origins:
                self._origin(origin)
        except UserError as error:
            self.table.blocks, self.table.raw, self.table.refused = [], [], str(error)
            return self.table
        self.table.number()
        self.table.notes += noise_notes(a for o in self.origins for a in o.chosen(self.used))
        shown = [c for c in self.columns if headers(c, self.setting)[0].group not in self.dropped]
        self.table.notes[:0] = notes_of(self.spec, self.setting, shown, list(self.used.values()))
        return self.table

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _line(self, origin: Collection, axes: dict[str, Any]) -> Line:
        line = Line(axes, {}, {}, {}, {})
        for c in self.columns:
            wanted = {**axes, **c.where}
            base = {**wanted, **self.spec.baseline}
            line.arms[c] = origin.arm(wanted, self.scale, self.spec.experiment)
            line.bases[c] = origin.arm(base, self.scale, self.spec.experiment) if c.delta and base != wanted else None
            line.printed[c] = self._printed(wanted)
            line.printed_bases[c] = self._printed(base) if base != wanted else None
        return line

    def _printed(self, axes: Mapping[str, Any]) -> Row | None:
        if self.paper is None or self.spec.source is None:
            return None
        stand_in = STAND_INS.get(str(axes.get("backend"))) if self.scale == "smoke" else None
        return self.paper.find(self.spec.source, {**axes, "backend": stand_in} if stand_in else axes)

    def _extras(self, origin: Collection, lines: list[Line]) -> list[Line]:
        """Rows for what the experiment recorded beyond the expected cells: other axes, or further overrides."""
        shown = {id(r) for line in lines for a in line.arms.values() for r in (*a.records, *a.repeats)}
        found: dict[tuple, list[Record]] = {}
        for r in origin.of(self.spec.experiment, self.scale):
            if axis(r, "task") == "train" and id(r) not in shown:
                axes = tuple((k, axis(r, k)) for k in GROUPS if k in r.arm)
                further = r.data["arm_id"] if is_further(r) else None
                found.setdefault((axes, tuple(r.arm.get(k) for k in UNSHOWN), further), []).append(r)
        return [self._extra(dict(key[0]), records, key[-1]) for key, records in found.items()]

    def _extra(self, axes: dict[str, Any], records: list[Record], further: str | None) -> Line:
        """A row of records that were not looked up by axes; a column for another arm stays empty."""
        line = Line(axes, {}, {}, {}, {}, extra=True, further=further)
        arm = Arm(axes, {r.seed: r for r in records})
        for c in self.columns:
            line.arms[c] = arm if all(axes.get(k) == v for k, v in c.where.items()) else Arm(axes)
            line.bases[c] = line.printed_bases[c] = line.printed[c] = None
        return line

    def _distinct(self, lines: list[Line], own: bool) -> list[Line]:
        """Rows of which no two have the same labels.

        What repeats a row of an experiment file does not belong to it and is left out; in a table of the user's own
        the axes that differ become part of the label, or the arm's id where none does.
        """
        alike: dict[tuple, list[Line]] = {}
        for line in lines:
            alike.setdefault(tuple(c.text for c in self._labels(line)), []).append(line)
        left_out = []
        for members in (m for m in alike.values() if len(m) > 1):
            arms = [{**line.axes, **_records_axes(line)} for line in members]
            differing = [
                k for k in dict.fromkeys(k for a in arms for k in a) if len({repr(a.get(k)) for a in arms}) > 1
            ]
            for line, axes in zip(members, arms):
                if line.extra and not line.further and not members[0].extra:
                    left_out.append(line)
                elif line.extra:
                    told = [f"{k}={axes.get(k)}" for k in differing]
                    line.suffix = f" [{', '.join(told) if told and not line.further else _id(line)}]"
        if left_out and own:
            ids = ", ".join(dict.fromkeys(map(_id, left_out)))
            self.table.notes.append(f"Not shown, since a row has their axes already: {ids}.")
        return [line for line in lines if line not in left_out]

    def _origin(self, origin: Collection) -> None:
        lines = [self._line(origin, axes) for axes in self.spec.rows(self.scale)]
        if self.spec.extras:
            lines = self._distinct(lines + self._extras(origin, lines), own=origin.label is None)
        recorded = any(a.by_seed for line in lines for a in line.arms.values())
        if origin.label is not None:  # a reference set need not be complete
            lines = [line for line in lines if any(a.by_seed for a in line.arms.values())]
        elif not recorded and any(
            o.arm(w, self.scale, self.spec.experiment).by_seed for o in self.origins[1:] for w in self.grid
        ):
            self.table.commands += command(self.spec.experiment, self.scale, [])
            self.table.notes.append("None of your own runs is recorded yet; the reference records are shown.")
            return
        if not lines:
            return
        self.table.has_records |= recorded
        self._block(origin, lines)
        if origin.label is None:
            self._missing(lines)

    def _block(self, origin: Collection, lines: list[Line]) -> None:
        groups: dict[tuple, list[Line]] = {}
        for line in lines:
            groups.setdefault(tuple(line.axes.get(k) for k in self.spec.group), []).append(line)
        for key, members in groups.items():
            self._check(members, key)
        title = f"reference: {origin.label}" if origin.label else ("your runs" if len(self.origins) > 1 else None)
        unfolded = {c: headers(c, self.setting) for c in self.columns}
        named = [Header(text) for _, text in self.spec.labels]
        block = Block(title, named + [h for made in unfolded.values() for h in made])
        decimals = {c: self._decimals(c, lines) for c in self.columns}
        margin = self._margin(lines)
        for members in groups.values():
            block.groups.append(len(block.rows))
            lowest = {c: self._lowest(c, members, d) if c.bold else None for c, d in decimals.items()}
            styles = {c: Style(d, lowest[c], None, margin) for c, d in decimals.items()}
            for line in members:
                self._row(block, origin, line, unfolded, styles)
        if self.spec.remarks:
            found = getattr(remarks, self.spec.remarks)(Context(self, lines, origin))
            self.table.notes += [f"{block.title}: {n}" if block.title and origin.label else n for n in found]
        self.table.blocks.append(self._without_empty(block))

    def _row(self, block: Block, origin: Collection, line: Line, unfolded: dict, styles: dict) -> None:
        row = self._labels(line)
        raw: dict[str, Any] = {
            "table": self.spec.name,
            "scale": self.scale,
            "origin": origin.label or "own",
            **line.axes,
        }
        for c in self.columns:
            if not applies(c, line.axes):
                row += [Cell() for _ in unfolded[c]]
                continue
            self.used |= {r.name: r for r in line.arms[c].records}
            row += cells(c, line, self.setting, styles[c], raw)
        seen = False  # the state of a row that is not ok is said once
        for cell in row:
            if cell.kind == "status" and len({id(a) for a in line.arms.values()}) == 1:
                cell.text, cell.reasons = (fmt.DASH, []) if seen else (cell.text, cell.reasons)
                seen = True
        block.rows.append(row)
        self.table.raw.append(raw)

    def _check(self, members: list[Line], key: tuple) -> None:
        compared = {
            id(a): a
            for line in members
            for c in self.columns
            if c.delta
            for a in (line.arms[c], line.bases[c])
            if a is not None
        }
        named = ", ".join(display(k, v, self.scale) for k, v in zip(self.spec.group, key) if v is not None)
        check_same_data(compared.values(), self.spec.title.split(":")[0] + (f" ({named})" if named else ""))

    def _decimals(self, c: Column, lines: list[Line]) -> int:
        m = metric(c.metric)
        if m.unit not in ("GB", "ms"):
            return m.decimals
        return fmt.decimals_for([line.arms[c].value(m).mean for line in lines], m.decimals)

    def _margin(self, lines: list[Line]) -> float | None:
        """Relative error of this table's own reserved forecasts, 2% at least; None where nothing is capped."""
        if self.scale != "forecast" or not any(c.status for c in self.columns):
            return None
        errors = [0.02]
        for line in lines:
            for c in self.columns:
                ours, row = line.arms[c].value(c.metric).mean, line.printed[c]
                there = row.values.get(c.metric) if row else None
                if c.metric == "peak_reserved_gb" and not c.status and ours and there:
                    errors.append(abs(ours - there) / there)
        note = (
            f"Borderline: the reserved peak without a cap lies within {100 * max(errors):.1f}% of the cap, the largest"
            " error of this table's reserved forecasts or 2%, whichever is more."
        )
        self.table.notes += [note] if note not in self.table.notes else []
        return max(errors)

    def _lowest(self, c: Column, members: list[Line], decimals: int) -> str | None:
        known = [v for line in members if (v := line.arms[c].value(c.metric).mean) is not None]
        return fmt.fixed(min(known), decimals) if len(known) > 1 else None

    def _labels(self, line: Line) -> list[Cell]:
        made = []
        for name, _ in self.spec.labels:
            value = line.axes.get(name)
            named = self.spec.names.get(name, {})
            made.append(Cell(named[value] if value in named else display(name, value, self.scale), kind="label"))
        if line.extra:
            shown = {name for name, _ in self.spec.labels}
            usual = {**DEFAULTS, **(self.grid[0] if self.grid else {"batch_size": 2})}
            odd = [f"{k}={v}" for k, v in line.axes.items() if k not in shown and v != usual.get(k, v)]
            made[-1].text += f" [{', '.join(odd)}]" if odd else ""
            if line.further:
                made[-1].text += " *"
                made[-1].reasons.append(f"Run with further overrides: {line.further}.")
            made[-1].text += line.suffix
        return made

    def _without_empty(self, block: Block) -> Block:
        """Drop metrics that no row has, ours or printed, and say why once."""
        keep: list[int] = []
        for start, end in block.spans():
            members = [row[i] for row in block.rows for i in range(start, end)]
            if block.headers[start].kind == "label" or any(c.text != fmt.DASH for c in members):
                keep += range(start, end)
                continue
            self.dropped.add(block.headers[start].group)
            why = "; ".join(dict.fromkeys(r for c in members for r in c.reasons))
            name = block.headers[start].group.removesuffix(" (Δ)")
            note = f"{name}: no row has it{f' ({why})' if why else ''}."
            if note not in self.table.notes:
                self.table.notes.append(note)
        block.headers = [block.headers[i] for i in keep]
        block.rows = [[row[i] for i in keep] for row in block.rows]
        return block

    def _missing(self, lines: list[Line]) -> None:
        wanted = [
            {**line.axes, **c.where}
            for line in lines
            for c in self.columns
            if line.arms[c].status == "missing" and applies(c, line.axes)
        ]
        if wanted:
            whole = self.spec.whole or all(a.status == "missing" for line in lines for a in line.arms.values())
            unique = list({tuple(sorted(a.items(), key=str)): a for a in wanted}.values())
            self.table.commands += command(self.spec.experiment, self.scale, [] if whole else unique, self.grid)


def _records_axes(line: Line) -> dict[str, Any]:
    """The axes that no column shows, of the records of one row."""
    record = next((r for a in line.arms.values() for r in a.records), None)
    return {k: record.arm.get(k) for k in UNSHOWN} if record else {}


def _id(line: Line) -> str:
    return next((r.data["arm_id"] for a in line.arms.values() for r in a.records), "")


@dataclass
class Context:
    """What a spec's remarks function sees: the lines of one block, further values of its origin, and the paper."""

    builder: Builder
    lines: list[Line]
    origin: Collection

    def value(self, axes: Mapping[str, Any], name: str) -> float | None:
        """Mean of a metric for other axes of the same origin and scale."""
        return self.origin.arm(axes, self.builder.scale, self.builder.spec.experiment).value(name).mean

    @property
    def paper(self) -> Paper | None:
        return self.builder.paper

    @property
    def scale(self) -> str:
        return self.builder.scale


def build(spec: TableSpec | Custom, scale: str, origins: Iterable[Collection]) -> Table:
    """Build one table at one scale; a comparison that must not be made ends in ``Table.refused``."""
    if isinstance(spec, TableSpec):
        return Builder(spec, scale, origins).build()
    table = Table(spec.name, spec.title, scale)
    try:
        spec.make(table, scale, list(origins))
    except UserError as error:
        return Table(spec.name, spec.title, scale, refused=str(error))
    table.number()
    return table
