"""The record: one strict-JSON file an arm, versioned, written atomically. Imports no torch, so analysis can use it.

Schema 1.x, by key: ``schema_version``, ``arm_id``, ``arm`` (every axis by name), ``config`` (resolved),
``fingerprint``, ``status`` (ok | oom | failed | crashed | unsupported), ``error`` (type, message, phase, traceback),
``environment``,
``data``, ``model``, ``counts``, ``memory``, ``time``, ``loss``, ``grad_norm``, ``weights``, ``timeline``, ``notes``.
Bytes are integers, times seconds; a value that was not measured is null with a ``*_reason`` or ``reason`` beside it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UserError

SCHEMA_VERSION = "1.0"
STATUSES = ("ok", "oom", "failed", "crashed", "unsupported")
FINAL = ("ok", "oom")  # what counts as recorded
SECTIONS = ("environment", "data", "model", "counts", "memory", "time", "loss", "grad_norm", "weights", "timeline")
WEIGHTS_FILE, MODEL_FOLDER = "weights.safetensors", "model"  # what an arm may leave beside its record
REQUIRED = ("schema_version", "arm_id", "arm", "fingerprint", "status")


class DamagedRecord(ValueError):
    """A record file that cannot be read as one; the message names the file and the fault."""


def finite(value: Any) -> Any:
    """Replace NaN and infinities by null (strict JSON has neither); containers are copied, everything else kept."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def count_nonfinite(value: Any) -> int:
    """How many numbers :func:`finite` would replace."""
    if isinstance(value, dict):
        return sum(count_nonfinite(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(count_nonfinite(v) for v in value)
    return int(isinstance(value, float) and not math.isfinite(value))


def write(path: Path, record: dict[str, Any]) -> None:
    """Write beside ``path``, fsync, rename: a reader sees the old record or the new one, never half of one."""
    lost = count_nonfinite(record)
    if lost:
        record = {**record, "notes": [*record.get("notes", []), f"{lost} values were not finite and are null"]}
    text = json.dumps(finite(record), indent=1, allow_nan=False, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".record-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _no_constant(token: str) -> Any:
    raise ValueError(f"{token} is not JSON")


def load(path: Path) -> dict[str, Any]:
    """Read and validate one record. Raises DamagedRecord naming the file; UserError for another schema major."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (OSError, ValueError) as error:
        raise DamagedRecord(f"{path}: {error}") from error
    missing = [k for k in REQUIRED if not isinstance(record, dict) or k not in record]
    if missing:
        raise DamagedRecord(f"{path}: no {', '.join(missing)}")
    if str(record["schema_version"]).split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise UserError(
            f"{path}: schema_version={record['schema_version']}: this version reads {SCHEMA_VERSION}; run the arm again"
        )
    if record["status"] not in STATUSES:
        raise DamagedRecord(f"{path}: status={record['status']} is none of {', '.join(STATUSES)}")
    return record


def iterate(runs_dir: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The readable records below ``runs_dir`` other than the committed reference ones, in path order."""
    for path in sorted(runs_dir.glob("*/*/*/record.json")):
        if path.relative_to(runs_dir).parts[0] != "reference":
            with contextlib.suppress(DamagedRecord, UserError):
                yield path, load(path)


def find_by_fingerprint(runs_dir: Path, fingerprint: str, scale: str) -> tuple[Path, dict[str, Any]] | None:
    """A final record of the same computation under any experiment, or None.

    The fingerprint is looked for in the text before the file is parsed: a sweep asks this once an arm.
    """
    for path in sorted(runs_dir.glob(f"*/{scale}/*/record.json")):
        if path.relative_to(runs_dir).parts[0] == "reference":
            continue
        with contextlib.suppress(DamagedRecord, UserError, OSError):
            if fingerprint in path.read_text(encoding="utf-8"):
                record = load(path)
                if record["fingerprint"] == fingerprint and record["status"] in FINAL:
                    return path, record
    return None
