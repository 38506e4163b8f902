"""The axes of an arm: how they are called in print, their defaults, and the command that makes a missing arm."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .records import Record

# What an arm has when nothing is said (conf/config.yaml). Batch size and seed have no default here: a table that
# needs one says it.
DEFAULTS = {
    "accumulation": 1,
    "checkpointing": False,
    "memory_cap_gb": None,
    "optimizer": "adamw",
    "parallel": "none",
    "processes": 1,
    "task": "train",
    "repeat": 1,
}
GROUPS = (
    "model",
    "backend",
    "method",
    "optimizer",
    "batch_size",
    "accumulation",
    "accumulation_mode",
    "checkpointing",
    "memory_cap_gb",
)
OVERRIDES = (*GROUPS, "seed", "gpu", "parallel", "task")

NAMES: dict[str, dict[Any, str]] = {
    "model": {"olmoe": "OLMoE-1B-7B", "granite": "Granite-3.1-3B", "nanowhale": "nanowhale-110M"},
    "backend": {"sonicmoe": "SonicMoE", "scattermoe": "ScatterMoE", "grouped_mm": "grouped_mm", "eager": "eager"},
    "method": {
        "standard_global_clip": "Standard (global clip)",
        "standard_no_expert_clip": "Standard (no expert clip)",
        "standard_no_clip": "Standard (no clip)",
        "optimizer_in_backward": "Optimizer-in-backward (all)",
        "sonar": "Sonar-MoE",
        "sonar_per_expert": "Sonar-MoE (per-expert hooks)",
        "sonar_fold": "Sonar-MoE (folded accumulation)",
        "sonar_exact_clip": "Sonar-MoE (exact clip)",
        "sonar_tensor_clip": "Sonar-MoE (tensor clip)",
        "sonar_lagged_clip": "Sonar-MoE (lagged clip)",
        "sonar_delayed_clip": "Sonar-MoE (delayed clip)",
        "sonar_offload_clip": "Sonar-MoE (offloaded clip)",
        "start": "Pretrained",
    },
    "optimizer": {"adamw": "AdamW", "adamw8bit": "8-bit AdamW", "sgd": "SGD", "lion": "Lion", "mesh_full": "MESH-Full"},
    "checkpointing": {True: "GC", False: "no GC"},
    "scale": {"smoke": "smoke", "forecast": "forecast", "paper": "paper"},
}
TINY = {"olmoe": "OLMoE (tiny)", "granite": "Granite (tiny)", "nanowhale": "nanowhale (tiny)"}
SCALES = ("smoke", "forecast", "paper")


def display(axis: str, value: Any, scale: str | None = None) -> str:
    """Printed name of one axis value; a smoke model is called tiny, since it is not the named checkpoint."""
    if axis == "model" and scale == "smoke":
        return TINY.get(value, f"{value} (tiny)")
    if value is None:
        return "–"
    return NAMES.get(axis, {}).get(value, str(value))


def axis(record: Record, name: str) -> Any:
    """Value of an axis of a record, its default where the record does not name it."""
    value = record.arm.get(name)
    return DEFAULTS.get(name) if value is None else value


def matches(record: Record, wanted: Mapping[str, Any]) -> bool:
    """Whether the record's axes equal the wanted ones; a tuple means any of its values."""
    for name, value in wanted.items():
        have = axis(record, name)
        if isinstance(value, tuple):
            if have not in value:
                return False
        elif have != value:
            return False
    return True


def product(**axes: Any) -> list[dict[str, Any]]:
    """Rows of a grid: every combination, first axis slowest. A value that is no list stands for itself."""
    lists = [v if isinstance(v, list) else [v] for v in axes.values()]
    return [dict(zip(axes, values)) for values in itertools.product(*lists)]


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


Box = dict[str, frozenset]


def _merge(boxes: list[Box]) -> list[Box]:
    """Join boxes that differ in one axis only, the last axis first, until none do."""
    count = 0
    while count != len(boxes):
        count = len(boxes)
        for name in reversed(list(boxes[0])):
            groups: dict[tuple, Box] = {}
            for box in boxes:
                key = tuple(values for k, values in box.items() if k != name)
                known = groups.get(key)
                groups[key] = {**box, name: known[name] | box[name]} if known else box
            boxes = list(groups.values())
    return boxes


def command(
    experiment: str, scale: str, arms: Sequence[Mapping[str, Any]], grid: Sequence[Mapping[str, Any]] = ()
) -> list[str]:
    """Shell commands that make the arms, as few as products of axes allow; without arms, the whole experiment.

    Only axes that vary over the experiment's ``grid`` are named: the experiment's own file fixes the others.
    """
    base = f"python -m sonar_repro +experiment={experiment}" + ("" if scale == "smoke" else f" scale={scale}")
    if not arms:
        return [base]
    grid = grid or arms
    values = {k: list(dict.fromkeys(row.get(k) for row in grid)) for k in OVERRIDES if any(k in row for row in grid)}
    varying = [k for k, v in values.items() if len(v) > 1]
    boxes = _merge([{k: frozenset([arm.get(k)]) for k in varying} for arm in arms])
    commands = []
    for box in boxes:
        parts = [
            f"{k}={','.join(_text(v) for v in values[k] if v in box[k])}"
            for k in varying
            if box[k] != frozenset(values[k])
        ]
        commands.append(" ".join([base, *parts]))
    return commands
