"""The user's own rows: a JSONL, JSON or Parquet file, checked row by row, with the file and line of what is wrong."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
_BOM = b"\xef\xbb\xbf"
Check = Callable[[Any, str], Any]


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
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
            # repr: a name may hold a line break or half a surrogate pair
            present = ", ".join(repr(name)[1:-1][:40] for name in list(row)[:10]) or "none"
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


def check_file(path: str | Path) -> Path:
    """The file at ``path`` (``~`` is the home folder), which a run can read, and whose kind is known.

    Raises:
        UserError: nothing there, a folder, a pipe or device, no permission, or an unknown kind.
    """
    file = Path(os.path.expanduser(path))
    try:
        mode = os.stat(file).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"data.path={path}: no such file; give a JSONL, JSON or Parquet file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UserError(f"data.path={path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(mode):
        raise UserError(f"data.path={path}: is a folder; name one JSONL, JSON or Parquet file in it")
    if not stat.S_ISREG(mode):
        raise UserError(
            f"data.path={path}: is a pipe, socket or device, whose content counts once only; write it to a file"
        )
    if file.suffix.lower() not in SUFFIXES:
        raise UserError(
            f"data.path={path}: unknown kind {file.suffix or '(no suffix)'!r}: use .jsonl, .json or .parquet"
        )
    if not os.access(file, os.R_OK):
        raise UserError(f"data.path={path}: cannot be read: permission denied")
    return file


def read_rows(path: str | Path, check: Check) -> list[Any]:
    """Read a JSONL (one object a line, blank lines skipped), JSON (a list, or lines) or Parquet file.

    Raises:
        UserError: as :func:`check_file`; no rows; or a bad row, with its file and line.
    """
    file = check_file(path)
    kind = SUFFIXES[file.suffix.lower()]
    rows = list(_read_parquet(file, check) if kind == "parquet" else _read_json(file, check, kind))
    if not rows:
        raise UserError(f"data.path={path}: no rows")
    return rows


def _read_json(path: Path, check: Check, kind: str) -> Iterator[Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"data.path={path}: cannot be read: {error.strerror}") from error
    if kind == "json" and raw.removeprefix(_BOM).lstrip()[:1] == b"[":
        for number, row in enumerate(_parse(raw, path, 1, "not JSON"), start=1):
            yield check(row, f"{path}: item {number} of the list")
        return
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            yield check(_parse(line, path, number, "not a JSON object on one line"), f"{path}:{number}")


def _parse(raw: bytes, path: Path, line: int, otherwise: str) -> Any:
    """The JSON value of ``raw``, which starts at ``line`` of the file; a refusal names the line of the fault."""

    def fault(position: int, says: str) -> UserError:
        return UserError(f"{path}:{line + raw.count(10, 0, position)}: {says}")

    if b"\0" in raw:
        says = "holds a NUL byte, as UTF-16 and binary files do: save it as UTF-8 text"
        raise fault(raw.index(b"\0"), says)
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        at = error.start + (len(_BOM) if raw.startswith(_BOM) else 0)
        raise fault(at, f"not UTF-8 (byte 0x{raw[at]:02x}): save it as UTF-8 text") from None
    except json.JSONDecodeError as error:
        says = f"{otherwise}: {error.msg} (column {error.colno})"
        raise UserError(f"{path}:{line + error.lineno - 1}: {says}") from None
    except RecursionError:
        raise fault(0, "not a row: nested too deeply") from None
    except ValueError:  # Python converts no integer of more digits than this
        most = sys.get_int_max_str_digits()
        digits = re.search(rb"[0-9]{%d}" % (most + 1), raw)
        raise fault(digits.start() if digits else 0, f"holds a number of more than {most} digits") from None


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
    except (ArrowException, OSError, ValueError) as error:  # ValueError: text that is not UTF-8
        raise UserError(f"data.path={path}: not a readable Parquet file: {str(error).splitlines()[0]}") from None
    for number, row in enumerate(rows, start=1):
        yield check(row, f"{path}: row {number}")
