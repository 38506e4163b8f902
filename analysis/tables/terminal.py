"""A table in the terminal, at the terminal's width: groups as headings, metrics that do not fit in further panels."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from .spec import Block, Cell, Table

SUPERSCRIPTS = str.maketrans("0123456789,", "⁰¹²³⁴⁵⁶⁷⁸⁹˒")
WIDE = 120  # columns when the output is no terminal and COLUMNS says nothing
STYLES = {"published": "cyan", "error": "dim", "status": "yellow", "label": ""}
GAP = 2


def make_console() -> Console:
    """Standard output; 120 columns wide where nothing tells the width."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=WIDE, highlight=False)
    return console


def terminal(table: Table, console: Console | None = None) -> None:
    """Print the table with its notes, footnotes and the commands of what is missing."""
    console = console or make_console()
    console.print()
    console.print(Text(f"{table.title}  [{table.scale}]", style="bold"))
    if table.refused:
        console.print(Text(f"refused: {table.refused}", style="red"))
    for block in table.blocks:
        if block.title:
            console.print(Text(f"-- {block.title}", style="italic"))
        for columns in panels(block, console.width):
            console.print()
            for part in _parts(block, columns):
                console.print(part)
    console.print()
    for note in table.notes:
        console.print(Text(note, style="dim"))
    for i, text in enumerate(table.footnotes, 1):
        console.print(Text(f"{str(i).translate(SUPERSCRIPTS)} {text}", style="dim"))
    if table.commands:
        console.print(Text("Missing arms are made by:"))
        for line in table.commands:
            console.print(Text(f"  {line}"), soft_wrap=True)


def _text(cell: Cell) -> str:
    return cell.text + ",".join(map(str, cell.marks)).translate(SUPERSCRIPTS)


def _sub(block: Block, i: int) -> str:
    """The lower line over one column: a label's name, or what stands beside our own number."""
    header = block.headers[i]
    return header.group if header.kind == "label" else header.sub


def _top(block: Block, columns: list[int], widths: list[int]) -> str:
    """The upper line: each metric's name over all of its columns."""
    parts = []
    for start, end in (span for span in block.spans() if span[0] in columns):
        room = sum(widths[start:end]) + GAP * (end - start - 1)
        name = "" if block.headers[start].kind == "label" else block.headers[start].group
        parts.append(name.center(room) if end - start > 1 else name.rjust(room))
    return (" " * GAP).join(parts).rstrip()


def _widths(block: Block) -> list[int]:
    """Width of each column: its widest cell or heading; a metric's name may run over what stands beside it."""
    widths = [
        max([len(_sub(block, i)), *(len(_text(row[i])) for row in block.rows)]) for i in range(len(block.headers))
    ]
    for start, end in block.spans():
        short = len(block.headers[start].group) - sum(widths[start:end]) - GAP * (end - start - 1)
        widths[start] += max(0, short)
    return widths


def panels(block: Block, width: int) -> list[list[int]]:
    """Column indices of each panel: the row labels, then whole metrics (ours, paper, error) as far as they fit."""
    headings, widths = block.headings(), _widths(block)
    names = [i for i, h in enumerate(block.headers) if h.kind == "label" and i not in headings]
    base = sum(widths[i] + GAP for i in names)
    made: list[list[int]] = []
    room = -1
    for start, end in block.spans():
        if block.headers[start].kind == "label":
            continue
        need = sum(widths[i] + GAP for i in range(start, end))
        if need > room:
            made.append(list(names))
            room = width + GAP - base
        made[-1] += range(start, end)
        room -= need
    return made or [names]


def _grid(block: Block, columns: list[int], widths: list[int]) -> Grid:
    grid = Grid.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    for i in columns:
        side = "left" if block.headers[i].kind == "label" else "right"
        grid.add_column(justify=side, width=widths[i], no_wrap=True, overflow="crop")  # type: ignore[arg-type]
    return grid


def _parts(block: Block, columns: list[int]) -> Iterator[RenderableType]:
    """One panel: two lines of headings, a rule, then the rows under the headings of their groups."""
    widths = _widths(block)
    if top := _top(block, columns, widths):
        yield Text(top, style="bold", no_wrap=True)
    heads = _grid(block, columns, widths)
    heads.add_row(*(Text(_sub(block, i), style="bold") for i in columns))
    yield heads
    yield Text("─" * (sum(widths[i] + GAP for i in columns) - GAP), no_wrap=True)
    headings = block.headings()
    for group in block.members():
        if group.start:
            yield Text("")
        if headings:
            yield Text(" · ".join(block.rows[group.start][i].text for i in headings), style="bold magenta")
        grid, above = _grid(block, columns, widths), None
        for n in group:
            outer = [block.rows[n][i].text for i in columns if block.headers[i].kind == "label"][:-1]
            grid.add_row(*_styled(block, n, columns, repeat=outer == above))
            above = outer
        yield grid


def _styled(block: Block, n: int, columns: list[int], repeat: bool) -> list[Text]:
    """One row; outer labels that equal those of the row above are left blank."""
    last = max(i for i in columns if block.headers[i].kind == "label")
    made = []
    for i in columns:
        cell, kind = block.rows[n][i], block.headers[i].kind
        blank = kind == "label" and repeat and i != last
        style = "bold" if cell.bold else STYLES.get("status" if cell.kind == "status" else kind, "")
        made.append(Text("" if blank else _text(cell), style=style))
    return made
