"""Metrics: name, unit, direction, reducer and extractor in one place. A new metric is one entry of ``METRICS``."""

from __future__ import annotations

import difflib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sonar_repro.errors import UserError

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


@dataclass(frozen=True)
class Metric:
    """What a number means.

    ``direction`` is lower | higher | none (which end is better). ``comparable`` are the scales at which an absolute
    value may stand beside a printed one. ``same_device``: a change is meaningful only between runs on one device.
    ``difference`` is how a value is held against a printed one: percent, or absolute (losses, shares).
    """

    name: str
    label: str
    unit: str
    direction: str
    extract: Callable[[Record], Reading]
    decimals: int = 2
    reducer: Callable[[list[float]], float] = statistics.fmean
    comparable: tuple[str, ...] = ("forecast", "paper")
    scales: tuple[str, ...] = ("smoke", "forecast", "paper")
    same_device: bool = False
    needs_weights: bool = False  # a value of random weights never stands beside a printed one
    difference: str = "percent"

    @property
    def heading(self) -> str:
        return f"{self.label} {self.unit}".strip()


def _reason(record: Record, section: str) -> str | None:
    names = ("forecast.reason", "reason", "reserved_reason")  # why there is no forecast says more than "not timed"
    return next((found for name in names if (found := record.get(f"{section}.{name}"))), None)


def _one_rank(record: Record) -> str | None:
    """Memory of a data-parallel arm is that of one process: said, or a fraction would pass for the whole."""
    name = record.arm.get("parallel")
    if name in (None, "none"):
        return None
    return f"of one process of {record.arm.get('processes', 'several')} under {name}"


def _peak(kind: str) -> Callable[[Record], Reading]:
    """Peak bytes of the measured phase in GB; the warm-up phase where the measured one holds nothing, and said so."""

    def extract(record: Record) -> Reading:
        source = record.get("memory.source")
        for phase, note in (
            ("measured", None),
            ("warmup", "peak of the warm-up phase (the measured phase holds none)"),
        ):
            value = record.number(f"memory.{phase}.peak_{kind}_bytes")
            if value is not None:
                return Reading(value / GB, source, note or _one_rank(record))
        return Reading(None, source, _reason(record, "memory"))

    return extract


def _at(
    path: str, scale: float = 1.0, source: str = "measured", source_path: str | None = None
) -> Callable[[Record], Reading]:
    """The number at one dotted path times ``scale``; its source is a constant or is read from the record."""

    def extract(record: Record) -> Reading:
        value = record.number(path)
        found = record.get(source_path) if source_path else source
        if value is None:
            return Reading(None, found, record.get(path.split(".", 1)[0] + ".reason"))
        return Reading(value * scale, found or source)

    return extract


def _first(*extracts: Callable[[Record], Reading]) -> Callable[[Record], Reading]:
    def extract(record: Record) -> Reading:
        readings = [e(record) for e in extracts]
        return next((r for r in readings if r.value is not None), readings[0])

    return extract


def _share(section: str) -> Callable[[Record], Reading]:
    """Percent of a weight class that changed, from counts."""

    def extract(record: Record) -> Reading:
        changed, total = record.number(f"{section}.changed"), record.number(f"{section}.total")
        return Reading(100.0 * changed / total, "measured") if changed is not None and total else Reading(None)

    return extract


def _last_loss(record: Record) -> Reading:
    series = record.get("loss.train")
    values = [v for v in series if isinstance(v, (int, float))] if isinstance(series, list) else []
    return Reading(float(values[-1]), "measured") if values else Reading(None)


def _bound_percent(record: Record) -> Reading:
    """f(1 - 1/L)/4 in percent, negative as a change; f is the expert share, L the layers.

    What freeing expert gradients can save when weights, gradients and AdamW's two moments share a dtype and set the
    peak (METHODS, "Gradient floor").
    """
    total, expert, layers = (record.number(f"model.{k}") for k in ("parameters", "expert_parameters", "layers"))
    if not total or not expert or not layers or record.arm.get("optimizer") not in (None, "adamw"):
        return Reading(None)
    return Reading(-100.0 * expert / total * (1 - 1 / layers) / 4, "computed")


_STEP = _first(
    _at("time.median_s", 1e3, source_path="time.source"),
    _at("time.forecast.step_s", 1e3, source="forecast"),
    _at("time.forecast.step_ms", source="forecast"),
)


def _forecast_tokens(record: Record) -> Reading:
    value = record.number("time.forecast.tokens_per_s")
    note = "tokens per second of a forecast are all positions of the batch, not supervised tokens"
    return Reading(value, "forecast", note if value is not None else None)


def _kernel(name: str) -> Callable[[Record], Reading]:
    return _first(
        _at(f"time.kernel_breakdown.{name}", source_path="time.kernel_breakdown.source"),
        _at(f"time.forecast.{name}", source="forecast"),
    )


def _downstream(task: str) -> Callable[[Record], Reading]:
    return _at(f"downstream.tasks.{task}.value")


def _expert_calls(record: Record) -> Reading:
    """Optimizer calls that hooks made in a step: all calls less the one at the end of the step (2L or 2EL, section
    4.3).
    """
    calls, hooks = record.number("counts.optimizer_calls_per_step"), record.number("counts.hook_firings_per_step")
    return Reading(calls - 1 if calls and hooks else None, "measured")


