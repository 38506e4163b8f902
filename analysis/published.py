"""What the papers print, as data: rows of tables by axes, and sentences as tests over records.

A row of ``published/*.yaml``: ``source`` (table or section), ``arm`` (axes; the file's ``defaults`` fill the rest),
``values`` by metric name, and optionally ``changes_pct`` (printed changes), ``status`` (a printed out-of-memory). What
a claim and its tests hold is said in ``published/sonar.yaml``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import yaml

from .collection import Arm, paired_change
from .conf import LOADER
from .metrics import METRICS, Metric, metric

FILES = ("sonar", "mesh")
# At smoke scale grouped_mm plays the part of the paper's fast backend: one batched gradient a tensor, as in SonicMoE.
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
class Test:
    """One relation between arms and what it must be (the fields of a test in ``published/*.yaml``)."""

    metric: str
    relation: str
    arm: dict[str, Any] = field(default_factory=dict)
    against: dict[str, Any] | None = None
    value: Any = None
    within: float = 0.0
    at_most: float | None = None
    at_least: float | None = None
    per: str | None = None  # the relation over this metric's difference
    times: float = 1.0
    arms: tuple[dict[str, Any], ...] = ()  # of an order
    margin: float = 0.0
    name: str = ""
    source: str = ""
    quote: str = ""
    unit: str | None = None
    label: str | None = None
    decimals: int | None = None
    scientific: bool = False
    ours: bool = False  # the threshold is ours, not printed
    derived: str | None = None  # our division of printed numbers

    @property
    def printed(self) -> bool:
        """Whether ``value`` is a number that the paper prints."""
        return self.value is not None and not self.ours and not self.derived and self.relation != "runs"


@dataclass(frozen=True)
class Claim:
    """One sentence. All its tests must hold, and ``check``, a function of :mod:`analysis.claims.checks`, if named."""

    name: str
    paper: str
    section: str
    sentence: str
    scales: str
    tests: tuple[Test, ...] = ()
    check: str | None = None


@dataclass(frozen=True)
class Paper:
    """All that one paper prints."""

    name: str
    title: str
    defaults: dict[str, Any]
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]
    experiments: dict[str, str]  # which experiment makes the arms of a printed source
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

    @property
    def statements(self) -> list[Test]:
        """Every test that has a printed number, or one derived from printed ones."""
        return [t for claim in self.claims for t in claim.tests if t.printed or t.derived]

    def statement(self, name: str) -> Test | None:
        """The statement of that name, or None."""
        return next((s for s in self.statements if s.name == name), None)


def _arm(axes: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Axes with the paper's defaults; an evaluation of checkpoints or weights is told by what it names alone."""
    made = {k: tuple(v) if isinstance(v, list) else v for k, v in axes.items()}
    task = {"model": defaults["model"]} if made.get("task") == "downstream" else {}
    return {**(task if "task" in made else defaults), **made}


def _tests(data: Mapping[str, Any], claim: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[Test]:
    """The tests that one entry stands for: one for each combination of the values under ``over``."""
    over = data.get("over", {})
    entry = {k: v for k, v in data.items() if k != "over"}
    entry |= {
        "source": data.get("source", claim["place"].split(",")[0]),
        "quote": claim.get("quote", claim["sentence"]),
    }
    entry["arms"] = tuple(_arm(a, defaults) for a in data.get("arms", ()))
    for values in itertools.product(*over.values()):
        axes = dict(zip(over, values))
        numbers = [printed[v] for printed, v in zip(over.values(), values) if isinstance(printed, dict)]
        made = {**entry, **({"value": numbers[0]} if numbers else {})}
        made["arm"] = _arm({**data.get("arm", {}), **axes}, defaults)
        if "against" in data:
            made["against"] = _arm({**axes, **data["against"]}, defaults)
        if data.get("name", "").endswith(("_", "_bs", "_A")):
            made["name"] = data["name"] + "_".join(map(str, values))
        yield Test(**made)


@functools.cache
def paper(name: str) -> Paper:
    """Read one published file, wherever the package is installed."""
    text = resources.files(__package__).joinpath("published", f"{name}.yaml").read_text(encoding="utf-8")
    data = yaml.load(text, Loader=LOADER)
    defaults = data["defaults"]
    rows = tuple(
        Row(r["source"], {**defaults, **r["arm"]}, r["arm"], r["values"], r.get("changes_pct", {}), r.get("status"))
        for r in data["rows"]
    )
    claims = tuple(
        Claim(
            c["name"], name, c["place"], c["sentence"], c["scales"],
            tuple(t for entry in c.get("tests", ()) for t in _tests(entry, c, defaults)), c.get("check"),
        )
        for c in data["claims"]
    )  # fmt: skip
    about = {k: v for k, v in data.items() if k not in ("rows", "claims", "defaults", "experiments")}
    return Paper(name, data["title"], defaults, rows, claims, data["experiments"], about)


def relate(test: Test, arm: Arm, base: Arm | None) -> float | None:
    """Our number of a relation between arms: value, saving, difference or change (percent, over common seeds)."""
    m = metric(test.metric)
    a, b = arm.value(m).mean, base.value(m).mean if base else None
    if test.relation == "value":
        return a
    if a is None or b is None or base is None:
        return None
    if test.relation == "change":
        return paired_change(arm, base, m)
    found = test.times * (b - a if test.relation == "saving" else a - b)
    if test.per:
        more, fewer = arm.value(test.per).mean, base.value(test.per).mean
        return found / (more - fewer) if more is not None and fewer is not None and more != fewer else None
    return found


def unit_of(test: Test) -> str:
    """Unit of the relation's number."""
    m: Metric = metric(test.metric)
    return test.unit or ("%" if test.relation == "change" else m.unit)


def metrics_of(name: str) -> list[str]:
    """Names of the registered metrics that a paper prints."""
    return [m for m in METRICS if any(m in row.values for row in paper(name).rows)]
