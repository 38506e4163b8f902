"""From a spec and records to a laid-out table: values, changes, printed numbers, errors, footnotes, missing arms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sonar_repro.errors import UserError

from ..axes import GROUPS, axis, command, display, matches
from ..collection import Arm, Collection, Value, check_same_data, paired_change, same_device
from ..metrics import MEASURED_SOURCES, Metric, metric
from ..published import STAND_INS, Paper, Row, paper
from ..records import Record
from . import format as fmt
from .spec import Block, Cell, Column, Header, Table, TableSpec

COUNTS = ("differ", "parameters", "total")


@dataclass
class Line:
    """One row while it is built: its axes, its arm for each column, and the printed row beside each."""

    axes: dict[str, Any]
    arms: dict[Column, Arm]
    bases: dict[Column, Arm | None]
    printed: dict[Column, Row | None]
    extra: bool = False


class Builder:
    """Builds one table at one scale from one or more collections."""

    def __init__(self, spec: TableSpec, scale: str, origins: Iterable[Collection]):
        self.spec, self.scale = spec, scale
        self.origins = list(origins)
        self.paper: Paper | None = paper(spec.paper) if spec.paper else None
        self.columns = [c for c in spec.columns if scale in (c.only or metric(c.metric).scales)]
        self.table = Table(spec.name, spec.title, scale)
        self.used: dict[str, Record] = {}

    def build(self) -> Table:
        """The table; ``refused`` holds the line of a comparison that must not be made."""
        try:
            for origin in self.origins:
                self._block(origin)
        except UserError as error:
            self.table.blocks, self.table.raw, self.table.refused = [], [], str(error)
            return self.table
        self._notes()
        return self.table

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _line(self, origin: Collection, axes: dict[str, Any], extra: bool = False) -> Line:
        arms, bases, printed = {}, {}, {}
        for c in self.columns:
            wanted = {**axes, **c.where}
            arms[c] = origin.arm(wanted, self.scale, self.spec.experiment)
            base = {**wanted, **self.spec.baseline}
            bases[c] = origin.arm(base, self.scale, self.spec.experiment) if c.delta and base != wanted else None
            printed[c] = self._printed(wanted)
        return Line(axes, arms, bases, printed, extra)

    def _printed(self, axes: Mapping[str, Any]) -> Row | None:
        if self.paper is None or self.spec.source is None:
            return None
        wanted = dict(axes)
        if self.scale == "smoke":
            wanted["backend"] = STAND_INS.get(wanted.get("backend"), wanted.get("backend"))
        return self.paper.find(self.spec.source, wanted)

    def _extras(self, origin: Collection, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Axes of recorded arms of this experiment that no expected row or column covers."""
        wheres = [c.where for c in self.columns] or [{}]
        covered = [{**row, **where} for row in rows for where in wheres]
        found: dict[tuple, dict[str, Any]] = {}
        for r in origin.of(self.spec.experiment, self.scale):
            if r.arm.get("task", "train") == "train" and not any(matches(r, c) for c in covered):
                axes = {k: axis(r, k) for k in GROUPS if k in r.arm}
                found.setdefault(tuple(axes.items()), axes)
        return list(found.values())

    def _block(self, origin: Collection) -> None:
        rows = self.spec.rows(self.scale)
        lines = [self._line(origin, axes) for axes in rows]
        if origin.label is not None:  # a reference set is not expected to be complete
            lines = [line for line in lines if any(a.by_seed for a in line.arms.values())]
        if self.spec.extras:
            lines += [self._line(origin, axes, extra=True) for axes in self._extras(origin, rows)]
        recorded = [a for line in lines for a in line.arms.values() if a.by_seed]
        if not recorded and (origin.label is not None or (len(self.origins) > 1 and self._others_have())):
            if origin.label is None:
                self.table.commands += command(self.spec.experiment, self.scale, [], [])
                self.table.notes.append("None of your own runs is recorded yet; the reference records are shown.")
            return
        self.table.has_records = self.table.has_records or bool(recorded)
        groups: dict[tuple, list[Line]] = {}
        for line in lines:
            groups.setdefault(self._group(line), []).append(line)
        for key, members in groups.items():
            self._check(members, key)
        title = f"reference: {origin.label}" if origin.label else ("your runs" if len(self.origins) > 1 else None)
        self._layout(Block(title, self._headers()), list(groups.values()), origin)
        if origin.label is None:
            self._missing(lines)

    def _others_have(self) -> bool:
        rows = [{**row, **c.where} for row in self.spec.rows(self.scale) for c in self.columns]
        return any(o.arm(row, self.scale, self.spec.experiment).by_seed for o in self.origins[1:] for row in rows)

    def _group(self, line: Line) -> tuple:
        return tuple(line.axes.get(k) for k in self.spec.group)

    def _check(self, members: list[Line], key: tuple) -> None:
        if not any(c.delta for c in self.columns):
            return
        arms = {id(a): a for line in members for c in self.columns for a in (line.arms[c], line.bases[c]) if c.delta and a is not None}
        named = ", ".join(display(k, v, self.scale) for k, v in zip(self.spec.group, key) if v is not None)
        check_same_data(arms.values(), f"{self.spec.title.split(':')[0]} ({named})" if named else self.spec.title)

    # -- cells ---------------------------------------------------------------------------------------------------------

    def _stands_beside(self, m: Metric, c: Column) -> bool:
        """Whether an absolute printed value may stand beside ours at this scale."""
        return bool(self.paper and self.spec.source and c.published and self.scale in m.comparable)

    def _headers(self) -> list[Header]:
        headers = [Header(text) for _, text in self.spec.labels]
        for c in self.columns:
            m = metric(c.metric)
            group = (c.header or m.heading) + (" (Δ)" if c.delta else "")
            headers.append(Header(group, "", c.panel, "ours"))
            if self._stands_beside(m, c):
                headers.append(Header(group, "paper (Δ)" if c.delta else "paper", c.panel, "published"))
                if c.error and not c.status:
                    headers.append(Header(group, "error", c.panel, "error"))
            elif c.delta and c.published and self.paper and self.spec.source:
                headers.append(Header(group, "paper Δ", c.panel, "published"))
        return headers

    def _layout(self, block: Block, groups: list[list[Line]], origin: Collection) -> None:
        decimals = {c: self._decimals(c, groups) for c in self.columns}
        for members in groups:
            block.groups.append(len(block.rows))
            lowest = {c: self._lowest(c, members, decimals[c]) for c in self.columns if c.bold}
            for line in members:
                cells = self._labels(line)
                raw: dict[str, Any] = {"table": self.spec.name, "scale": self.scale, "origin": origin.label or "own", **line.axes}
                for c in self.columns:
                    cells += self._cells(c, line, decimals[c], lowest.get(c), raw)
                block.rows.append(cells)
                self.table.raw.append(raw)
        if self.spec.remarks:
            lines = [line for members in groups for line in members]
            found = self.spec.remarks(Remarks(self, lines, origin))
            self.table.notes += [f"{block.title}: {n}" if block.title else n for n in found]
        self.table.blocks.append(self._without_empty(block))

    def _without_empty(self, block: Block) -> Block:
        """Drop metrics that no row has, ours or printed, and say why once."""
        keep, i = [], 0
        while i < len(block.headers):
            end = next((j for j in range(i + 1, len(block.headers)) if block.headers[j].kind in ("ours", "label")), len(block.headers))
            cells = [row[j] for row in block.rows for j in range(i, end)]
            if block.headers[i].kind == "label" or any(c.text != fmt.DASH for c in cells) or len(block.headers) == end - i:
                keep += range(i, end)
            else:
                why = "; ".join(dict.fromkeys(self.table.footnotes[n - 1] for c in cells for n in c.marks))
                self.table.notes.append(f"{block.headers[i].group}: no row has it{f' ({why})' if why else ''}.")
            i = end
        block.headers = [block.headers[j] for j in keep]
        block.rows = [[row[j] for j in keep] for row in block.rows]
        return block

    def _decimals(self, c: Column, groups: list[list[Line]]) -> int:
        m = metric(c.metric)
        if m.unit not in ("GB", "ms"):
            return m.decimals
        return fmt.decimals_for([line.arms[c].value(m).mean for members in groups for line in members], m.decimals)

    def _lowest(self, c: Column, members: list[Line], decimals: int) -> str | None:
        values = [line.arms[c].value(c.metric).mean for line in members]
        known = [v for v in values if v is not None]
        return fmt.fixed(min(known), decimals) if len(known) > 1 else None

    def _labels(self, line: Line) -> list[Cell]:
        cells = []
        for name, _ in self.spec.labels:
            value = line.axes.get(name)
            text = self.spec.names.get(name, {}).get(value) or display(name, value, self.scale)
            cells.append(Cell(text, kind="label"))
        if line.extra:
            shown = {name for name, _ in self.spec.labels}
            first = self.spec.rows(self.scale)[0]
            odd = [f"{k}={line.axes[k]}" for k in line.axes if k not in shown and k in first and line.axes[k] != first[k]]
            if odd:
                cells[-1].text += f" [{', '.join(odd)}]"
        return cells

    def _cells(self, c: Column, line: Line, decimals: int, lowest: str | None, raw: dict[str, Any]) -> list[Cell]:
        m, arm = metric(c.metric), line.arms[c]
        if any(line.axes.get(k) not in (v if isinstance(v, tuple) else (v,)) for k, v in c.applies.items()):
            return [Cell()] * (1 + sum(h.kind != "ours" for h in self._unfolded(c)))
        for r in arm.records:
            self.used[r.name] = r
        name = f"{c.metric}" + "".join(f"[{k}={v}]" for k, v in c.where.items())
        if c.status:
            return self._status_cells(c, m, line, name, raw)
        value, base = arm.value(m), line.bases[c]
        change = self._change(m, arm, base) if base else None
        ours = self._value_cell(m, arm, value, change, decimals)
        if arm.status not in ("ok", "missing"):
            ours.kind = "status"
        ours.bold = bool(lowest) and value.mean is not None and fmt.fixed(value.mean, decimals) == lowest
        printed = line.printed[c]
        there = printed.values.get(c.metric) if printed else None
        raw |= {name: value.mean, f"{name}.spread": value.spread, f"{name}.n": value.n, f"{name}.source": value.source, f"{name}.status": arm.status}
        if c.delta:
            raw[f"{name}.change_pct"] = change
        return [ours, *self._published_cells(c, m, arm, value, printed, there, name, raw)]

    def _value_cell(self, m: Metric, arm: Arm, value: Value, change: float | None, decimals: int) -> Cell:
        if arm.status == "missing":
            return Cell("missing", kind="status")
        if arm.status != "ok":
            worst = next(r for r in arm.records if r.status == arm.status)
            return Cell(arm.status, marks=[self.table.mark(_why(worst))], kind="status")
        counted = m.name.endswith(COUNTS)
        text = fmt.count(value.mean) if counted else fmt.spread(value.mean, value.spread, value.n, decimals)
        if change is not None:
            text += f" ({fmt.percent(change)})"
        marks = [self.table.mark(note) for note in value.notes]
        if m.needs_weights and value.mean is not None and any(r.get("model.weights") == "random" for r in arm.ok):
            marks.append(self.table.mark("Random weights: a check that training works, not a result to hold against a printed one."))
        failed = [r for r in arm.records if r.status != "ok"]
        marks += [self.table.mark(f"Seed {r.seed} is left out: {_why(r)}") for r in failed]
        return Cell(text, marks=marks)

    def _change(self, m: Metric, arm: Arm, base: Arm) -> float | None:
        if m.same_device and arm.ok and base.ok and not same_device(arm, base):
            self.table.mark(f"No change of {m.label.lower()} is shown where the two arms ran on different devices or power limits.")
            return None
        return paired_change(arm, base, m)

    def _published_cells(
        self, c: Column, m: Metric, arm: Arm, value: Value, printed: Row | None, there: float | None, name: str, raw: dict[str, Any]
    ) -> list[Cell]:
        printed_change = printed.changes_pct.get(c.metric) if printed else None
        if not self._stands_beside(m, c):
            if c.delta and c.published and self.paper and self.spec.source:
                raw[f"{name}.published_change_pct"] = printed_change
                return [Cell(fmt.percent(printed_change), kind="published")]
            return []
        random = m.needs_weights and any(r.get("model.weights") == "random" for r in arm.ok)
        raw[f"{name}.published"] = there
        counted = m.name.endswith(COUNTS)
        text = fmt.count(there) if counted else fmt.fixed(there, m.decimals)
        if c.delta and printed_change is not None:
            text += f" ({fmt.percent(printed_change)})"
        cells = [Cell(fmt.DASH if random else text, kind="published")]
        if c.error:
            error = None if random or there is None or value.mean is None else value.mean - there
            if error is not None and m.difference == "percent":
                error = 100.0 * error / there if there else None
            raw[f"{name}.error"] = error
            shown = fmt.percent(error, 2) if m.difference == "percent" else fmt.signed(error, m.decimals)
            cells.append(Cell(shown, kind="error"))
        return cells

    def _status_cells(self, c: Column, m: Metric, line: Line, name: str, raw: dict[str, Any]) -> list[Cell]:
        arm = line.arms[c]
        raw[f"{name}.status"] = arm.status
        text = {"ok": "✓", "oom": "OOM", "missing": "missing"}.get(arm.status, arm.status)
        cell = Cell(text, kind="ours" if arm.status in ("ok", "oom") else "status")
        if arm.status not in ("ok", "missing", "oom"):
            cell.marks.append(self.table.mark(_why(next(r for r in arm.records if r.status == arm.status))))
        if not self._stands_beside(m, c):
            return [cell]
        printed = line.printed[c].status if line.printed[c] else None
        raw[f"{name}.published"] = printed
        return [cell, Cell({"ok": "✓", "oom": "OOM", None: fmt.DASH}[printed], kind="published")]

    # -- words under the table -----------------------------------------------------------------------------------------

    def _missing(self, lines: list[Line]) -> None:
        missing = [{**line.axes, **c.where} for line in lines for c in self.columns if line.arms[c].status == "missing"]
        unique = list({tuple(sorted(a.items(), key=str)): a for a in missing}.values())
        if unique:
            whole = all(a.status == "missing" for line in lines for a in line.arms.values())
            grid = [{**row, **c.where} for row in self.spec.rows(self.scale) for c in self.columns]
            self.table.commands += command(self.spec.experiment, self.scale, [] if whole else unique, grid)

    def _notes(self) -> None:
        notes, records = self.table.notes, [r for r in self.used.values() if r.status == "ok"]
        notes[:0] = [*self._source_notes(records), *self.spec.notes]
        if any(len({r.seed for r in arm.ok}) > 1 for arm in self._all_arms()):
            notes.append("Several seeds: mean ± sample standard deviation (number of seeds).")
        notes += version_notes(records)

    def _all_arms(self) -> list[Arm]:
        return [a for o in self.origins for a in o._cache.values() if a.by_seed and any(r.name in self.used for r in a.records)]

    def _source_notes(self, records: list[Record]) -> list[str]:
        units = {metric(c.metric).unit for c in self.columns}
        notes = ["GB = 1e9 bytes."] if "GB" in units else []
        memory = sorted({MEASURED_SOURCES.get(s, s) for s in (r.get("memory.source") for r in records) if s})
        time = sorted({MEASURED_SOURCES.get(s, s) for s in (r.get("time.source") for r in records) if s})
        parts = [f"memory {' and '.join(memory)}"] if memory and "GB" in units else []
        parts += [f"time {' and '.join(time)}"] if time and "ms" in units else []
        printed = f"columns marked paper are published ({self.paper.title}, {self.spec.source})" if self.paper and self.spec.source else None
        parts += [printed] if printed else []
        if parts:
            notes.append("Sources: " + "; ".join(parts) + ".")
        if self.scale == "smoke" and self.paper and self.spec.source and any(c.delta for c in self.columns):
            notes.append(
                "Smoke scale: tiny random models, so absolute values do not stand beside the paper's; its printed changes do,"
                " those of SonicMoE beside grouped_mm."
            )
        lengths = sorted({int(n) for r in records if (n := r.number("data.max_length"))})
        if lengths:
            notes.append(f"Sequences are capped at {' or '.join(map(str, lengths))} tokens.")
        names = sorted({n for r in records if (n := r.get("data.name"))})
        if names:
            notes.append(f"Data: {', '.join(names)}.")
        return notes


