"""All tables by name. A new table is one spec in one of the modules below."""

from __future__ import annotations

import difflib

from sonar_repro.errors import UserError

from ..collection import Collection
from . import accuracy, mechanisms, mesh, practice, sonar, speed
from .spec import Custom, TableSpec

Spec = TableSpec | Custom
TABLES: dict[str, Spec] = {
    t.name: t
    for t in (
        *sonar.ALL_TABLES,
        *accuracy.TABLES,
        *speed.TABLES,
        *mechanisms.TABLES,
        *practice.TABLES,
        *mesh.ALL_TABLES,
    )
}
COVERED = {e for t in TABLES.values() for e in t.experiments} | {
    "figure2"
}  # figure2 holds timelines, drawn as a figure


def specs_for(origins: list[Collection], name: str | None = None) -> list[Spec]:
    """The tables asked for: all, and a plain one for each further experiment that was recorded; or the named one.

    Raises UserError for an unknown name, with near matches.
    """
    everything = {**TABLES, **{t.name: t for t in practice.others(COVERED, origins)}}
    if name is None:
        return list(everything.values())
    if name not in everything:
        near = difflib.get_close_matches(name, everything, 3) or list(everything)
        raise UserError(f"--table {name}: unknown; choose {', '.join(near)}")
    return [everything[name]]
