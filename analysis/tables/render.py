"""A laid-out table as Markdown, LaTeX (booktabs), CSV, HTML and in the terminal."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from .spec import Block, Cell, Header, Table

SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
WIDE = 120  # columns when the output is no terminal and says no width
TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": "$-$", "±": r"$\pm$", "Δ": r"$\Delta$", "–": "--", "✓": r"$\checkmark$",
    "µ": r"$\mu$", "≤": r"$\leq$", "β": r"$\beta$", "τ": r"$\tau$", "×": r"$\times$", "→": r"$\rightarrow$", "§": r"\S", "·": r"$\cdot$",
}  # fmt: skip


def _marked(cell: Cell) -> str:
    return cell.text + ",".join(map(str, cell.marks)).translate(SUPERSCRIPTS).replace(",", "˒")


def _md(cell: Cell) -> str:
    text = cell.text.replace("|", "\\|").replace("\n", " ")
    return (f"**{text}**" if cell.bold else text) + "".join(f"[^{n}]" for n in cell.marks)


def markdown(table: Table) -> str:
    """GitHub-flavoured Markdown: title, one table a block, notes, footnotes, what is missing."""
    out = [f"### {table.title}", "", f"Scale: {table.scale}", ""]
    if table.refused:
        out += [f"**Refused.** {table.refused}", ""]
    for block in table.blocks:
        if block.title:
            out += [f"**{block.title}**", ""]
        out.append("| " + " | ".join(h.text.replace("|", "\\|") for h in block.headers) + " |")
        out.append("|" + "|".join(" --- " if h.kind == "label" else " ---: " for h in block.headers) + "|")
        out += ["| " + " | ".join(_md(c) for c in row) + " |" for row in block.rows]
        out.append("")
    out += [f"- {note}" for note in table.notes]
    if table.footnotes:
        out += ["", *(f"[^{i}]: {text}" for i, text in enumerate(table.footnotes, 1))]
    if table.commands:
        out += ["", "Missing arms are made by:", "", *(f"    {c}" for c in table.commands)]
    return "\n".join(out).rstrip() + "\n"


def tex_escape(text: str) -> str:
    """Text safe in LaTeX, with mathematical signs in math mode."""
    return "".join(TEX.get(c, c) for c in text)


def latex(table: Table) -> str:
    """LaTeX for booktabs and amssymb (check marks): one ``table`` environment a block, through pandas' Styler."""
    out = [f"% {table.title} (scale: {table.scale}); needs booktabs, amssymb"]
    for number, block in enumerate(table.blocks):
        frame = pd.DataFrame([[_tex(c) for c in row] for row in block.rows])
        frame.columns = [tex_escape(h.text) for h in block.headers]
        caption = tex_escape(f"{table.title} ({table.scale}{f', {block.title}' if block.title else ''})")
        form = "".join("l" if h.kind == "label" else "r" for h in block.headers)
        label = f"tab:{table.name}-{table.scale}" + (f"-{number}" if number else "")
        text = frame.style.hide(axis="index").to_latex(hrules=True, column_format=form, caption=caption, label=label, position="t")
        out.append(_with_rules(text, block.groups))
    if table.refused:
        out.append(f"% refused: {table.refused}")
    notes = [*table.notes, *(f"({i}) {t}" for i, t in enumerate(table.footnotes, 1))]
    out += [r"% notes", *(rf"\par\footnotesize {tex_escape(n)}" for n in notes if table.blocks)]
    return "\n".join(out) + "\n"


def _tex(cell: Cell) -> str:
    text = tex_escape(cell.text)
    marks = "".join(rf"\textsuperscript{{{n}}}" for n in cell.marks)
    return (rf"\textbf{{{text}}}" if cell.bold else text) + marks


def _with_rules(text: str, groups: Sequence[int]) -> str:
    """A rule before each group of rows but the first."""
    lines, out, row = text.splitlines(), [], None
    for line in lines:
        if row is not None and line.rstrip().endswith(r"\\"):
            if row in groups and row:
                out.append(r"\midrule")
            row += 1
        if line.strip() == r"\midrule" and row is None:
            row = 0
        out.append(line)
    return "\n".join(out)


def csv(table: Table) -> str:
    """Plain numbers, one line a row: value, spread, number of seeds, source, printed value and error of each metric."""
    buffer = io.StringIO()
    pd.DataFrame(table.raw).to_csv(buffer, index=False)
    return buffer.getvalue()


