"""Metrics: what a number means and where a record holds it. A new metric is one entry of ``metrics.yaml``."""

from __future__ import annotations

import difflib
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from sonar_repro.errors import UserError

from .conf import LOADER, SCALES
from .records import Record

GB = 1e9  # bytes; the paper's unit
MEASURED_SOURCES = {
    "cuda": "measured (CUDA allocator statistics)",
    "tracker": "measured (allocation tracker on the CPU)",
    "forecast": "forecast",
    "measured": "measured",
}


@dataclass(frozen=True)
class Reading:
    """One number out of one record: its value, where it came from, and what must be said about it."""

    value: float | None
    source: str | None = None
    note: str | None = None


Extract = Callable[[Record], Reading]


@dataclass(frozen=True)
class Metric:
    """What a number means; the fields are explained in ``metrics.yaml``.

    ``difference`` is how a value is held against a printed one: percent, or absolute (losses, shares).
    """

    name: str
    label: str
    extract: Extract
    unit: str = ""
    direction: str = "none"  # lower | higher | none
    decimals: int = 2
    reducer: Callable[[list[float]], float] = statistics.fmean
    comparable: tuple[str, ...] = ("forecast", "paper")
    scales: tuple[str, ...] = SCALES
    same_device: bool = False
    needs_weights: bool = False
    difference: str = "percent"

    @property
    def heading(self) -> str:
        return f"{self.label} {self.unit}".strip()


# -- what a path alone cannot say --------------------------------------------------------------------------------------


def _peak(record: Record, kind: str) -> Reading:
    """Peak bytes of the measured phase in GB; the warm-up phase where the measured one holds nothing, and said so."""
    source = record.get("memory.source")
    parallel = record.arm.get("parallel")  # then memory is that of one process: said, or it would pass for the whole
    rank = f"of one process of {record.arm.get('processes', 'several')} under {parallel}"
    said = rank if parallel not in (None, "none") else None
    early = "peak of the warm-up phase (the measured phase holds none)"
    for phase, note in (("measured", said), ("warmup", early)):
        value = record.number(f"memory.{phase}.peak_{kind}_bytes")
        if value is not None:
            return Reading(value / GB, source, note)
    names = ("forecast.reason", "reason", "reserved_reason")  # why there is no forecast says more than "not timed"
    return Reading(None, source, next((found for name in names if (found := record.get(f"memory.{name}"))), None))


def peak_allocated(record: Record) -> Reading:
    """Peak of allocated memory in GB."""
    return _peak(record, "allocated")


def peak_reserved(record: Record) -> Reading:
    """Peak of reserved memory in GB."""
    return _peak(record, "reserved")


def last_loss(record: Record) -> Reading:
    """The last training loss that is a number."""
    values = [v for v in record.get("loss.train", []) if v is not None]
    return Reading(float(values[-1]), "measured") if values else Reading(None)


def bound_percent(record: Record) -> Reading:
    """f(1 - 1/L)/4 in percent, negative as a change; f is the expert share, L the layers (Sonar-MoE, equation 2).

    What freeing expert gradients can save when weights, gradients and AdamW's two moments share a dtype and set the
    peak.
    """
    total, expert, layers = (record.number(f"model.{k}") for k in ("parameters", "expert_parameters", "layers"))
    if not total or not expert or not layers or record.arm.get("optimizer") not in (None, "adamw"):
        return Reading(None)
    return Reading(-100.0 * expert / total * (1 - 1 / layers) / 4, "computed")


def tokens_per_s(record: Record) -> Reading:
    """Supervised tokens a second; of a forecast, all positions of the batch."""
    measured = _at({"time.supervised_tokens_per_s": (1, "time.source")})(record)
    value = record.number("time.forecast.tokens_per_s")
    if measured.value is not None or value is None:
        return measured
    return Reading(
        value, "forecast", "tokens per second of a forecast are all positions of the batch, not supervised tokens"
    )


