"""A laid-out table as Markdown, LaTeX (booktabs), CSV and HTML."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from .spec import Block, Cell, Header, Table

_MATH = {
    "−": "-",
    "±": r"\pm",
    "Δ": r"\Delta",
    "✓": r"\checkmark",
    "µ": r"\mu",
    "≤": r"\leq",
    "≥": r"\geq",
    "≈": r"\approx",
}
_MATH |= {"β": r"\beta", "τ": r"\tau", "×": r"\times", "→": r"\rightarrow", "·": r"\cdot"}
TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "§": r"\S{}",
    "…": r"\ldots{}",
}
TEX |= {sign: f"${command}$" for sign, command in _MATH.items()} | {c: "\\" + c for c in "&%$#_{}"}


# -- Markdown ----------------------------------------------------------------------------------------------------------


def _bar(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _md(cell: Cell) -> str:
    text = _bar(cell.text)
    return (f"**{text}**" if cell.bold else text) + "".join(f"[^{n}]" for n in cell.marks)


def markdown(table: Table) -> str:
    """GitHub-flavoured Markdown: title, one table a block, notes, footnotes, what is missing."""
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
    """Text safe in LaTeX, mathematical signs in math mode."""
    return "".join(TEX.get(c, c) for c in text)


def _tex(cell: Cell) -> str:
    text = tex_escape(cell.text)
    marks = "".join(rf"\textsuperscript{{{n}}}" for n in cell.marks)
    return (rf"\textbf{{{text}}}" if cell.bold else text) + marks


def latex(table: Table) -> str:
    """LaTeX for booktabs and amssymb: one ``table`` environment a block, through pandas' Styler, notes below it."""
    out = [f"% {table.title} (scale: {table.scale}); needs booktabs and amssymb"]
    if table.refused:
        out.append(f"% refused: {table.refused}")
    notes = [*table.notes, *(f"({i}) {t}" for i, t in enumerate(table.footnotes, 1))]
    for number, block in enumerate(table.blocks):
        frame = pd.DataFrame([[_tex(c) for c in row] for row in block.rows])
        frame.columns = [tex_escape(h.text) for h in block.headers]
        where = f"{table.scale}, {block.title}" if block.title else table.scale
        text = frame.style.hide(axis="index").to_latex(
            hrules=True,
            column_format="".join("l" if h.kind == "label" else "r" for h in block.headers),
            caption=tex_escape(f"{table.title} ({where})."),
            label=f"tab:{table.name}-{table.scale}" + (f"-{number}" if number else ""),
            position="t",
        )
        below = "".join(rf"\par{{\footnotesize {tex_escape(n)}}}" + "\n" for n in notes)
        out.append(_with_rules(text, block.groups).replace(r"\end{table}", below + r"\end{table}"))
        notes = []
    return "\n".join(out) + "\n"


def _with_rules(text: str, groups: Sequence[int]) -> str:
    r"""A ``\midrule`` before each group of rows but the first."""
    out, row = [], None
    for line in text.splitlines():
        if row is not None and line.rstrip().endswith(r"\\"):
            if row in groups and row:
                out.append(r"\midrule")
            row += 1
        elif line.strip() == r"\midrule" and row is None:
            row = 0
        out.append(line)
    return "\n".join(out)


# -- CSV ---------------------------------------------------------------------------------------------------------------


def csv(table: Table) -> str:
    """Plain numbers, one line a row: value, spread, number of seeds, source, printed value and error of each metric."""
    buffer = io.StringIO()
    pd.DataFrame(table.raw).to_csv(buffer, index=False)
    return buffer.getvalue()


# -- HTML --------------------------------------------------------------------------------------------------------------


def members(block: Block) -> list[range]:
    """Row indices of each group."""
    starts = block.groups or [0]  # a block without groups is one
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(block.rows)])]


def grouped(block: Block) -> list[int]:
    """Label columns that are the same within every group of rows: terminal and HTML make them headings of"
    " the groups."""
    groups = members(block)
    if len(groups) < 2 or all(len(g) == 1 for g in groups):
        return []
    labels = [i for i, h in enumerate(block.headers) if h.kind == "label"]
    return [i for i in labels[:-1] if all(len({block.rows[n][i].text for n in g}) == 1 for g in groups)]


def html_table(table: Table) -> str:
    """The blocks as HTML without a page around them; a wide table scrolls inside its own box."""
    out = []
    for block in table.blocks:
        if block.title:
            out.append(f'<p class="origin">{html.escape(block.title)}</p>')
        name = html.escape(f"{table.title}, {table.scale}", quote=True)
        headings = grouped(block)
        shown = [i for i in range(len(block.headers)) if i not in headings]
        out.append(f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table>')
        out.append(f"{_html_head(block, shown)}<tbody>")
        for group in members(block):
            if headings:
                title = html.escape(" · ".join(block.rows[group.start][i].text for i in headings))
                span = f'<th scope="rowgroup" colspan="{len(shown)}"><span>{title}</span></th>'
                out.append(f'<tr class="heading">{span}</tr>')
            for n in group:
                first = ' class="group"' if n == group.start and n and not headings else ""
                out.append(f"<tr{first}>{''.join(_html(block.rows[n][i], block.headers[i]) for i in shown)}</tr>")
        out.append("</tbody></table></div>")
    return "\n".join(out)


def _html(cell: Cell, header: Header) -> str:
    text = html.escape(cell.text)
    text = f"<b>{text}</b>" if cell.bold else text
    marks = f"<sup>{','.join(map(str, cell.marks))}</sup>" if cell.marks else ""
    if header.kind == "label":
        return f'<th scope="row">{text}{marks}</th>'
    return f'<td class="{"status" if cell.kind == "status" else header.kind}">{text}{marks}</td>'


def spans(block: Block) -> list[tuple[int, int]]:
    """(start, end) of each metric's columns: ours and what stands beside it; a label column is alone."""
    starts = [i for i, h in enumerate(block.headers) if h.kind in ("ours", "label")]
    return list(zip(starts, [*starts[1:], len(block.headers)]))


def _html_head(block: Block, shown: Sequence[int]) -> str:
    """Two rows of headings: the metric over its own, printed and error columns."""
    top, sub = [], []
    for start, end in spans(block):
        inner = [block.headers[i] for i in range(start, end) if i in shown]
        if not inner:
            continue
        name = html.escape(inner[0].group)
        if len(inner) == 1:
            top.append(f'<th scope="col" rowspan="2" class="{inner[0].kind}">{name}</th>')
        else:
            top.append(f'<th scope="colgroup" colspan="{len(inner)}" class="span">{name}</th>')
            sub += [f'<th scope="col" class="{h.kind}">{html.escape(h.sub or "ours")}</th>' for h in inner]
    return f"<thead><tr>{''.join(top)}</tr><tr>{''.join(sub)}</tr></thead>"


def write(table: Table, out: Path) -> list[Path]:
    """Write ``<name>_<scale>.{md,tex,csv}``; returns the paths."""
    paths = []
    for suffix, render in (("md", markdown), ("tex", latex), ("csv", csv)):
        path = out / f"{table.name}_{table.scale}.{suffix}"
        path.write_text(render(table), encoding="utf-8")
        paths.append(path)
    return paths