def html_table(table: Table) -> str:
    """HTML of the blocks (no page around them); long tables scroll inside their own box."""
    out = []
    for block in table.blocks:
        if block.title:
            out.append(f'<p class="origin">{html.escape(block.title)}</p>')
        out.append('<div class="scroll" tabindex="0"><table>')
        out.append("<thead><tr>" + "".join(f'<th scope="col" class="{h.kind}">{html.escape(h.text)}</th>' for h in block.headers) + "</tr></thead>")
        out.append("<tbody>")
        for i, row in enumerate(block.rows):
            first = ' class="group"' if i in block.groups and i else ""
            out.append(f"<tr{first}>" + "".join(_html(c, h) for c, h in zip(row, block.headers)) + "</tr>")
        out.append("</tbody></table></div>")
    return "\n".join(out)


def _html(cell: Cell, header: Header) -> str:
    text = html.escape(cell.text)
    text = f"<b>{text}</b>" if cell.bold else text
    marks = f"<sup>{','.join(map(str, cell.marks))}</sup>" if cell.marks else ""
    kind = header.kind if header.kind != "ours" or cell.kind != "status" else "status"
    tag = 'th scope="row"' if kind == "label" else "td"
    return f'<{tag} class="{kind}">{text}{marks}</{tag.split()[0]}>'


def write(table: Table, out: Path) -> list[Path]:
    """Write ``<name>_<scale>.{md,tex,csv}``; returns the paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, render in (("md", markdown), ("tex", latex), ("csv", csv)):
        path = out / f"{table.name}_{table.scale}.{suffix}"
        path.write_text(render(table), encoding="utf-8")
        paths.append(path)
    return paths


# -- terminal ----------------------------------------------------------------------------------------------------------


def terminal(table: Table, console: Console | None = None) -> None:
    """Print a table at the terminal's width: columns that do not fit go into further panels under the same row labels."""
    console = console or Console()
    if not console.is_terminal and "COLUMNS" not in console._environ:
        console = Console(file=console.file, width=WIDE)
    console.print()
    console.print(Text(f"{table.title}  [scale: {table.scale}]", style="bold"))
    if table.refused:
        console.print(Text(f"refused: {table.refused}", style="red"))
    for block in table.blocks:
        if block.title:
            console.print(Text(block.title, style="italic"))
        for columns in _panels(block, console.width):
            console.print(_rich(block, columns))
    for note in table.notes:
        console.print(Text(note, style="dim"))
    for i, text in enumerate(table.footnotes, 1):
        console.print(Text(f"{str(i).translate(SUPERSCRIPTS)} {text}", style="dim"))
    if table.commands:
        console.print(Text("Missing arms are made by:"))
        for line in table.commands:
            console.print(Text(f"  {line}"), soft_wrap=True)


def _widths(block: Block) -> list[int]:
    """Width of each column: its widest cell, or its heading folded at spaces into as many lines as it takes."""
    widths = []
    for i, h in enumerate(block.headers):
        heading = max(len(word) for word in h.text.split())
        widths.append(max([heading, *(len(_marked(row[i])) for row in block.rows)]) + 2)
    return widths


def _panels(block: Block, width: int) -> list[list[int]]:
    """Column indices of each panel: the labels, then whole metrics (ours, paper, error) as far as they fit."""
    widths = _widths(block)
    labels = [i for i, h in enumerate(block.headers) if h.kind == "label"]
    # A label column whose value never changes goes into the first panel only when there is room; it still names the rows.
    units: list[list[int]] = []
    for i, h in enumerate(block.headers):
        if h.kind == "label":
            continue
        if h.kind == "ours" or not units:
            units.append([i])
        else:
            units[-1].append(i)
    base = sum(widths[i] for i in labels)
    panels: list[list[int]] = []
    room = -1
    for unit in units:
        need = sum(widths[i] for i in unit)
        if need > room:
            panels.append(list(labels))
            room = width - base
        panels[-1] += unit
        room -= need
    return panels or [labels]


def _rich(block: Block, columns: list[int]) -> RichTable:
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    for i in columns:
        h = block.headers[i]
        style = {"published": "cyan", "error": "dim"}.get(h.kind)
        grid.add_column(h.text, justify="left" if h.kind == "label" else "right", no_wrap=False, style=style, overflow="fold")
    seen: list[str] = []
    for n, row in enumerate(block.rows):
        if n in block.groups and n:
            grid.add_section()
            seen = []
        cells = []
        for place, i in enumerate(columns):
            cell = row[i]
            text = Text(_marked(cell), style="bold" if cell.bold else ("yellow" if cell.kind == "status" else ""))
            if block.headers[i].kind == "label" and n and seen[place : place + 1] == [cell.text] and place < _last_label(block):
                text = Text("")
            cells.append(text)
        seen = [row[i].text for i in columns]
        grid.add_row(*cells)
    return grid


def _last_label(block: Block) -> int:
    return sum(h.kind == "label" for h in block.headers) - 1
