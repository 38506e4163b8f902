"""Read the records under ``runs/``: strict JSON of the right types; what is damaged is named and never counted.

Layout: ``runs/<experiment>/<scale>/<arm-id>/record.json`` are the user's own,
``runs/reference/<label>/**/record.json`` came with the repository and are labelled so. A file may hold
``{"reference": {"record": "<path>"}}`` beside its own ``arm``: the same fingerprint was recorded under another
experiment, and that record's content stands in.
"""

from __future__ import annotations

import math
import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonar_repro.errors import UserError

from .schema import DIVERGED, SCHEMA_MAJOR, Damaged, check, parse, schema_major, shape, validate

REFERENCE_DIR = "reference"
LARGEST_FILE = 256_000_000  # bytes; a record with a timeline has about one million


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

    @property
    def state(self) -> str:
        """The status as a table prints it; of a run that diverged with the step."""
        if self.status != DIVERGED:
            return self.status
        said = re.search(r"step (\d+)", str(self.get("error.message") or ""))
        step = self.get("error.step") or self.get("loss.diverged_at_step") or (said and said[1])
        return f"diverged at step {step}" if step else DIVERGED


@dataclass
class Runs:
    """Everything under one root: usable records, and the damaged files with their reasons."""

    records: list[Record]
    damaged: list[tuple[Path, str]]

    def labels(self) -> list[str]:
        """Names of the reference sets, sorted."""
        return sorted({r.label for r in self.records if r.label is not None})


def _read(path: Path) -> dict[str, Any]:
    """A regular file's JSON object: a pipe would wait for ever, a device or a folder is none."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise Damaged("not a regular file")
        if found.st_size > LARGEST_FILE:
            raise Damaged(f"{found.st_size / 1e6:.0f} MB large")
        return parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise Damaged("not UTF-8") from error
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from error


def _follow(path: Path, root: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The content that a reference record points to, under the referring record's experiment."""
    check(data.get("reference"), shape()["reference"], "reference")
    target = (data.get("reference") or {}).get("record")
    if not target:
        return data
    for base in (path.parent, root):
        other = base / target
        if os.path.lexists(other) and os.path.realpath(other) != os.path.realpath(path):
            content = _read(other)
            validate(content)
            arm = data.get("arm")
            experiment = (arm.get("experiment") if isinstance(arm, dict) else None) or path.relative_to(root).parts[0]
            check(experiment, "name", "arm.experiment")
            return {**content, "arm": {**content["arm"], "experiment": experiment}}
    raise Damaged(f"refers to {target}, which is not there")


def _find(root: Path) -> Iterator[tuple[Path, str | None]]:
    """Every record.json below the root with its reference label; linked folders are not entered."""
    for folder, inner, files in os.walk(root):
        inner.sort()
        if "record.json" in files or "record.json" in inner:
            path = Path(folder) / "record.json"
            parts = path.relative_to(root).parts
            yield path, parts[1] if parts[0] == REFERENCE_DIR and len(parts) > 2 else None


def load(root: Path, *, warn=lambda line: print(line, file=sys.stderr)) -> Runs:
    """All records under ``root``, own ones first. A damaged file is named through ``warn`` and skipped.

    Raises:
        UserError: ``root`` exists and is no folder.
    """
    if root.exists() and not root.is_dir():
        raise UserError(
            f"--runs {root}: not a folder; give the folder that holds <experiment>/<scale>/<arm-id>/record.json"
        )
    records: list[Record] = []
    damaged: list[tuple[Path, str]] = []
    for path, label in _find(root):
        try:
            data = _follow(path, root, _read(path))
            validate(data)
        except Damaged as reason:
            said = " ".join(str(reason).split())
            damaged.append((path, said))
            warn(f"skipped damaged record {path}: {said}")
            continue
        records.append(Record(path, data, label))
    records.sort(key=lambda r: (r.label is not None, r.label or "", str(r.path)))
    return Runs(records, damaged)
