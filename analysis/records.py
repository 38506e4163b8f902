"""Read the records under ``runs/``: strict JSON, checked; what is damaged is named and never counted.

Layout: ``runs/<experiment>/<scale>/<arm-id>/record.json`` are the user's own,
``runs/reference/<label>/**/record.json`` came with the repository and are labelled so. A file may hold
``{"reference": {"record": "<path>"}}`` beside its own ``arm``: the same fingerprint was recorded under another
experiment, and that record's content stands in.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonar_repro.errors import UserError
from sonar_repro.records import REQUIRED, SCHEMA_VERSION, STATUSES

SCHEMA_MAJOR = int(SCHEMA_VERSION.split(".", 1)[0])
REQUIRED_OK = {"train": ("data", "memory", "time", "loss", "counts")}  # by task, when the status is ok
SECTIONS = (
    "arm",
    "config",
    "environment",
    "data",
    "model",
    "counts",
    "memory",
    "time",
    "loss",
    "weights",
    "timeline",
    "error",
)
REFERENCE_DIR = "reference"


class Damaged(ValueError):
    """A record file that cannot be counted; its text is the reason."""


@dataclass
class Record:
    """One arm as recorded. ``label`` is None for the user's own records, else the name of the reference set."""

    path: Path
    data: dict[str, Any]
    label: str | None = None

    @property
    def status(self) -> str:
        return self.data["status"]

    @property
    def scale(self) -> str:
        return self.arm["scale"]

    @property
    def experiment(self) -> str:
        return self.arm["experiment"]

    @property
    def arm(self) -> dict[str, Any]:
        return self.data["arm"]

    @property
    def seed(self) -> int | None:
        return self.arm.get("seed")

    @property
    def readable(self) -> bool:
        """False for another schema major: known by name, refused in a comparison."""
        return schema_major(self.data) == SCHEMA_MAJOR

    @property
    def name(self) -> str:
        """How messages name the record: its folder, which is its arm id."""
        return f"{self.experiment}/{self.scale}/{self.data['arm_id']}"

    def get(self, dotted: str, default: Any = None) -> Any:
        """Value at a dotted path, or the default where the path ends early or holds null."""
        value: Any = self.data
        for part in dotted.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return default if value is None else value

    def number(self, dotted: str) -> float | None:
        """A finite number at a dotted path, else None."""
        value = self.get(dotted)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        return value


@dataclass
class Runs:
    """Everything under one root: usable records, and the damaged files with their reasons."""

    records: list[Record]
    damaged: list[tuple[Path, str]]

    def labels(self) -> list[str]:
        """Names of the reference sets, sorted."""
        return sorted({r.label for r in self.records if r.label is not None})


def schema_major(data: dict[str, Any]) -> int | None:
    """The integer before the first point of ``schema_version``; None if there is none."""
    head = str(data.get("schema_version", "")).split(".", 1)[0]
    return int(head) if head.isdigit() else None


def _refuse_constant(name: str) -> Any:
    raise Damaged(f"holds {name}, which strict JSON does not have")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Damaged(f"holds the number {text}, which is no finite float")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise Damaged("holds the same key twice")
    return made


def parse(text: str) -> dict[str, Any]:
    """Strict JSON object. Raises :class:`Damaged` with the reason."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise Damaged(f"not JSON (line {error.lineno}: {error.msg})") from error
    except RecursionError as error:
        raise Damaged("nested too deeply") from error
    if not isinstance(data, dict):
        raise Damaged("not a JSON object")
    return data


def validate(data: dict[str, Any]) -> None:
    """Required keys and their types, for our schema major. Raises :class:`Damaged`."""
    missing = [key for key in REQUIRED if key not in data]
    if missing:
        raise Damaged(f"lacks {', '.join(missing)}")
    if schema_major(data) is None:
        raise Damaged(f"schema_version is {data['schema_version']!r}, not a version")
    if not isinstance(data["arm"], dict) or not isinstance(data["arm_id"], str):
        raise Damaged("arm is no object or arm_id no text")
    absent = [key for key in ("experiment", "scale") if not isinstance(data["arm"].get(key), str)]
    if absent:
        raise Damaged(f"arm lacks {', '.join(absent)}")
    if schema_major(data) != SCHEMA_MAJOR:
        return  # its other keys are unknown to us
    if data["status"] not in STATUSES:
        raise Damaged(f"status is {data['status']!r}, not one of {', '.join(STATUSES)}")
    for section in SECTIONS:
        if data.get(section) is not None and not isinstance(data[section], dict):
            raise Damaged(f"{section} is not an object")
    if data["status"] == "ok":
        lacks = [key for key in REQUIRED_OK.get(data["arm"].get("task", "train"), ()) if key not in data]
        if lacks:
            raise Damaged(f"status is ok and yet it lacks {', '.join(lacks)}")


def _read(path: Path) -> dict[str, Any]:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise Damaged("not UTF-8") from error
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from error


def _follow(path: Path, root: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The content that a reference record points to, under the referring record's experiment."""
    target = (data.get("reference") or {}).get("record")
    if not target:
        return data
    for base in (path.parent, root):
        other = base / target
        if other.is_file() and other.resolve() != path.resolve():
            content = _read(other)
            validate(content)
            experiment = (data.get("arm") or {}).get("experiment") or path.relative_to(root).parts[0]
            return {**content, "arm": {**content["arm"], "experiment": experiment}}
    raise Damaged(f"refers to {target}, which is not there")


def _find(root: Path) -> Iterator[tuple[Path, str | None]]:
    for path in sorted(root.rglob("record.json")):
        parts = path.relative_to(root).parts
        label = parts[1] if parts[0] == REFERENCE_DIR and len(parts) > 2 else None
        yield path, label


def load(root: Path, *, warn=lambda line: print(line, file=sys.stderr)) -> Runs:
    """All records under ``root``, own ones first. A damaged file is named through ``warn`` and skipped.

    Raises:
        UserError: ``root`` exists and is no folder.
    """
    if root.exists() and not root.is_dir():
        raise UserError(
            f"--runs {root}: not a folder; give the folder that holds <experiment>/<scale>/<arm-id>/record.json"
        )
    records, damaged = [], []
    for path, label in _find(root):
        try:
            data = _follow(path, root, _read(path))
            validate(data)
        except Damaged as reason:
            damaged.append((path, str(reason)))
            warn(f"skipped damaged record {path}: {reason}")
            continue
        records.append(Record(path, data, label))
    records.sort(key=lambda r: (r.label is not None, r.label or "", str(r.path)))
    return Runs(records, damaged)