def expert_calls(record: Record) -> Reading:
    """Optimizer calls that hooks made in a step: all less the one at its end (2L or 2EL, section 4.3)."""
    calls, hooks = record.number("counts.optimizer_calls_per_step"), record.number("counts.hook_firings_per_step")
    return Reading(calls - 1 if calls and hooks else None, "measured")


def vocabulary_share(record: Record) -> Reading:
    """Percent of the parameters that the vocabulary role holds."""
    roles, total = record.get("roles", []), record.number("model.parameters")
    sizes = [r.get("parameters") for r in roles if r and r.get("role") == "vocabulary"]
    return Reading(100.0 * sizes[0] / total if sizes and sizes[0] and total else None, "computed")


# -- what a path says --------------------------------------------------------------------------------------------------


def _at(paths: Mapping[str, tuple[float, str]]) -> Extract:
    """The first path that holds a number, times its factor; its source is a word, or is read where it is a path."""

    def extract(record: Record) -> Reading:
        for path, (factor, source) in paths.items():
            value = record.number(path)
            if value is not None:
                return Reading(value * factor, (record.get(source) or "measured") if "." in source else source)
        path, (_, source) = next(iter(paths.items()))
        said = record.get(source) if "." in source else source
        return Reading(None, said, record.get(path.split(".", 1)[0] + ".reason"))

    return extract


def _ratio(part: str, whole: str) -> Extract:
    """Percent that one path is of another."""

    def extract(record: Record) -> Reading:
        a, b = record.number(part), record.number(whole)
        return Reading(100.0 * a / b, "measured") if a is not None and b else Reading(None)

    return extract


def _product(paths: list[str]) -> Extract:
    """Several paths multiplied."""

    def extract(record: Record) -> Reading:
        factors = [v for path in paths if (v := record.number(path)) is not None]
        return Reading(math.prod(factors) if len(factors) == len(paths) else None, "measured")

    return extract


def _metric(entry: Mapping[str, Any], kinds: Mapping[str, Mapping[str, Any]]) -> Metric:
    """One entry of metrics.yaml."""
    fields: dict[str, Any] = {**kinds.get(entry.get("like", ""), {}), **entry}
    at, times, source = (fields.pop(k, v) for k, v in (("at", None), ("times", 1.0), ("source", "measured")))
    call, ratio, product = (fields.pop(k, None) for k in ("call", "ratio", "product"))
    fields.pop("like", None)
    if call:
        extract: Extract = globals()[call]
    elif ratio or product:
        extract = _ratio(*ratio) if ratio else _product(product)
    else:
        extract = _at({k: tuple(v) for k, v in at.items()} if isinstance(at, dict) else {at: (times, source)})
    made: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return Metric(extract=extract, **made)


def _load() -> tuple[dict[str, Metric], dict[str, Any]]:
    text = resources.files(__package__).joinpath("metrics.yaml").read_text(encoding="utf-8")
    data = yaml.load(text, Loader=LOADER)
    return {entry["name"]: _metric(entry, data["kinds"]) for entry in data["metrics"]}, data["kinds"]


METRICS, _KINDS = _load()


def metric(name: str) -> Metric:
    """The metric of that name; ``downstream:<task>`` and its ``stderr:<task>`` are made as asked.

    Raises UserError with near matches.
    """
    kind, _, task = name.partition(":")
    if kind in ("downstream", "stderr") and task and name not in METRICS:
        key, direction = ("value", "higher") if kind == "downstream" else ("stderr", "none")

        def extract(record: Record) -> Reading:  # a task's name may hold dots
            found = (record.get("downstream.tasks", {}).get(task) or {}).get(key)
            return Reading(found, "measured" if found is not None else None)

        entry = {"name": name, "label": task, "like": "score", "direction": direction, "at": ""}
        METRICS[name] = Metric(**{**_metric(entry, _KINDS).__dict__, "extract": extract})
    if name not in METRICS:
        near = difflib.get_close_matches(name, METRICS, 3) or sorted(METRICS)
        raise UserError(f"metric {name!r}: unknown; did you mean {', '.join(near)}?")
    return METRICS[name]
