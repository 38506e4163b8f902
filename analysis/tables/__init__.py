"""All tables by name. A paper's table is one entry of ``specs.yaml``; a table of another form is one ``Custom``."""

from __future__ import annotations

import difflib
from importlib import resources
from typing import Any

import yaml

from sonar_repro.errors import UserError

from ..collection import Collection
from ..conf import LOADER
from . import fits, forecast_memory, forecast_time, mechanisms, mesh
from .spec import Column, Custom, TableSpec

Spec = TableSpec | Custom


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}


def _column(data: dict[str, Any]) -> Column:
    inner: dict[str, Any] = {k: _tuples(data[k]) for k in ("where", "applies") if k in data}
    fields: dict[str, Any] = {**_tuples(data), **inner}
    return Column(**fields)


def _spec(data: dict[str, Any]) -> TableSpec:
    """One entry of specs.yaml; its experiment has its name where it names no other."""
    made = {"experiment": data["name"], **_tuples(data)}
    made |= {"labels": tuple(data["labels"].items()), "columns": tuple(_column(c) for c in data["columns"])}
    return TableSpec(**made)


def _declared() -> list[TableSpec]:
    text = resources.files(__package__).joinpath("specs.yaml").read_text(encoding="utf-8")
    return [_spec(entry) for entry in yaml.load(text, Loader=LOADER)]


_SPECS = _declared()
_ALL: list[Spec] = [s for s in _SPECS if s.paper != "mesh"]
_ALL += [*forecast_memory.TABLES, *forecast_time.TABLES, *mechanisms.TABLES, *fits.TABLES]
_ALL += [*(s for s in _SPECS if s.paper == "mesh"), *mesh.TABLES]
TABLES: dict[str, Spec] = {t.name: t for t in _ALL}
# figure2 holds timelines, drawn as a figure
COVERED = {e for t in TABLES.values() for e in t.experiments} | {"figure2"}


def specs_for(origins: list[Collection], name: str | None = None) -> list[Spec]:
    """The tables asked for: all, and a plain one for each further experiment that was recorded; or the named one.

    Raises UserError for an unknown name, with near matches.
    """
    everything: dict[str, Spec] = {**TABLES, **{t.name: t for t in _others(origins)}}
    if name is None:
        return list(everything.values())
    if name not in everything:
        near = difflib.get_close_matches(name, everything, 3) or list(everything)
        raise UserError(f"--table {name}: unknown; choose {', '.join(near)}")
    return [everything[name]]


def _others(origins: list[Collection]) -> list[TableSpec]:
    """A plain table for each recorded experiment that has none of its own (the user's sweeps)."""
    names = {r.experiment for o in origins for r in o.records if r.readable} - COVERED
    panels = {"peak_allocated_gb": "memory", "peak_reserved_gb": "memory", "step_ms": "time", "tokens_per_s": "time"}
    panels |= {"heldout_loss": "quality", "optimizer_calls": "counts"}
    return [
        TableSpec(
            name=f"experiment_{name}" if name in TABLES else name,  # never in place of a table of ours
            title=f"Experiment {name}",
            experiment=name,
            labels=(("model", "Model"), ("backend", "Backend"), ("method", "Method")),
            columns=tuple(Column(m, panel=panel) for m, panel in panels.items()),
            paper=None,
        )
        for name in sorted(names)
    ]
