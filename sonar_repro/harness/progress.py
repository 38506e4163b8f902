"""Progress on a terminal (arm of arms; step, loss, ms, peak); one plain line an arm elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

STYLE = {"ok": "green", "oom": "yellow", "unsupported": "yellow", "failed": "red", "crashed": "red"}


def one_line(text: str, limit: int = 300) -> str:
    """The first non-empty line of a message, shortened."""
    line = next((part for part in str(text).splitlines() if part.strip()), "").strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"


class ArmProgress:
    """Shows one sweep. A context manager; ``enabled`` defaults to whether stderr is a terminal."""

    def __init__(self, total: int, enabled: bool | None = None) -> None:
        self.console = Console(stderr=True, soft_wrap=True, highlight=False)
        self.enabled = self.console.is_terminal if enabled is None else enabled
        self.total, self.done, self.name = total, 0, ""
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars = Progress(
            *columns, TextColumn("{task.fields[shown]}"), console=self.console, disable=not self.enabled
        )
        self.arms = self.bars.add_task("arms", total=total, shown="")
        self.steps = self.bars.add_task("", total=None, shown="", visible=False)

    def __enter__(self) -> ArmProgress:
        self.bars.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.bars.stop()

    def start(self, arm_id: str) -> None:
        self.name = arm_id
        self.bars.reset(self.steps, total=None, description=arm_id, shown="", visible=True)

    def update(self, kind: str, value: Any) -> None:
        """Take one message of the arm's process."""
        if kind == "phase":
            self.bars.update(self.steps, shown=value)
            return
        step, total, shown = value
        labels = {"loss": "loss {:.4f}", "ms": "{:.0f} ms", "peak_gb": "peak {:.2f} GB"}
        text = "  ".join(labels[k].format(v) for k, v in shown.items() if v is not None and k in labels)
        self.bars.update(self.steps, completed=step, total=total, shown=text)

    def finish(
        self, arm_id: str, status: str, outcome: str, error: dict[str, Any] | None, wall_s: float | None
    ) -> None:
        """Print the arm's line: it stays on the screen in both modes."""
        self.done += 1
        self.bars.update(self.arms, completed=self.done)
        self.bars.update(self.steps, visible=False)
        how = {"run": f"{wall_s:.1f} s" if wall_s is not None else "", "recorded": "recorded before"}.get(
            outcome, outcome
        )
        why = f"  {error['type']} in {error['phase']}: {one_line(error['message'])}" if error else ""
        style = STYLE.get(status, "")
        self.console.print(f"[{self.done}/{self.total}] {arm_id}  [{style}]{status}[/]  {how}", end="")
        self.console.print(why, markup=False)


def fail(message: str) -> None:
    """The one line of a user's mistake."""
    print(f"error: {one_line(message, 1000)}", file=sys.stderr)


def warn(message: str) -> None:
    """One line that stops nothing."""
    print(f"warning: {one_line(message, 1000)}", file=sys.stderr)


def note(message: str) -> None:
    """One line of information, apart from a command's output."""
    print(message, file=sys.stderr)
