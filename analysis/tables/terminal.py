"""A table in the terminal, at the terminal's width: groups as headings, metrics that do not fit in further panels."""

from __future__ import annotations

import os

from rich.console import Console
from rich.text import Text

from .render import grouped, members, spans
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
            for line in lines(block, columns):
                console.print(line, soft_wrap=True)
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


def _labels(block: Block) -> list[int]:
    return [i for i, h in enumerate(block.headers) if h.kind == "label"]


def _width(block: Block, i: int) -> int:
    """Width of one column: its widest cell or its own heading; a metric's name may run over its neighbours."""
    own = len(block.headers[i].sub or "")
    return max([own, *(len(_text(row[i])) for row in block.rows)])


def _fitted(block: Block, columns: list[int]) -> dict[int, int]:
    """Widths of the columns, the first of each metric widened until the metric's name fits over all of them."""
    widths = {i: _width(block, i) for i in columns}
    for start, end in spans(block):
        members = [i for i in range(start, end) if i in widths]
        if members:
            short = len(block.headers[start].group) - sum(widths[i] for i in members) - GAP * (len(members) - 1)
            widths[members[0]] += max(0, short)
    return widths


def panels(block: Block, width: int) -> list[list[int]]:
    """Column indices of each panel: the row labels, then whole metrics (ours, paper, error) as far as they fit."""
    labels = [i for i in _labels(block) if i not in grouped(block)]
    widths = _fitted(block, list(range(len(block.headers))))
    base = sum(widths[i] + GAP for i in labels)
    made: list[list[int]] = []
    room = -1
    for start, end in spans(block):
        if block.headers[start].kind == "label":
            continue
        need = sum(widths[i] + GAP for i in range(start, end))
        if need > room:
            made.append(list(labels))
            room = width + GAP - base
        made[-1] += range(start, end)
        room -= need
    return made or [labels]


def lines(block: Block, columns: list[int]) -> list[Text]:
    """One panel as styled lines: two lines of headings, a rule, then the rows under the headings of their groups."""
    widths = _fitted(block, columns)
    total = sum(widths.values()) + GAP * (len(columns) - 1)
    out = _heads(block, columns, widths)
    out.append(Text("─" * total))
    headings, previous = grouped(block), None
    for group in members(block):
        if group.start:
            out.append(Text(""))
        if headings:
            out.append(Text(" · ".join(block.rows[group.start][i].text for i in headings), style="bold magenta"))
        previous = None
        for n in group:
            outer = [block.rows[n][i].text for i in columns if block.headers[i].kind == "label"][:-1]
            out.append(_row(block, n, columns, widths, repeat=outer == previous))
            previous = outer
    return out


def _heads(block: Block, columns: list[int], widths: dict[int, int]) -> list[Text]:
    top, sub = [], []
    for start, end in spans(block):
        members = [i for i in range(start, end) if i in widths]
        if not members:
            continue
        room = sum(widths[i] for i in members) + GAP * (len(members) - 1)
        label = block.headers[start].kind == "label"
        name = block.headers[start].group
        top.append("".ljust(room) if label else name.center(room) if len(members) > 1 else name.rjust(room))
        sub += [
            block.headers[i].group.ljust(widths[i]) if label else block.headers[i].sub.rjust(widths[i]) for i in members
        ]
    joined = [(" " * GAP).join(part).rstrip() for part in (top, sub)]
    return [Text(line, style="bold") for line in joined if line.strip()]


def _row(block: Block, n: int, columns: list[int], widths: dict[int, int], repeat: bool) -> Text:
    """One row; outer labels that equal those of the row above are left blank."""
    line = Text()
    last = max(i for i in columns if block.headers[i].kind == "label")
    for place, i in enumerate(columns):
        cell, kind = block.rows[n][i], block.headers[i].kind
        text = "" if kind == "label" and repeat and i != last else _text(cell)
        text = text.ljust(widths[i]) if kind == "label" else text.rjust(widths[i])
        style = "bold" if cell.bold else STYLES.get("status" if cell.kind == "status" else kind, "")
        line.append((" " * GAP if place else "") + text, style=style)
    line.rstrip()
    return line
