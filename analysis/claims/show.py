"""Verdicts in the terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ..published import Claim, paper
from ..tables.terminal import make_console
from .evidence import DISAGREES, FAILS, HOLDS, HOLDS_FORECAST, NOT_MEASURED, STATUSES, Verdict

Found = Sequence[tuple[Claim, Verdict]]
# One colour for a verdict whatever it rests on: green and red are measured, their paler kin are forecast.
STYLES = {HOLDS: "green", HOLDS_FORECAST: "cyan", DISAGREES: "yellow", FAILS: "red", NOT_MEASURED: "dim"}
WORDS = {HOLDS: "hold", FAILS: "fail"}
WIDTH = max(map(len, STATUSES)) + 1


def tally(found: Found) -> str:
    """How many there are of each verdict, in one line."""
    counts = Counter(verdict.status for _, verdict in found)
    return ", ".join(f"{counts.get(status, 0)} {WORDS.get(status, status)}" for status in STATUSES)


def show(found: Found, console: Console | None = None) -> None:
    """Print each claim on a line, its figures and evidence below it."""
    console = console or make_console()
    last = None
    for claim, verdict in found:
        if claim.paper != last:
            console.print(Text(f"\n{paper(claim.paper).title}", style="bold"))
            last = claim.paper
        head = Text(f"{verdict.status:<{WIDTH}}", style=STYLES[verdict.status])
        console.print(head + Text(f"{claim.section}: {claim.sentence}", style=""))
        said = "; ".join(part for part in (verdict.figures, verdict.evidence and f"[{verdict.evidence}]") if part)
        if said:
            console.print(Padding(Text(said, style="dim"), (0, 0, 0, WIDTH), expand=False))
    console.print(Text(f"\n{tally(found)}", style="bold"))


def markdown(found: Found) -> str:
    """One table per paper."""
    out = [f"Claims: {tally(found)}.", ""]
    last = None
    for claim, verdict in found:
        if claim.paper != last:
            out += [
                "",
                f"### {paper(claim.paper).title}",
                "",
                "| Section | Claim | Verdict | Figures | Evidence |",
                "|---|---|---|---|---|",
            ]
            last = claim.paper
        cells = (claim.section, claim.sentence, verdict.status, verdict.figures, verdict.evidence or "–")
        out.append("| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |")
    return "\n".join(out) + "\n"


def as_json(found: Found) -> str:
    """A list of objects, for other tools."""
    rows = [
        {
            "name": claim.name,
            "paper": claim.paper,
            "section": claim.section,
            "claim": claim.sentence,
            "verdict": verdict.status,
            "figures": verdict.figures,
            "evidence": verdict.evidence,
        }
        for claim, verdict in found
    ]
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
