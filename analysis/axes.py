"""The axes of an arm: how they are called in print, and the command that makes a missing arm."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from . import conf
from .records import Record

# What an arm has when nothing is said. Batch size and seed have no default here: a table that needs one says it.
DEFAULTS = {
    name: conf.defaults()[name]
    for name in (
        "accumulation",
        "checkpointing",
        "memory_cap_gb",
        "optimizer",
        "parallel",
        "processes",
        "task",
        "repeat",
    )
}
GROUPS: tuple[str, ...] = ("model", "backend", "method", "optimizer", "batch_size", "accumulation")
GROUPS += ("accumulation_mode", "checkpointing", "memory_cap_gb")
OVERRIDES = (*GROUPS, "seed", "gpu", "parallel", "task")
START = "start"  # a downstream evaluation of the weights before any training


def display(axis: str, value: Any, scale: str | None = None, *, short: bool = False) -> str:
    """Printed name of one axis value; a smoke model is called tiny, since it is not the named checkpoint."""
    if value is None:
        return "–"
    if axis == "model" and scale == "smoke":
        return f"{conf.title(axis, value, short=True) or value} (tiny)"
    if axis == "checkpointing":
        return "GC" if value else "no GC"
    if axis == "method" and value == START:
        return "Pretrained"
    return conf.title(axis, value, short=short) or str(value)


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


def product(axes: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Every combination, first axis slowest."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


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
