"""All tables by name. A new table is one spec in one of the modules below."""

from __future__ import annotations

import difflib

from sonar_repro.errors import UserError

from . import accuracy, sonar
from .spec import Custom, TableSpec

TABLES: dict[str, TableSpec | Custom] = {t.name: t for t in (*sonar.ALL_TABLES, *accuracy.TABLES)}


def table(name: str) -> TableSpec | Custom:
    """The spec of that name. Raises UserError with near matches."""
    if name not in TABLES:
        near = difflib.get_close_matches(name, TABLES, 3) or list(TABLES)
        raise UserError(f"--table {name}: unknown; choose {', '.join(near)}")
    return TABLES[name]
