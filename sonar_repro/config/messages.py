"""Hydra's and OmegaConf's errors as one line that names the key, the value and the way out."""

from __future__ import annotations

import dataclasses
import difflib
import re

from .schema import GROUPS, Config

NOISE = (
    "object_type=",
    "reference_type=",
    "full_key:",
    "To append to your",
    "Set the env",
    "Config search path",
    "provider=",
)


def one_line_of(error: Exception) -> str:
    """The single line for a composition error; falls back to the error's own first lines."""
    text = str(error)
    for pattern, build in PATTERNS:
        match = re.search(pattern, text, re.S)
        if match:
            return build(match, error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = " ".join(line for line in lines if not line.startswith(NOISE))
    return kept or type(error).__name__


def known_keys() -> list[str]:
    """Every dotted key of the schema."""
    schema = Config()
    keys = []
    for item in dataclasses.fields(schema):
        value = getattr(schema, item.name)
        keys.append(item.name)
        if dataclasses.is_dataclass(value):
            keys += [f"{item.name}.{inner.name}" for inner in dataclasses.fields(value)]
    return keys


def _near(word: str, options: list[str]) -> str:
    near = difflib.get_close_matches(word, options, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _unknown_option(match: re.Match, error: Exception) -> str:
    group, _, option = match.group(1).rpartition("/")
    options = [line.strip() for line in str(error).splitlines() if line.startswith("\t") and "=" not in line]
    if group not in (*GROUPS, "experiment"):
        return f"{group}={option}: no such group or option; groups: {', '.join((*GROUPS, 'experiment'))}"
    own = f"; a card of yours is one file, conf/gpu/{option}.yaml (copy h100.yaml)" if group == "gpu" else ""
    return f"{group}={option}: no such option{_near(option, options)}; choose one of {', '.join(options)}{own}"


def _unknown_key(match: re.Match, error: Exception) -> str:
    key = match.group(1)
    if key == "experiment":
        return "experiment: is added, not overridden; write +experiment=NAME"
    return f"{key}: no such key{_near(key, known_keys())}; python -m sonar_repro --help lists the keys"


def _bad_value(match: re.Match, error: Exception) -> str:
    cause = error.__cause__
    reason = str(cause).splitlines()[0] if cause else "wrong type"
    return f"{match.group(1)}: {reason}"


def _ambiguous(match: re.Match, error: Exception) -> str:
    quoted = match.group(1).replace(",", "\\,")
    return f"{match.group(1)}: several values are a sweep; add -m, or quote the comma: '{quoted}'"


def _grammar(match: re.Match, error: Exception) -> str:
    return (
        f"override not understood ({match.group(0).splitlines()[0]}); quote values that hold = or , or # twice: "
        "'data.path=\"a=b.jsonl\"'"
    )


PATTERNS = [
    (r"Could not find '([^']+)'", _unknown_option),
    (r"Could not override '([^']+)'", _unknown_key),
    (r"Key '([^']+)' (?:is not in struct|not in)", _unknown_key),
    (r"Error merging override (\S+)", _bad_value),
    (r"Ambiguous value for argument '([^']+)'", _ambiguous),
    (r"(?:mismatched input|extraneous input|token recognition|no viable alternative|missing EQUAL)[^\n]*", _grammar),
]
