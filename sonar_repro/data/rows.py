"""The user's own rows: JSONL, JSON and Parquet, checked one by one, with the file and line of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
_METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
Check = Callable[[Any, str], Any]


def _text(row: dict, field: str, where: str) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise UserError(f"{where}: field {field!r} is {type(value).__name__}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"{where}: field {field!r} holds half of a surrogate pair, which is no text: remove it"
        ) from None
    return value


def instruction_row(row: Any, where: str) -> dict[str, str]:
    """Check one row of Alpaca's format and keep its three fields; ``input`` may be missing, ``output`` empty.

    Raises:
        UserError: starts with ``where`` (``FILE:LINE``) and names the field.
    """
    if not isinstance(row, dict):
        raise UserError(
            f"{where}: a row must be an object with the fields instruction, input, output; got {type(row).__name__}"
        )
    for field in ("instruction", "output"):
        if field not in row:
            present = ", ".join(map(str, row)) or "none"
            raise UserError(f"{where}: field {field!r} is missing (fields present: {present})")
    instruction = _text(row, "instruction", where)
    if not instruction.strip():
        raise UserError(f"{where}: field 'instruction' is empty")
    given = "" if row.get("input") is None else _text(row, "input", where)
    return {"instruction": instruction, "input": given, "output": _text(row, "output", where)}


def text_row(row: Any, where: str) -> str:
    """Check one document row and return its text. Raises UserError as :func:`instruction_row`."""
    if not isinstance(row, dict) or "text" not in row:
        raise UserError(f"{where}: a row of a text data set must be an object with the field 'text'")
    return _text(row, "text", where)


def read_rows(path: str | Path, check: Check) -> list[Any]:
    """Read a JSONL (one object a line, blank lines skipped), JSON (a list) or Parquet file, or a directory of one kind.

    Raises:
        UserError: no such file, unknown or mixed kinds, no rows, or a bad row, with its file and line.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"data.path={path}: no such file or directory")
    files = _files_of(path) if path.is_dir() else [path]
    rows = [row for file in files for row in _read_file(file, check)]
    if not rows:
        raise UserError(f"data.path={path}: no rows")
    return rows


def _files_of(directory: Path) -> list[Path]:
    found = sorted(
        p
        for p in directory.rglob("*")
        if p.suffix.lower() in SUFFIXES and p.name not in _METADATA and not any(q.startswith(".") for q in p.parts[-2:])
    )
    if not found:
        raise UserError(f"data.path={directory}: holds no .jsonl, .json or .parquet file")
    kinds = {SUFFIXES[p.suffix.lower()] for p in found}
    if len(kinds) > 1:
        raise UserError(
            f"data.path={directory}: holds {' and '.join(sorted(kinds))} files: name one, so that no row is read twice"
        )
    return found


def _read_file(path: Path, check: Check) -> Iterator[Any]:
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise UserError(
            f"data.path={path}: unknown kind {path.suffix or '(no suffix)'!r}: use .jsonl, .json or .parquet"
        )
    if kind == "parquet":
        return _read_parquet(path, check)
    try:
        raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(f"data.path={path}: cannot be read: {error.strerror}") from error
    if kind == "json" and raw.lstrip()[:1] == b"[":
        return _read_list(path, raw, check)
    return _read_lines(path, raw, check)


def _read_lines(path: Path, raw: bytes, check: Check) -> Iterator[Any]:
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield check(_parse(line, where), where)


def _read_list(path: Path, raw: bytes, check: Check) -> Iterator[Any]:
    try:
        rows = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{raw.count(bytes([10]), 0, error.start) + 1}: not UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise UserError(f"{path}:1: not a list of rows: nested too deeply") from None
    for number, row in enumerate(rows, start=1):
        yield check(row, f"{path}: item {number} of the list")


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not a JSON object on one line: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise UserError(f"{where}: not a row: nested too deeply") from None


def _read_parquet(path: Path, check: Check) -> Iterator[Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(
            f"data.path={path}: reading Parquet needs pyarrow: pip install datasets, or convert to .jsonl"
        ) from None
    from pyarrow import ArrowException

    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise UserError(f"data.path={path}: not a readable Parquet file: {str(error).splitlines()[0]}") from None
    for number, row in enumerate(rows, start=1):
        yield check(row, f"{path}: row {number}")
