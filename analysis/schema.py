"""What a record may hold: the types of ``schema.yaml``, and strict JSON without what breaks readers."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

from sonar_repro.records import REQUIRED, SCHEMA_VERSION, STATUSES

DIVERGED = "diverged"
ALL_STATUSES = tuple(dict.fromkeys((*STATUSES, DIVERGED)))
SCHEMA_MAJOR = int(SCHEMA_VERSION.split(".", 1)[0])
REQUIRED_OK = {"train": ("data", "memory", "time", "loss", "counts")}  # by task, when the status is ok
LARGEST = 2**63  # bytes, counts and seeds stay below; beyond it floats lose and formats fail
DEEPEST = 60
# A name becomes part of a file's name and of a table's label: no separators, no control characters.
NAME = re.compile(r"(?!\.{1,2}$)[^/\\\x00-\x1f\x7f-\x9f\u2028\u2029]{1,200}")
VERSION = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){0,3}")


class Damaged(ValueError):
    """A record file that cannot be counted; its text is the reason."""


# -- strict JSON -------------------------------------------------------------------------------------------------------


def _refuse_constant(name: str) -> Any:
    raise Damaged(f"holds {name}, which strict JSON does not have")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or abs(value) > 1e100:  # sums and squares stay finite
        raise Damaged(f"holds the number {text[:40]}, which is no sensible float")
    return value


def _whole(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= LARGEST:
        raise Damaged(f"holds an integer of {len(text.lstrip('-'))} digits")
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise Damaged("holds the same key twice")
    return made


def parse(text: str) -> dict[str, Any]:
    """Strict JSON object. Raises :class:`Damaged` with the reason."""
    try:
        data = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole, object_pairs_hook=_unique
        )
    except json.JSONDecodeError as error:
        raise Damaged(f"not JSON (line {error.lineno}: {error.msg})") from error
    except RecursionError as error:
        raise Damaged("nested too deeply") from error
    if not isinstance(data, dict):
        raise Damaged("not a JSON object")
    if "\\u" in text:  # only an escape can bring in half a surrogate: the file itself is UTF-8
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Damaged("holds half a surrogate, which is no text") from error
    return data


def _depth(value: Any, left: int = DEEPEST) -> bool:
    """Whether the value is nested at most ``left`` deep."""
    if not isinstance(value, (dict, list)):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return left > 0 and all(_depth(v, left - 1) for v in inner if isinstance(v, (dict, list)))


# -- shapes ------------------------------------------------------------------------------------------------------------


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# What each word of schema.yaml stands for: its test, and how a message calls it.
KINDS = {
    "name": (lambda v: isinstance(v, str) and bool(NAME.fullmatch(v)), "a plain name"),
    "text": (lambda v: isinstance(v, str) and "\x00" not in v, "a text"),
    "bool": (lambda v: isinstance(v, bool), "true or false"),
    "int": (lambda v: isinstance(v, int) and not isinstance(v, bool), "a whole number"),
    "count": (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1, "a whole number from one up"),
    "number": (_number, "a number"),
    "size": (lambda v: _number(v) and 0 <= v < 1e25, "a sensible number from zero up"),
    "scalar": (lambda v: not isinstance(v, (dict, list)), "a text or a number"),
}


@functools.cache
def shape() -> dict[str, Any]:
    """The content of schema.yaml."""
    text = resources.files(__package__).joinpath("schema.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def check(value: Any, shape: Any, where: str = "") -> None:
    """Hold a value against a shape of schema.yaml. Raises :class:`Damaged` naming the dotted key."""
    if value is None:
        return
    if isinstance(shape, Mapping):
        _is(isinstance(value, dict), where, "an object")
        for key, inner in value.items():
            if key in shape or "*" in shape:
                check(inner, shape.get(key, shape.get("*")), f"{where}.{key}" if where else key)
    elif isinstance(shape, list):
        _is(isinstance(value, list), where, "a list")
        for inner in value:
            check(inner, shape[0], where)
    else:
        test, words = KINDS[shape]
        _is(test(value), where, words)


def _is(found: bool, where: str, what: str) -> None:
    if not found:
        raise Damaged(f"{where} is not {what}")


def schema_major(data: Mapping[str, Any]) -> int | None:
    """The integer before the first point of ``schema_version``; None if that is no version."""
    version = data.get("schema_version")
    found = isinstance(version, str) and VERSION.fullmatch(version)
    return int(found[0].split(".", 1)[0]) if found else None


def validate(data: dict[str, Any]) -> None:
    """Required keys and the type of every key that is read, for our schema major. Raises :class:`Damaged`."""
    missing = [key for key in REQUIRED if key not in data]
    if missing:
        raise Damaged(f"lacks {', '.join(missing)}")
    if schema_major(data) is None:
        raise Damaged(f"schema_version is {str(data['schema_version'])[:40]!r}, not a version")
    _is(isinstance(data["arm"], dict) and data["arm_id"] is not None, "arm or arm_id", "there")
    check(data["arm_id"], "name", "arm_id")
    for key in ("experiment", "scale"):
        _is(data["arm"].get(key) is not None, f"arm.{key}", "there")
        check(data["arm"][key], "name", f"arm.{key}")
    if schema_major(data) != SCHEMA_MAJOR:
        return  # its other keys are unknown to us
    if data["status"] not in ALL_STATUSES:
        raise Damaged(f"status is {str(data['status'])[:40]!r}, not one of {', '.join(ALL_STATUSES)}")
    _is(_depth(data), "a value", f"nested at most {DEEPEST} deep")
    check(data, shape())
    if data["status"] == "ok":
        lacks = [key for key in REQUIRED_OK.get(data["arm"].get("task") or "train", ()) if key not in data]
        if lacks:
            raise Damaged(f"status is ok and yet it lacks {', '.join(lacks)}")
