"""mkdocs hook: a line ``{{ table NAME }}`` becomes that table, made from the committed records as the page is built.

A table is never pasted into a page: what a reader sees is what ``python -m analysis tables`` prints today.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^\{\{ table (\w+)(?: (\w+))? \}\}$", re.MULTILINE)
_folder = tempfile.TemporaryDirectory(prefix="sonar_repro-docs-")


def on_pre_build(config: object) -> None:
    """Make every table once, from the committed records alone."""
    command = [sys.executable, "-m", "analysis", "tables", "--runs", str(ROOT / "runs"), "--out", _folder.name]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the tables in. A name without a table stops the build."""
    return LINE.sub(lambda match: _table(match[1], match[2] or "forecast"), markdown)


def _table(name: str, scale: str) -> str:
    found = sorted(Path(_folder.name).rglob(f"{name}_{scale}.md"))
    if not found:
        raise FileNotFoundError(f"docs: there is no table {name} at scale {scale}; see python -m analysis tables")
    text = found[0].read_text(encoding="utf-8")
    return re.sub(r"\[\^(\d+)\]", rf"[^{name}-\1]", text)  # footnotes of two tables on a page stay apart
