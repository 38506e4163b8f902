"""What ``conf/`` says, read as YAML: printed names, defaults, what an experiment sweeps at a scale, and cards.

The grid of every table comes from its experiment file, so neither can drift from the other. Hydra is not needed: of its
language only what the experiment files use is understood (defaults lists, ``${a.b.${scale.name}}``, sweeps).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SCALES = ("smoke", "forecast", "paper")
INNERMOST = re.compile(r"\$\{([^${}]*)\}")
PER_SCALE = re.compile(r"\$\{per_scale:(\{.*\})\}", re.DOTALL)
# Keys that say which arms are run, not how one is run.
NOT_SETTINGS = ("defaults", "hydra", "experiment_name", "by_scale", "model", "method", "optimizer", "backend", "seed")
LENGTH = ("steps", "window_start")  # on which a forecast does not depend
INSTRUMENTS = ("timeline", "profile")


def folder() -> Path:
    """``conf``, inside the installed package or beside it in a checkout."""
    package = Path(str(resources.files("sonar_repro")))
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def _read(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER) or {} if path.is_file() else {}


@functools.cache
def options(group: str) -> dict[str, dict[str, Any]]:
    """The files of one group by name, in alphabetical order."""
    return {path.stem: _read(path) for path in sorted((folder() / group).glob("*.yaml"))}


def title(group: str, name: Any, *, short: bool = False) -> str | None:
    """Printed name of an option; its short one, if it has one, on request; None for what has no file or no title."""
    found = options(group).get(name, {}) if isinstance(name, str) else {}
    return (found.get("short") if short else None) or found.get("title") or None


def _chosen(data: dict[str, Any]) -> dict[str, str]:
    """Options that a defaults list chooses: {"model": "olmoe"}."""
    items = [item for item in data.get("defaults", []) if isinstance(item, dict)]
    return {key.removeprefix("override ").lstrip("/"): value for item in items for key, value in item.items()}


@functools.cache
def experiment(name: str) -> dict[str, Any]:
    """One experiment file with the regime it builds on below it; empty for an experiment without a file."""
    own = options("experiment").get(name, {})
    made: dict[str, Any] = {}
    for part in (_read(folder() / "regime" / f"{_chosen(own).get('regime', '')}.yaml"), own):
        made = _merged(made, {**part, **{k: v for k, v in _chosen(part).items() if k != "regime" and k != "task"}})
        made |= {"task_name": _chosen(part)["task"]} if "task" in _chosen(part) else {}
    return made


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {k: _merged(below[k], v) for k, v in above.items() if isinstance(v, dict) and isinstance(below.get(k), dict)}
    return {**below, **above, **both}


@functools.cache
def defaults() -> dict[str, Any]:
    """Axes of an arm where nothing is said (conf/config.yaml)."""
    data = _read(folder() / "config.yaml")
    chosen = _chosen(data)
    axes = {k: chosen.get(k) for k in ("model", "backend", "method", "optimizer", "task", "parallel")}
    axes |= {k: data.get(k) for k in ("batch_size", "accumulation", "checkpointing", "memory_cap_gb", "seed", "repeat")}
    return axes | {"processes": options("parallel").get(chosen.get("parallel", ""), {}).get("processes", 1)}


def _resolved(value: Any, name: str, scale: str) -> Any:
    """The value with what it refers to put in; a reference to something unknown stays as it is."""
    if not isinstance(value, str):
        return value
    if found := PER_SCALE.fullmatch(value):
        return yaml.load(found[1], Loader=LOADER).get(scale)
    context = {**_read(folder() / "config.yaml"), **experiment(name), "scale": options("scale").get(scale, {})}
    while found := INNERMOST.search(value):
        inner: Any = context
        for part in found[1].split("."):
            inner = inner.get(part) if isinstance(inner, dict) else None
        if found.span() == (0, len(value)):
            return inner
        value = value[: found.start()] + str(inner) + value[found.end() :]
    return value


def _items(value: Any) -> list[Any]:
    """Values of a sweep: its text split at commas outside brackets, each read as YAML."""
    if not isinstance(value, str):
        return [value]
    return [yaml.load(part, Loader=LOADER) for part in re.split(r",(?![^\[]*\])", value)]


@functools.cache
def arms(name: str, scale: str) -> dict[str, list[Any]]:
    """Every axis of an experiment at one scale with the values that it takes, in the order of its sweep."""
    data = experiment(name)
    made = {k: [_resolved(data.get(k, v), name, scale)] for k, v in defaults().items() if k != "task"}
    made["task"] = [data.get("task_name") or defaults()["task"]]
    swept = data.get("hydra", {}).get("sweeper", {}).get("params", {})
    for key, value in swept.items():
        items = _items(_resolved(value, name, scale))
        if key in ("task.pair", "task.of", "task.checkpoint_of"):
            made["method"] = ["_vs_".join(i) if isinstance(i, list) else i for i in items]
        elif key in made:
            made[key] = items
    return made


def tasks() -> dict[str, str]:
    """Experiments whose task is another than training."""
    return {n: str(t) for n in options("experiment") if (t := experiment(n).get("task_name"))}


@functools.cache
def settings(name: str, scale: str) -> str | None:
    """How an experiment runs its arms, as text: equal texts mean that one may show another's records.

    A forecast depends neither on the length of a run nor on what is recorded beside it. None without a file.
    """
    data, usual = experiment(name), {k: options("scale").get(scale, {}).get(k) for k in LENGTH}
    if not data:
        return None
    kept = usual | {k: _resolved(v, name, scale) for k, v in data.items() if k not in NOT_SETTINGS and k != "task_name"}
    kept |= {"task": {k: v for k, v in data.get("task", {}).items() if scale != "forecast" or k not in INSTRUMENTS}}
    if scale == "forecast":
        kept = {k: v for k, v in kept.items() if k not in LENGTH}
    return repr(sorted((k, v) for k, v in kept.items() if v not in (None, {})))


# -- cards -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """A card and its bytes: ``usable_gb`` is its memory less the allowance for the CUDA context (1e9 bytes)."""

    name: str
    title: str
    memory_gb: float
    usable_gb: float

    @property
    def short(self) -> str:
        """The title without its maker and its memory."""
        bare = self.title.removeprefix("NVIDIA ").removeprefix("GeForce ").replace(" Blackwell", "")
        return bare.split(" (")[0]


@functools.cache
def cards() -> tuple[Card, ...]:
    """All cards, smallest first; a file without memory is left out."""
    found = []
    for name, data in options("gpu").items():
        memory = data.get("memory_gb")
        if isinstance(memory, (int, float)) and memory > 0:
            usable = memory - (data.get("context_gb") or 0.0)
            found.append(Card(name, str(data.get("title") or name), float(memory), float(usable)))
    return tuple(sorted(found, key=lambda c: (c.usable_gb, c.name)))


def smallest(peak_gb: float) -> Card | None:
    """The smallest card that holds a reserved peak, or None."""
    return next((card for card in cards() if peak_gb <= card.usable_gb), None)
