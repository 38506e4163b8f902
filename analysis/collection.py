"""Choose the records of an arm, put its seeds together, and refuse comparisons that would not be fair."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sonar_repro.errors import UserError

from . import conf
from .axes import DEFAULTS, axis, matches
from .metrics import Metric, Reading, metric
from .records import Record, Runs
from .schema import DIVERGED

# Worst first: what a row shows when none of its records is ok.
SEVERITY = ("crashed", "failed", "oom", "unsupported", DIVERGED)
FREE_AXES = ("accumulation", "checkpointing", "memory_cap_gb", "optimizer", "parallel", "processes")
PAPERS = ("table1", "mesh_table1")  # the usual set-up of each paper
# The papers' experiments: their arms differ from the usual set-up in length only.
KNOWN = frozenset(
    e
    for e in conf.options("experiment")
    if conf.settings(e, "forecast") in {conf.settings(p, "forecast") for p in PAPERS}
)
FURTHER = re.compile(r"-[0-9a-f]{6}$")  # how an arm id ends when overrides beyond the axes were given


@dataclass
class Value:
    """A metric over the seeds of one arm: mean, sample standard deviation (None for one seed), and its origin."""

    mean: float | None = None
    spread: float | None = None
    n: int = 0
    source: str | None = None
    notes: tuple[str, ...] = ()
    by_seed: dict[Any, float] = field(default_factory=dict)
    lost: int = 0  # seeds that were run and have no value: the run ended, or diverged


@dataclass
class Arm:
    """The records that answer for one set of axes, at most one a seed."""

    axes: dict[str, Any]
    by_seed: dict[Any, Record] = field(default_factory=dict)
    repeats: list[Record] = field(default_factory=list)  # further runs of a seed that is already there

    @property
    def records(self) -> list[Record]:
        return list(self.by_seed.values())

    @property
    def ok(self) -> list[Record]:
        return [r for r in self.records if r.status == "ok"]

    @property
    def status(self) -> str:
        """ok if any seed is; else the worst status; missing without a record."""
        if not self.by_seed:
            return "missing"
        found = {r.status for r in self.records}
        return "ok" if "ok" in found else next(s for s in SEVERITY if s in found)

    def value(self, name: str | Metric) -> Value:
        """The metric over the ok records."""
        m = metric(name) if isinstance(name, str) else name
        readings: dict[Any, Reading] = {r.seed: m.extract(r) for r in self.ok}
        values = {seed: x.value for seed, x in readings.items() if x.value is not None}
        notes = tuple(dict.fromkeys(x.note for x in readings.values() if x.note))
        source = next((x.source for x in readings.values() if x.source), None)
        lost = sum(r.status != "ok" for r in self.records)
        if not values:
            return Value(source=source, notes=notes, lost=lost)
        spread = statistics.stdev(values.values()) if len(values) > 1 else None
        return Value(m.reducer(list(values.values())), spread, len(values), source, notes, values, lost)


class Collection:
    """The records of one origin (the user's own, or one reference set), looked up by axes."""

    def __init__(self, records: Iterable[Record], label: str | None = None):
        self.records = list(records)
        self.label = label
        self._cache: dict[Any, Arm] = {}
        self._by_scale: dict[Any, list[Record]] = {}
        for r in self.records:
            self._by_scale.setdefault((r.scale, r.arm.get("model")), []).append(r)
            self._by_scale.setdefault((r.scale, None), []).append(r)

    def arm(self, axes: Mapping[str, Any], scale: str, experiment: str | None = None) -> Arm:
        """The arm with these axes at one scale; a record of the asked experiment is preferred to a reused one.

        Among several candidates of one seed the one with the fewest other non-default axes counts. Raises UserError
        when a chosen record has another schema major.
        """
        key = (scale, experiment, tuple(sorted(axes.items(), key=lambda kv: kv[0])))
        if key not in self._cache:
            self._cache[key] = self._select(dict(axes), scale, experiment)
        return self._cache[key]

    def _select(self, axes: dict[str, Any], scale: str, experiment: str | None) -> Arm:
        model = axes.get("model")
        pool = self._by_scale.get((scale, model if isinstance(model, str) else None), [])
        wanted = {"task": DEFAULTS["task"], **axes}
        found = [r for r in pool if matches(r, wanted) and reusable(r, experiment)]

        def rank(r: Record) -> tuple:
            foreign = experiment is not None and r.experiment != experiment
            family = conf.settings(r.experiment, scale) not in {conf.settings(p, scale) for p in PAPERS}
            odd = sum(axis(r, k) != DEFAULTS[k] for k in FREE_AXES if k not in axes)
            return (foreign, is_further(r), odd, axis(r, "repeat"), family, len(r.data["arm_id"]), str(r.path))

        arm = Arm(axes)
        for record in sorted(found, key=rank):
            if not record.readable:
                version = record.data["schema_version"]
                raise UserError(f"record {record.name}: schema {version} is not ours; re-run it with force=true")
            first = arm.by_seed.setdefault(record.seed, record)
            if (
                record is not first
                and axis(record, "repeat") != axis(first, "repeat")
                and _same_settings(first, record)
            ):
                arm.repeats.append(record)
        return arm

    def of(self, experiment: str, scale: str) -> list[Record]:
        """All readable records of one experiment at one scale."""
        return [r for r in self._by_scale.get((scale, None), []) if r.experiment == experiment and r.readable]

    def chosen(self, names: Iterable[str]) -> list[Arm]:
        """Arms looked up so far that hold a record of one of these names."""
        wanted = set(names)
        return [a for a in self._cache.values() if any(r.name in wanted for r in a.records)]

    def scales(self, experiments: Iterable[str] | None = None) -> list[str]:
        """Scales that the records have, in the order smoke, forecast, paper, others."""
        wanted = None if experiments is None else set(experiments)
        found = {r.scale for r in self.records if wanted is None or r.experiment in wanted}
        order = {"smoke": 0, "forecast": 1, "paper": 2}
        return sorted(found, key=lambda s: (order.get(s, 3), s))


def reusable(record: Record, experiment: str | None) -> bool:
    """Whether a record may answer for an experiment: its own, or one that runs its arms in the same way (conf)."""
    if experiment is None:
        return record.experiment in KNOWN or axis(record, "task") != "train"
    if record.experiment == experiment:
        return True
    settings = conf.settings(experiment, record.scale)
    return settings is not None and settings == conf.settings(record.experiment, record.scale)


def is_further(record: Record) -> bool:
    """Whether a training arm was run with overrides beyond its axes; other tasks sweep over them."""
    return axis(record, "task") == "train" and bool(FURTHER.search(record.data["arm_id"]))


def _same_settings(a: Record, b: Record) -> bool:
    return a.experiment == b.experiment and all(
        a.arm.get(k) == b.arm.get(k) for k in (*FREE_AXES, "method", "batch_size")
    )


def collections(runs: Runs) -> list[Collection]:
    """The user's own records first, then each reference set."""
    own = Collection([r for r in runs.records if r.label is None])
    return [own, *(Collection([r for r in runs.records if r.label == label], label) for label in runs.labels())]


def check_same_data(arms: Iterable[Arm], what: str) -> None:
    """Refuse a comparison of runs on different data. Raises UserError naming two records."""
    first: dict[Any, Record] = {}
    for arm in arms:
        for seed, record in arm.by_seed.items():
            digest = record.get("data.sha256")
            if digest is None or record.status != "ok":
                continue
            other = first.setdefault(seed, record)
            if other.get("data.sha256") != digest:
                hashes = f"sha256 {str(digest)[:12]} against {str(other.get('data.sha256'))[:12]}"
                raise UserError(
                    f"{what}: {record.name} and {other.name} saw different data ({hashes}); re-run one of them"
                )


def same_device(a: Arm, b: Arm) -> bool:
    """Whether two arms ran on one kind of device with one power limit, so that their times may be compared.

    A forecast's device is the card and the host that it is of, not the machine that made it.
    """
    return len({_device(r) for arm in (a, b) for r in arm.ok}) <= 1


def _device(record: Record) -> tuple:
    if record.scale == "forecast":
        return (record.arm.get("gpu"), record.get("time.forecast.host"))
    return (record.get("environment.device_name"), record.get("environment.power_limit_w"))


def paired_change(arm: Arm, base: Arm, m: Metric) -> float | None:
    """Change against the baseline in percent, over the seeds that both have."""
    mine, theirs = arm.value(m).by_seed, base.value(m).by_seed
    seeds = [s for s in mine if s in theirs]
    if not seeds:
        return None
    reference = m.reducer([theirs[s] for s in seeds])
    return 100.0 * (m.reducer([mine[s] for s in seeds]) - reference) / reference if reference else None
