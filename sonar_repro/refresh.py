"""Run committed records' arms again, in place: ``python -m sonar_repro.refresh runs/reference/forecast [--part 1/2]``.

For use after a change that moves what a forecast says (a cost of the host, a model of a kernel): each record is
replaced by what this code makes of its own config, and one line says what moved. A record whose arm no longer ends as
it did is left as it was, and named; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import records
from .config.schema import from_dict
from .errors import UserError
from .harness.runner import make_arm, run

#: What belongs to the run and not to its result.
INCIDENTAL = ("started_unix", "wall_s", "environment")


def refresh(path: Path, runs_dir: str) -> list[str] | None:
    """Run the arm of the record at ``path`` again and replace the record; returns the sections that moved.

    ``None``: the arm ended in another status, and the record is as it was.

    Raises:
        UserError: the record is a measurement on a card, which only that card can make again.
    """
    old = records.load(path)
    if old["config"]["scale"]["name"] != "forecast":
        raise UserError(
            f"{path}: scale={old['config']['scale']['name']} is a measurement; only forecasts are made anew"
        )
    config = from_dict({**old["config"], "runs_dir": runs_dir, "threads": 1})
    new = run(make_arm(config))
    if new["status"] != old["status"]:
        return None
    kept = {key: old[key] for key in ("arm_id", "referenced_from") if key in old}
    record = _without_traceback({key: value for key, value in new.items() if key not in ("outcome", "referenced_from")})
    records.write(path, {**record, **kept})
    compared = [key for key in {**old, **record} if key not in INCIDENTAL and key not in kept]
    return [key for key in compared if records.finite(record.get(key)) != old.get(key)]


def _without_traceback(record: dict[str, Any]) -> dict[str, Any]:
    """A traceback names the folders of the machine that ran it."""
    if not record.get("error"):
        return record
    return {**record, "error": {**record["error"], "traceback": None}}


def _part(text: str) -> tuple[int, int]:
    which, _, parts = text.partition("/")
    if not (which.isdigit() and parts.isdigit() and 1 <= int(which) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: say K/N with K from 1 to N, such as 1/2")
    return int(which), int(parts)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: all replaced; 1: some ended in another way and were left; 2: a mistake in the command."""
    parser = argparse.ArgumentParser(prog="python -m sonar_repro.refresh", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the records lie, searched through")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="every N-th record, from the K-th")
    options = parser.parse_args(arguments)
    which, parts = options.part
    paths = sorted(options.folder.glob("**/record.json"))
    if not paths:
        raise UserError(f"{options.folder}: no record.json below it")
    left = 0
    with tempfile.TemporaryDirectory() as runs_dir:
        for path in paths[which - 1 :: parts]:
            moved = refresh(path, runs_dir)
            left += moved is None
            told = "ended in another way: left as it was" if moved is None else ", ".join(moved) or "the same"
            print(f"{path.parent.name}: {told}", flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
