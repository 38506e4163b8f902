"""The commands' work: load once, build, write, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sonar_repro.errors import UserError

from .axes import command
from .collection import Collection, collections
from .conf import SCALES
from .records import load
from .tables import Spec, specs_for
from .tables.build import build
from .tables.render import write
from .tables.spec import Table
from .tables.terminal import terminal

if TYPE_CHECKING:  # matplotlib is loaded only where something is drawn
    from .figures import FigureSpec


def writable(out: Path) -> Path:
    """Create the output folder. Raises UserError if that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; give a folder that can be written") from error
    return out


def scales_of(spec: Spec, origins: list[Collection], scale: str | None, default: bool) -> list[str]:
    """Scales at which to build a table: the one asked, else those recorded for its experiment, else smoke if named."""
    if scale is not None:
        return [scale] if scale in spec.scales else []
    recorded = {s for o in origins for s in o.scales(spec.experiments)}
    found = [s for s in spec.scales if s in recorded]
    return found or (["smoke"] if default and "smoke" in spec.scales else [])


def build_tables(origins: list[Collection], name: str | None = None, scale: str | None = None) -> list[Table]:
    """All tables asked for, in the papers' order. Raises UserError for an unknown table or scale."""
    if scale is not None and scale not in SCALES:
        raise UserError(f"--scale {scale}: unknown; choose {', '.join(SCALES)}")
    specs = specs_for(origins, name)
    named = name is not None
    made = [build(spec, s, origins) for spec in specs for s in scales_of(spec, origins, scale, default=named)]
    return made if named else [t for t in made if t.has_records or t.refused]


def _maker(name: str | None, scale: str | None, origins: list[Collection]) -> str:
    """The command that makes the records of a table."""
    spec = specs_for(origins, name)[0]
    return command(spec.experiment, scale or spec.scales[0], [])[0]


def write_tables(runs: Path, out: Path, *, name: str | None, scale: str | None, show: bool) -> int:
    """The ``tables`` command. Exit code 2 if a comparison was refused."""
    origins = collections(load(runs))
    made = build_tables(origins, name, scale)
    writable(out)
    for t in made:  # all are written before any is printed: a closed pipe loses none
        write(t, out)
    refused = [t for t in made if t.refused]
    for t in refused:
        print(f"error: {t.refused}", file=sys.stderr)
    for t in made if show else []:
        terminal(t)
    if not made:
        print(f"nothing to show from {runs}; make records: {_maker(name, scale, origins)}", file=sys.stderr)
    elif not show:
        print(f"{len(made)} tables in {out}")
    return 2 if refused else 0


def figure_scales(spec: FigureSpec, origins: list[Collection], scale: str | None) -> list[str]:
    """Scales at which a figure may be drawn."""
    recorded = {s for o in origins for s in o.scales(spec.reads())}
    return [s for s in spec.scales if (s == scale if scale else s in recorded)]


def figure_jobs(
    origins: list[Collection], name: str | None = None, scale: str | None = None
) -> list[tuple[FigureSpec, str]]:
    """Every figure asked for and the scales at which there are records for it."""
    from .figures import FIGURES, figure

    if scale is not None and scale not in SCALES:
        raise UserError(f"--scale {scale}: unknown; choose {', '.join(SCALES)}")
    specs = [figure(name)] if name else list(FIGURES.values())
    return [(spec, s) for spec in specs for s in figure_scales(spec, origins, scale)]


def write_figures(runs: Path, out: Path, *, name: str | None, scale: str | None) -> int:
    """The ``figures`` command: ``<name>_<scale>.pdf`` and ``.png``, and the command of what cannot be drawn yet."""
    from .figures import FIGURES
    from .figures.render import render_all

    origins = collections(load(runs))
    rendered = render_all(figure_jobs(origins, name, scale), origins, ("png", "pdf"))
    writable(out)
    for r in rendered:
        for kind, content in r.files.items():
            (out / f"{r.name}_{r.scale}.{kind}").write_bytes(content)
        if r.missing:
            spec = FIGURES[r.name]
            print(
                f"{spec.title} [{r.scale}]: arms are missing; {command(spec.experiment, r.scale, [])[0]}",
                file=sys.stderr,
            )
    count = sum(bool(r.files) for r in rendered)
    print(f"{count} figures in {out}" if count else f"no figure can be drawn from {runs}")
    return 0


def write_report(runs: Path, out: Path) -> int:
    """The ``report`` command: ``report.html``. Exit code 2 if a comparison was refused (the page says which)."""
    from .figures.render import render_all
    from .report import page

    loaded = load(runs)
    origins = collections(loaded)
    tables = build_tables(origins)
    text = page(loaded, origins, tables, render_all(figure_jobs(origins), origins, ("svg",)))
    path = writable(out) / "report.html"
    path.write_text(text, encoding="utf-8")
    print(path)
    refused = [t.refused for t in tables if t.refused]
    for line in refused:
        print(f"error: {line}", file=sys.stderr)
    return 2 if refused else 0


def write_claims(runs: Path, out: Path, *, paper: str | None = None) -> int:
    """The ``claims`` command: prints every claim with its verdict, writes ``claims.md`` and ``claims.json``."""
    from .claims import judged
    from .claims.show import as_json, markdown, show

    found = [(claim, verdict) for claim, verdict in judged(collections(load(runs))) if paper in (None, claim.paper)]
    writable(out)
    (out / "claims.md").write_text(markdown(found), encoding="utf-8")
    (out / "claims.json").write_text(as_json(found), encoding="utf-8")
    show(found)
    return 0
