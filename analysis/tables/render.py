"""A laid-out table as Markdown, LaTeX (booktabs, through pandas' Styler), CSV (pandas) and HTML (a Jinja macro)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from .spec import Block, Cell, Table

_MATH = dict(
    zip(
        "−±Δ✓µ≤≥≈βτ×→·",
        [
            r"-",
            r"\pm",
            r"\Delta",
            r"\checkmark",
            r"\mu",
            r"\leq",
            r"\geq",
            r"\approx",
            r"\beta",
            r"\tau",
            r"\times",
            r"\rightarrow",
            r"\cdot",
        ],
    )
)
_TEXT = [r"\textbackslash{}", r"\textasciitilde{}", r"\textasciicircum{}", r"--", r"\S{}", r"\ldots{}"]
TEX = dict(zip("\\~^–§…", _TEXT)) | {sign: f"${command}$" for sign, command in _MATH.items()}
TEX |= {c: "\\" + c for c in "&%$#_{}"}
PORTRAIT = 76  # characters of a line, gaps of two included, that \footnotesize fits between the margins of a page
PACKAGES = "booktabs, amssymb, multirow, adjustbox and rotating"


def _bar(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _md(cell: Cell) -> str:
    text = _bar(cell.text)
    return (f"**{text}**" if cell.bold else text) + "".join(f"[^{n}]" for n in cell.marks)


def markdown(table: Table) -> str:
    """GitHub-flavoured Markdown: title, one table per block, notes, footnotes, what is missing."""
    out = [f"### {table.title}", "", f"Scale: {table.scale}", ""]
    if table.refused:
        out += [f"**Refused.** {table.refused}", ""]
    for block in table.blocks:
        if block.title:
            out += [f"**{block.title}**", ""]
        out.append("| " + " | ".join(_bar(h.text) for h in block.headers) + " |")
        out.append("|" + "|".join(" --- " if h.kind == "label" else " ---: " for h in block.headers) + "|")
        out += ["| " + " | ".join(_md(c) for c in row) + " |" for row in block.rows]
        out.append("")
    out += [f"- {note}" for note in table.notes]
    if table.footnotes:
        out += ["", *(f"[^{i}]: {text}" for i, text in enumerate(table.footnotes, 1))]
    if table.commands:
        out += ["", "Missing arms are made by:", "", *(f"    {c}" for c in table.commands)]
    return "\n".join(out).rstrip() + "\n"


# -- LaTeX -------------------------------------------------------------------------------------------------------------


def tex_escape(text: str) -> str:
    """Text safe in LaTeX, mathematical signs in math mode; other signs beyond ASCII are written as their code."""
    return "".join(TEX.get(c, c if c.isascii() else rf"\symbol{{{ord(c)}}}") for c in text)


def _tex(cell: Cell) -> str:
    text = tex_escape(cell.text)
    marks = "".join(rf"\textsuperscript{{{n}}}" for n in cell.marks)
    return (rf"\textbf{{{text}}}" if cell.bold else text) + marks


def latex(table: Table) -> str:
    """LaTeX: one ``table`` per block, sideways where a page is too narrow for it, with the notes below."""
    out = [f"% {table.title} (scale: {table.scale}); needs {PACKAGES}"]
    if table.refused:
        out.append(f"% refused: {' '.join(table.refused.split())}")
    notes = [*table.notes, *(f"({i}) {t}" for i, t in enumerate(table.footnotes, 1))]
    for number, block in enumerate(table.blocks):
        below = "".join(rf"\par{{\footnotesize {tex_escape(n)}}}" + "\n" for n in notes)
        out.append(_tex_block(table, block, number, below))
        notes = []
    return "\n".join(out) + "\n"


def _tex_block(table: Table, block: Block, number: int, below: str) -> str:
    headings = block.headings()
    columns = [i for i in range(len(block.headers)) if i not in headings]
    frame = pd.DataFrame([[_tex(row[i]) for i in columns] for row in block.rows])
    names = [block.headers[i] for i in columns]
    frame.columns = pd.MultiIndex.from_tuples([_over(tex_escape(h.group), h.sub, h.kind) for h in names])
    text = frame.style.hide(axis="index").to_latex(
        hrules=True, multicol_align="c", column_format="".join("l" if h.kind == "label" else "r" for h in names)
    )
    titles = {g.start: " · ".join(block.rows[g.start][i].text for i in headings) for g in block.members()}
    text = _with_groups(text, titles if block.groups else {}, len(columns))
    wide = [max([len(h.sub or h.group), *(len(row[i].text) for row in block.rows)]) + 2 for i, h in zip(columns, names)]
    kind = "table" if sum(wide) <= PORTRAIT else "sidewaystable"
    where = f"{table.scale}, {block.title}" if block.title else table.scale
    title = re.sub(r"^(?:MESH )?Table \d+: ", "", table.title)  # LaTeX numbers its tables itself
    label = f"tab:{table.name}-{table.scale}" + (f"-{number}" if number else "")
    begin = rf"\begin{{{kind}}}" + ("[t]" if kind == "table" else "")
    caption = rf"\caption{{{tex_escape(f'{title} ({where}).')}}}" + "\n" + rf"\label{{{label}}}"
    size = r"\footnotesize\setlength{\tabcolsep}{3pt}"
    fitted = r"\begin{adjustbox}{max width=\linewidth}" + f"\n{text.rstrip()}\n" + r"\end{adjustbox}"
    return f"{begin}\n{caption}\n{size}\n{fitted}\n{below}\\end{{{kind}}}"


def _over(group: str, sub: str, kind: str) -> tuple[str, str]:
    """Two lines of headings: the metric over ours, the printed value and the error."""
    return ("", group) if kind == "label" else (group, tex_escape(sub))


def _with_groups(text: str, titles: dict[int, str], columns: int) -> str:
    r"""A ``\midrule`` before each group of rows but the first, and the group's name where its rows share one."""
    out: list[str] = []
    row: int | None = None
    for line in text.splitlines():
        if row is not None and line.rstrip().endswith(r"\\"):
            if row in titles:
                out += [r"\midrule"] if row else []
                name = rf"\multicolumn{{{columns}}}{{l}}{{\textit{{{tex_escape(titles[row])}}}}} \\"
                out += [name] if titles[row] else []
            row += 1
        elif line.strip() == r"\midrule":
            row = 0
        out.append(line)
    return "\n".join(out)


# -- files -------------------------------------------------------------------------------------------------------------


def csv(table: Table) -> str:
    """Plain numbers, one line a row: value, spread, number of seeds, source, printed value and error of each metric."""
    return pd.DataFrame(table.raw).to_csv(index=False)


RENDERERS: Sequence[tuple[str, Callable[[Table], str]]] = (("md", markdown), ("tex", latex), ("csv", csv))


def write(table: Table, out: Path) -> list[Path]:
    """Write ``<name>_<scale>.{md,tex,csv}``; returns the paths."""
    paths = []
    for suffix, render in RENDERERS:
        path = out / f"{table.name}_{table.scale}.{suffix}"
        path.write_text(render(table), encoding="utf-8")
        paths.append(path)
    return paths