_LOSS: dict[str, Any] = {
    "needs_weights": True,
    "comparable": ("paper",),
    "scales": ("smoke", "paper"),
    "difference": "absolute",
}
_TIME: dict[str, Any] = {"same_device": True, "direction": "lower", "unit": "ms", "decimals": 1}
_REAL: dict[str, Any] = {"scales": ("smoke", "paper"), "comparable": ("paper",), "difference": "absolute"}
_SHARE: dict[str, Any] = {"unit": "%", "direction": "none", "decimals": 1, "needs_weights": True, **_REAL}
_COUNT: dict[str, Any] = {
    "unit": "",
    "direction": "none",
    "decimals": 0,
    "comparable": ("forecast", "paper"),
    "difference": "absolute",
}
_COMPARED: dict[str, Any] = {**_COUNT, **_REAL}

_ALL = [
    Metric("peak_allocated_gb", "Peak alloc.", "GB", "lower", _peak("allocated")),
    Metric("peak_reserved_gb", "Peak res.", "GB", "lower", _peak("reserved")),
    Metric(
        "load_allocated_gb",
        "Loaded",
        "GB",
        "lower",
        _at("memory.load.peak_allocated_bytes", 1 / GB, source_path="memory.source"),
    ),
    Metric("m_floor_gb", "M_floor", "GB", "none", _at("memory.m_floor_bytes", 1 / GB, "computed")),
    Metric("m_floor_bound_gb", "M_floor/L bound", "GB", "none", _at("memory.m_floor_bound_bytes", 1 / GB, "computed")),
    Metric("optimizer_state_gb", "Opt. state", "GB", "lower", _at("memory.optimizer_state_bytes", 1 / GB), decimals=3),
    Metric("hidden_buffer_gb", "Hidden buffer", "GB", "lower", _at("memory.hidden_buffer_bytes", 1 / GB), decimals=3),
    Metric("saving_bound_pct", "Bound", "%", "none", _bound_percent, decimals=1),
    Metric("step_ms", "Step", extract=_STEP, **_TIME),
    Metric("busy_ms", "Busy", extract=_kernel("busy_ms"), **_TIME),
    Metric("idle_ms", "Idle", extract=_kernel("idle_ms"), **_TIME),
    Metric("clipping_ms", "Clipping kernels", extract=_kernel("clipping_ms"), **_TIME),
    Metric("optimizer_ms", "Optimizer kernels", extract=_kernel("optimizer_ms"), **_TIME),
    Metric("forward_backward_ms", "Forward + backward kernels", extract=_kernel("forward_backward_ms"), **_TIME),
    Metric(
        "tokens_per_s",
        "Tok/s",
        "",
        "higher",
        _first(
            _at("time.supervised_tokens_per_s", source_path="time.source"),
            _forecast_tokens,
        ),
        decimals=0,
        same_device=True,
        comparable=("paper",),  # a forecast counts all positions of the batch, the paper supervised tokens
    ),
    Metric("heldout_loss", "Held-out loss", "", "lower", _at("loss.heldout"), decimals=4, **_LOSS),
    Metric("heldout_accuracy", "Token acc.", "", "higher", _at("loss.heldout_token_accuracy"), decimals=4, **_LOSS),
    Metric("train_loss", "Last train loss", "", "lower", _last_loss, decimals=4, **_LOSS),
    Metric("optimizer_calls", "Opt. calls/step", extract=_at("counts.optimizer_calls_per_step"), **_COUNT),
    Metric("hook_firings", "Hooks/step", extract=_at("counts.hook_firings_per_step"), **_COUNT),
    Metric("expert_optimizer_calls", "Expert opt. calls", extract=_expert_calls, **_COUNT),
    Metric("updates_per_step", "Updates/step", extract=_at("counts.updates_per_step"), **_COUNT),
    Metric("skipped_steps", "Skipped", extract=_at("counts.skipped_steps"), **_COUNT),
    Metric("parameters", "Parameters", extract=_at("model.parameters", source="computed"), **_COUNT),
    Metric(
        "expert_parameters", "Expert parameters", extract=_at("model.expert_parameters", source="computed"), **_COUNT
    ),
    Metric("expert_changed_pct", "Expert weights changed", extract=_share("weights.expert"), **_SHARE),
    Metric("other_changed_pct", "Other weights changed", extract=_share("weights.other"), **_SHARE),
    Metric("expert_differ", "Expert weights that differ", extract=_at("compare.expert.differing"), **_COMPARED),
    Metric("other_differ", "Other weights that differ", extract=_at("compare.other.differing"), **_COMPARED),
    Metric("expert_total", "of", extract=_at("compare.expert.total"), **_COMPARED),
    Metric("other_total", "of", extract=_at("compare.other.total"), **_COMPARED),
    Metric("arc_challenge", "ARC-C acc_norm", "", "higher", _downstream("arc_challenge"), decimals=3, **_LOSS),
    Metric("hellaswag", "HellaSwag acc_norm", "", "higher", _downstream("hellaswag"), decimals=3, **_LOSS),
    Metric("mmlu", "MMLU acc", "", "higher", _downstream("mmlu"), decimals=3, **_LOSS),
]
METRICS: dict[str, Metric] = {m.name: m for m in _ALL}


def metric(name: str) -> Metric:
    """The metric of that name; ``downstream:<task>`` is made as asked. Raises UserError with near matches."""
    if name.startswith("downstream:") and name not in METRICS:
        task = name.partition(":")[2]
        METRICS[name] = Metric(name, task, "", "higher", _downstream(task), decimals=3, **_LOSS)
    if name not in METRICS:
        near = difflib.get_close_matches(name, METRICS, 3) or sorted(METRICS)
        raise UserError(f"metric {name!r}: unknown; did you mean {', '.join(near)}?")
    return METRICS[name]
