"""The cells of one column in one row: ours, the printed value or change beside it, and the error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .. import format as fmt
from ..collection import Arm, Value, is_further, paired_change, same_device
from ..metrics import Metric, metric
from ..published import Paper, Row
from ..records import Record
from .spec import Cell, Column, Header

COUNTED = ("differ", "parameters", "total")
TINY = "A tiny model: not a loss to hold against a printed one."
RANDOM = "Random weights: a check that training works, not a result to hold against a printed one."
TICKS = {"ok": "✓", "oom": "OOM"}


@dataclass(frozen=True)
class Setting:
    """What decides which printed numbers may stand beside ours: scale, paper, whether it trains from scratch."""

    scale: str
    paper: Paper | None
    from_scratch: bool = False


@dataclass(frozen=True)
class Style:
    """How a column's values are printed: decimals, the lowest value's text (bold), the change to put in brackets."""

    decimals: int
    lowest: str | None = None
    delta: float | None = None
    margin: float | None = None  # relative error of the forecast, within which a cap is borderline


@dataclass
class Line:
    """One row while it is built: its axes, its arm and baseline for each column, and the printed row beside each."""

    axes: dict[str, Any]
    arms: dict[Column, Arm]
    bases: dict[Column, Arm | None]
    printed: dict[Column, Row | None]
    printed_bases: dict[Column, Row | None]
    extra: bool = False
    further: str | None = None  # arm id, if it was run with overrides beyond the axes
    suffix: str = ""  # what tells the row from another with the same labels

    def printed_change(self, c: Column) -> float | None:
        """The paper's change in percent: printed, else computed from its printed values."""
        row, base = self.printed[c], self.printed_bases[c]
        if row is None or not c.delta:
            return None
        mine, theirs = row.values.get(c.metric), base.values.get(c.metric) if base else None
        computed = 100.0 * (mine - theirs) / theirs if mine is not None and theirs else None
        return row.changes_pct.get(c.metric, computed)


def why(record: Record) -> str:
    """One line on why a record is not ok: status, phase and message of its error."""
    message = str(record.get("error.message") or record.get("error.type") or "no reason recorded").strip()
    phase = record.get("error.phase")
    return f"{record.state}{f' in {phase}' if phase else ''}: {(message.splitlines() or [''])[0]}"


def published_beside(c: Column, setting: Setting) -> str | None:
    """What the paper may put beside the column at this scale: value, change (smoke: the pattern only) or None."""
    if setting.paper is None or not c.published:
        return None
    if setting.scale in metric(c.metric).comparable:
        return "value"
    return "change" if c.delta else None


def headers(c: Column, setting: Setting) -> list[Header]:
    """Headings of the columns that ``c`` unfolds into; :func:`cells` gives as many cells."""
    group = (c.header or metric(c.metric).heading) + (" (Δ)" if c.delta else "")
    made = [Header(group, "", c.panel, "ours")]
    kind = published_beside(c, setting)
    if kind == "value":
        made.append(Header(group, "paper (Δ)" if c.delta else "paper", c.panel, "published"))
        if c.error and not c.status:
            made.append(Header(group, "error", c.panel, "error"))
    elif kind == "change":
        made.append(Header(group, "paper Δ", c.panel, "published"))
    return made


def _text(m: Metric, value: float | None, decimals: int) -> str:
    return fmt.count(value) if m.name.endswith(COUNTED) else fmt.fixed(value, decimals)


def _is_random(m: Metric, arm: Arm, setting: Setting) -> bool:
    """A value of random weights never stands beside a printed one, unless the paper itself starts from them."""
    if setting.from_scratch and setting.scale == "paper":
        return False
    return m.needs_weights and any(r.get("model.weights") == "random" for r in arm.ok)


def change(m: Metric, arm: Arm, base: Arm | None, reasons: list[str]) -> float | None:
    """Change against the baseline in percent; None, with a reason, where the metric depends on devices that differ."""
    if base is None or not arm.ok or not base.ok or arm.value(m.name).mean is None:
        return None
    if m.same_device and not same_device(arm, base):
        reasons.append("No change is shown: the baseline ran on another device or power limit.")
        return None
    return paired_change(arm, base, m)


