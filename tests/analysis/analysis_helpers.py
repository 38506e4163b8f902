"""Records for the analysis tests: made-up ones, and ones that hold exactly what the papers print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from synthetic import put, record

from analysis import conf
from analysis.collection import Collection, collections
from analysis.published import paper
from analysis.records import load

G, N, ALL, SONAR = "standard_global_clip", "standard_no_expert_clip", "optimizer_in_backward", "sonar"
FOUR = (G, N, ALL, SONAR)


def arm(scale: str = "forecast", experiment: str = "table1", seed: int = 42, **axes: Any) -> dict[str, Any]:
    """A synthetic record of Table 1's kind; at smoke scale on the smoke backend."""
    axes = {"backend": "grouped_mm" if scale == "smoke" else "sonicmoe", **axes}
    return record(axes, scale, experiment, seed)


def with_peak(made: dict[str, Any], gb: float, reserved: float | None = None) -> dict[str, Any]:
    """The record with another measured peak, in GB."""
    bytes_of = {"peak_allocated_bytes": round(gb * 1e9), "peak_reserved_bytes": reserved and round(reserved * 1e9)}
    made["memory"]["measured"] = bytes_of
    return made


def with_step(made: dict[str, Any], ms: float) -> dict[str, Any]:
    """The record with another median step time, in milliseconds."""
    made["time"]["median_s"] = ms / 1e3
    return made


def origins(root: Path, made: list[dict[str, Any]], label: str | None = None) -> list[Collection]:
    """Write the records and load everything under the root."""
    for one in made:
        put(root, one, label)
    return collections(load(root, warn=lambda line: None))


def printed_records(name: str = "sonar") -> list[dict[str, Any]]:
    """One paper-scale record for each printed arm of the tables, holding the printed values and nothing made up."""
    made: dict[str, dict[str, Any]] = {}
    for row in paper(name).rows:
        experiment = paper(name).experiments.get(row.source, "table1")
        axes = {k: v for k, v in row.axes.items() if v is not None and k != "seed"}
        task = conf.tasks().get(experiment)
        axes |= {"task": task} if task else {}
        one = record(axes, "paper", experiment, row.axes.get("seed", 42))
        key = json.dumps([experiment, one["arm_id"]])
        one = made.setdefault(key, _emptied(one))
        _set(one, row.values)
        if row.status == "oom":
            one["status"] = "oom"
    return list(made.values())


def _emptied(one: dict[str, Any]) -> dict[str, Any]:
    """The record without any number, so that only printed ones are in it."""
    none = {"peak_allocated_bytes": None, "peak_reserved_bytes": None}
    one["memory"] = {"source": "cuda", **dict.fromkeys(("load", "warmup", "measured"), none)}
    one["time"] = {"source": "measured", "median_s": None, "kernel_breakdown": {"source": "measured"}}
    one["loss"], one["weights"], one["timeline"] = {"train": []}, {}, None
    one["counts"], one["model"] = {}, {"weights": "pretrained"}
    one.pop("downstream", None), one.pop("compare", None)
    return one


def _set(one: dict[str, Any], values: dict[str, float]) -> None:
    places = {
        "peak_allocated_gb": lambda v: one["memory"].update(
            measured={**one["memory"]["measured"], "peak_allocated_bytes": round(v * 1e9)}
        ),
        "peak_reserved_gb": lambda v: one["memory"].update(
            measured={**one["memory"]["measured"], "peak_reserved_bytes": round(v * 1e9)}
        ),
        "optimizer_state_gb": lambda v: one["memory"].update(optimizer_state_bytes=round(v * 1e9)),
        "hidden_buffer_gb": lambda v: one["memory"].update(hidden_buffer_bytes=round(v * 1e9)),
        "step_ms": lambda v: one["time"].update(median_s=v / 1e3),
        "tokens_per_s": lambda v: one["time"].update(supervised_tokens_per_s=v),
        "heldout_loss": lambda v: one["loss"].update(heldout=v),
        "expert_optimizer_calls": lambda v: one["counts"].update(
            optimizer_calls_per_step=v + 1, hook_firings_per_step=v
        ),
        "updates_per_step": lambda v: one["counts"].update(updates_per_step=v),
        "expert_changed_pct": lambda v: one["weights"].update(expert={"changed": v, "total": 100}),
        "other_changed_pct": lambda v: one["weights"].update(other={"changed": v, "total": 100}),
        "expert_differ": lambda v: one.setdefault("compare", {}).update(
            expert={"differing": v, "total": 6_442_450_944}
        ),
        "other_differ": lambda v: one.setdefault("compare", {}).update(other={"differing": v, "total": 476_710_912}),
    }
    for name, value in values.items():
        if name.endswith("_differ_pct"):
            continue
        if name in places:
            places[name](value)
        elif name.endswith("_ms"):
            one["time"]["kernel_breakdown"][name] = value
        else:
            one.setdefault("downstream", {"tasks": {}})["tasks"][name] = {"value": value}