@dataclass
class Remarks:
    """What a spec's remarks function sees: the lines of one block, their values, and the printed statements."""

    builder: Builder
    lines: list[Line]
    origin: Collection

    def value(self, axes: Mapping[str, Any], name: str) -> float | None:
        """Mean of a metric for other axes of the same origin and scale."""
        return self.origin.arm(axes, self.builder.scale, self.builder.spec.experiment).value(name).mean

    @property
    def paper(self) -> Paper:
        return self.builder.paper

    @property
    def scale(self) -> str:
        return self.builder.scale


def _why(record: Record) -> str:
    """One line on why a record is not ok: status, phase and message of its error."""
    message = str(record.get("error.message") or record.get("error.type") or "no reason recorded").strip().splitlines()[0]
    phase = record.get("error.phase")
    return f"{record.status}{f' in {phase}' if phase else ''}: {message}"


def version_notes(records: Iterable[Record]) -> list[str]:
    """One sentence when the records come from different code, torch or transformers versions, or from a dirty tree."""
    records = list(records)
    notes = []
    for key, title in (("package_version", "package version"), ("git_commit", "commit"), ("torch", "torch"), ("transformers", "transformers")):
        by_value: dict[Any, int] = {}
        for r in records:
            value = r.get(f"environment.{key}")
            by_value[value] = by_value.get(value, 0) + 1
        if len(by_value) > 1:
            listed = ", ".join(f"{str(v)[:12] if v else 'not recorded'} ({n} records)" for v, n in sorted(by_value.items(), key=str))
            notes.append(f"The rows come from more than one {title}: {listed}.")
    return notes


def build(spec: TableSpec, scale: str, origins: Iterable[Collection]) -> Table:
    """Build one table at one scale; see :class:`Builder`."""
    return Builder(spec, scale, origins).build()
