"""The commands' work: load once, build, write, print."""

from __future__ import annotations

import sys
from pathlib import Path

from sonar_repro.errors import UserError

from .axes import SCALES
from .collection import Collection, collections
from .records import load
from .tables import TABLES, table
from .tables.build import build
from .tables.render import write
from .tables.spec import Custom, Table, TableSpec
from .tables.terminal import terminal


def writable(out: Path) -> Path:
    """Create the output folder. Raises UserError if that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; give a folder that can be written") from error
    return out


def scales_of(spec: TableSpec | Custom, origins: list[Collection], scale: str | None, default: bool) -> list[str]:
    """Scales at which to build a table: the one asked, else those recorded for its experiment, else smoke if it was
    named.
    """
    if scale is not None:
        return [scale] if scale in spec.scales else []
    recorded = {s for o in origins for s in o.scales(spec.experiments)}
    found = [s for s in spec.scales if s in recorded]
    return found or (["smoke"] if default and "smoke" in spec.scales else [])


def build_tables(origins: list[Collection], name: str | None = None, scale: str | None = None) -> list[Table]:
    """All tables asked for, in the papers' order. Raises UserError for an unknown table or scale."""
    if scale is not None and scale not in SCALES:
        raise UserError(f"--scale {scale}: unknown; choose {', '.join(SCALES)}")
    specs = [table(name)] if name else list(TABLES.values())
    return [
        build(spec, s, origins) for spec in specs for s in scales_of(spec, origins, scale, default=name is not None)
    ]


def write_tables(runs: Path, out: Path, *, name: str | None, scale: str | None, show: bool) -> int:
    """The ``tables`` command. Exit code 2 if a comparison was refused."""
    origins = collections(load(runs))
    made = build_tables(origins, name, scale)
    writable(out)
    for t in made:
        write(t, out)
        if show:
            terminal(t)
    refused = [t for t in made if t.refused]
    for t in refused:
        print(f"error: {t.refused}", file=sys.stderr)
    if not made:
        print(f"no records under {runs}; make some: python -m sonar_repro +experiment=table1", file=sys.stderr)
    elif not show:
        print(f"{len(made)} tables in {out}")
    return 2 if refused else 0