def _ours(m: Metric, arm: Arm, value: Value, setting: Setting, style: Style, reasons: list[str], extra: bool) -> Cell:
    if arm.status == "missing":
        return Cell("missing", kind="status")
    if arm.status != "ok":
        first = next(r for r in arm.records if r.status == arm.status)
        return Cell(first.state, kind="status", reasons=[why(first)])
    text = _text(m, value.mean, style.decimals)
    if value.spread:
        text = fmt.spread(value.mean, value.spread, value.n, style.decimals)
    if value.lost and value.n:  # a mean over fewer seeds than were run says so
        text = text.removesuffix(f" ({value.n})") + f" ({value.n} of {value.n + value.lost})"
    if style.delta is not None:
        text += f" ({fmt.percent(style.delta)})"
    reasons = [*value.notes, *reasons]
    if value.mean is not None and _is_random(m, arm, setting):
        reasons.append(TINY if setting.from_scratch else RANDOM)
    if not extra:
        reasons += [f"Run with further overrides: {r.data['arm_id']}." for r in arm.ok if is_further(r)]
    reasons += [f"Seed {r.seed} is left out: {why(r)}" for r in arm.records if r.status != "ok"]
    bold = style.lowest is not None and value.mean is not None and fmt.fixed(value.mean, style.decimals) == style.lowest
    return Cell(text, bold, reasons=reasons)


def _error(m: Metric, value: float | None, there: float | None) -> float | None:
    if value is None or there is None:
        return None
    if m.difference == "percent":
        return 100.0 * (value - there) / there if there else None
    return value - there


def cells(c: Column, line: Line, setting: Setting, style: Style, raw: dict[str, Any]) -> list[Cell]:
    """The cells of column ``c``; plain numbers go into ``raw`` under the metric's name."""
    m, arm, row = metric(c.metric), line.arms[c], line.printed[c]
    if line.extra and not arm.by_seed:
        return [Cell() for _ in headers(c, setting)]
    name = c.metric + "".join(f"[{k}={v}]" for k, v in c.where.items())
    kind = published_beside(c, setting)
    if c.status:
        name = f"runs[{','.join(f'{k}={v}' for k, v in c.where.items())}]"
        near = style.margin is not None and borderline(line, c.where.get("memory_cap_gb"), style.margin)
        return _status(arm, row, kind, name, near, raw)
    value = arm.value(m)
    reasons: list[str] = []
    delta = change(m, arm, line.bases[c], reasons)
    raw |= {name: value.mean, f"{name}.spread": value.spread, f"{name}.n": value.n, f"{name}.source": value.source}
    raw[f"{name}.status"] = arm.status
    if c.delta:
        raw[f"{name}.change_pct"] = delta
    made = [_ours(m, arm, value, setting, replace(style, delta=delta), reasons, line.extra)]
    printed_change = line.printed_change(c)
    if kind == "change":
        raw[f"{name}.published_change_pct"] = printed_change
        made.append(Cell(fmt.percent(printed_change), kind="published"))
    elif kind == "value":
        there = row.values.get(c.metric) if row and not _is_random(m, arm, setting) else None
        text = _text(m, there, m.decimals)
        if c.delta and printed_change is not None:
            text += f" ({fmt.percent(printed_change)})"
        made.append(Cell(text, kind="published"))
        raw[f"{name}.published"] = there
        if c.error:
            error = _error(m, value.mean, there)
            raw[f"{name}.error"] = error
            shown = fmt.percent(error, 2) if m.difference == "percent" else fmt.signed(error, m.decimals)
            made.append(Cell(shown, kind="error"))
    return made


def borderline(line: Line, cap_gb: float | None, margin: float) -> bool:
    """Whether the row's own reserved peak without a cap lies within ``margin`` of the cap."""
    reserved = next((a.value(c.metric).mean for c, a in line.arms.items() if c.metric == "peak_reserved_gb"), None)
    return reserved is not None and cap_gb is not None and abs(reserved - cap_gb) <= margin * cap_gb


def _status(arm: Arm, row: Row | None, kind: str | None, name: str, near: bool, raw: dict[str, Any]) -> list[Cell]:
    raw[name] = arm.status
    near = near and arm.status in TICKS
    raw[f"{name}.borderline"] = near
    state = next((r.state for r in arm.records if r.status == arm.status), arm.status)
    text = TICKS.get(arm.status, state) + (" (borderline)" if near else "")
    cell = Cell(text, kind="ours" if arm.status in TICKS else "status")
    if arm.status not in ("ok", "missing"):
        cell.reasons = [why(next(r for r in arm.records if r.status == arm.status))]
    if kind != "value":
        return [cell]
    raw[f"{name}.published"] = row.status if row else None
    return [cell, Cell(TICKS.get(row.status or "", fmt.DASH) if row else fmt.DASH, kind="published")]


def applies(c: Column, axes: Mapping[str, Any]) -> bool:
    """Whether the column says anything about a row with these axes."""
    return all(axes.get(k) in (v if isinstance(v, tuple) else (v,)) for k, v in c.applies.items())
