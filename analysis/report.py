"""One self-contained HTML page: every table and figure, published beside ours, what is missing and how to make it."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from . import format as fmt
from .axes import command, display
from .claims import judged
from .claims.evidence import DISAGREES, FAILS, HOLDS, HOLDS_FORECAST, NOT_MEASURED, STATUSES
from .collection import Collection
from .metrics import metric
from .published import FILES, Test, paper, unit_of
from .records import Record, Runs
from .tables import specs_for
from .tables.cells import why
from .tables.coverage import Pair, coverage, covered_statements
from .tables.spec import Table

if TYPE_CHECKING:
    from .figures.render import Rendered

TAGS = {
    HOLDS: "holds",
    HOLDS_FORECAST: "by-forecast",
    DISAGREES: "against-forecast",
    FAILS: "fails",
    NOT_MEASURED: "not",
}
ENVIRONMENT = [
    "package_version",
    "git_commit",
    "torch",
    "transformers",
    "python",
    "device_name",
    "driver",
    "power_limit_w",
]
ENVIRONMENT += ["cpu", "threads", "experts_implementation", "deterministic"]


@dataclass
class Item:
    """One table or figure of the page: what was built of it at each scale, and the commands if nothing was."""

    name: str
    title: str
    tables: list[Table] = field(default_factory=list)
    figures: list[Rendered] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def data_uri(svg: bytes) -> Markup:
    """An image of the page's own bytes: no file and no network."""
    return Markup("data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii"))


def environments(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Distinct environments of the records, most frequent first: count, scales, and the fields that are recorded."""
    counts: Counter = Counter()
    scales: dict[tuple, set[str]] = {}
    for r in records:
        key = (r.label or "your runs", *(r.get(f"environment.{k}") for k in ENVIRONMENT))
        key = tuple(str(v) if v is not None else None for v in key)
        counts[key] += 1
        scales.setdefault(key, set()).add(r.scale)
    out = []
    for key, n in counts.most_common():
        fields = {name.replace("_", " "): value for name, value in zip(ENVIRONMENT, key[1:]) if value is not None}
        out.append({"origin": key[0], "count": n, "scales": ", ".join(sorted(scales[key])), "fields": fields})
    return out


def items_of(origins: list[Collection], tables: list[Table], figures: list[Rendered]) -> list[Item]:
    """Tables in the papers' order, then figures; whatever has no record gets the commands that make it."""
    from .figures import FIGURES

    items = []
    for spec in specs_for(origins):
        item = Item(spec.name, spec.title, tables=[t for t in tables if t.name == spec.name])
        if not any(t.has_records or t.refused for t in item.tables):
            item.tables = []
            item.commands = [command(spec.experiment, s, [])[0] for s in spec.scales]
        items.append(item)
    for name, drawn in FIGURES.items():
        item = Item(name, drawn.title, figures=[f for f in figures if f.name == name and f.files])
        if not item.figures:
            item.commands = [command(drawn.experiment, s, [])[0] for s in drawn.scales]
        items.append(item)
    return items


def _coverage(name: str, origins: list[Collection]) -> dict[str, Any]:
    """What the page says of every printed number of one paper, by table, the text's numbers last."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for pair in coverage(name, origins):
        groups.setdefault(pair.source, []).append(_printed_value(pair))
    for statement, value, origin in covered_statements(name, origins):
        groups.setdefault("Text", []).append(_printed_relation(statement, value, origin))
    lines = [line for members in groups.values() for line in members]
    book = paper(name)
    found = sum(line["origin"] is not None for line in lines)
    return {"title": book.title, "about": book.about, "groups": groups, "found": found, "total": len(lines)}


def _printed_value(pair: Pair) -> dict[str, Any]:
    m = metric(pair.metric)
    return {
        "what": pair.what,
        "metric": m.heading,
        "published": _number(pair.published, m.decimals),
        "ours": _number(pair.ours, m.decimals),
        "error": fmt.percent(pair.error, 2) if m.difference == "percent" else fmt.signed(pair.error, m.decimals),
        "origin": pair.origin,
        "reason": pair.reason,
        "command": pair.command,
    }


def _printed_relation(statement: Test, value: float | None, origin: str | None) -> dict[str, Any]:
    printed, unit = statement.value, unit_of(statement)
    named = (statement.name or metric(statement.metric).label).replace("_", " ")
    named += f" ({statement.derived})" if statement.derived else ""
    return {
        "what": f"{statement.source}: {statement.quote}",
        "metric": f"{named} ({unit})" if unit else named,
        "published": " to ".join(f"{v:g}" for v in printed) if isinstance(printed, list) else _number(printed, 3),
        "ours": _number(value, 2),
        "error": fmt.DASH,
        "origin": origin,
        "reason": None if value is not None else "no record of both arms yet",
        "command": None,
    }


def _number(value: float | None, decimals: int) -> str:
    if value is None:
        return fmt.DASH
    if abs(value) >= 1e5:
        return fmt.count(value)
    return fmt.fixed(value, 0 if float(value).is_integer() and abs(value) >= 10 else decimals)


def page(runs: Runs, origins: list[Collection], tables: list[Table], figures: list[Rendered]) -> str:
    """The report's HTML."""
    verdicts = judged(origins)
    failing = [
        {"name": r.name, "label": r.label, "why": why(r)}
        for r in runs.records
        if r.readable and r.status not in ("ok", "oom")
    ]
    tally = Counter(v.status for _, v in verdicts)
    environment = Environment(
        loader=PackageLoader("analysis", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"data_uri": data_uri, "display": display, "tags": TAGS}
    return environment.get_template("report.html.j2").render(
        items=items_of(origins, tables, figures),
        claims=[(paper(name).title, [(c, v) for c, v in verdicts if c.paper == name]) for name in FILES],
        tally=[(status, tally.get(status, 0)) for status in STATUSES],
        coverages=[_coverage(name, origins) for name in FILES],
        statuses=sorted(Counter(r.status for r in runs.records if r.readable).items()),
        scales=sorted(Counter(r.scale for r in runs.records).items()),
        labels=runs.labels(),
        failing=failing,
        damaged=[(str(path), reason) for path, reason in runs.damaged],
        foreign=[r.name for r in runs.records if not r.readable],
        environments=environments(r for r in runs.records if r.readable),
        total=len(runs.records),
    )
