"""Make the embedded instruction set and the smoke tokenizers: ``python -m sonar_repro.data.make_embedded``.

Without options it writes the files that ship in ``sonar_repro/data/embedded``; ``--check`` compares them instead. With
``--count N --out FILE`` it writes N rows in Alpaca's format to FILE.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..errors import UserError
from .families import families
from .families.draw import Draw
from .rows import read_rows, text_row
from .sources import INSTRUCTIONS_FILE, TEXT_FILE, embedded_path

SEED, SHIPPED = 42, 1000
_INLINE = 0.4  # share of short inputs that move into the instruction, so that about 40% of rows have one, as in Alpaca
_GIVE_UP = 1000  # draws in a row without a new row: the families are exhausted


def generate(count: int, seed: int = SEED) -> list[dict[str, str]]:
    """The first ``count`` rows for this seed; no two have the same instruction and input.

    Rows do not depend on ``count``: a longer list starts with the shorter one.

    Raises:
        UserError: a count under 0, or more rows than the families can tell apart (over 100,000 are fine).
    """
    if count < 0:
        raise UserError(f"count={count}: must be 0 or more")
    draw, weighted = Draw(seed), families()
    rows: dict[tuple[str, str], dict[str, str]] = {}
    idle = 0
    while len(rows) < count:
        instruction, given, output = draw.weighted(weighted)(draw)
        if given and draw.chance(_INLINE) and not any(mark in given for mark in ":\n"):
            instruction, given = f"{instruction.rstrip('.?')}: {given}", ""
        key = (instruction, given)
        if key in rows:
            idle += 1
            if idle == _GIVE_UP:
                raise UserError(f"count={count}: the families give no more than about {len(rows)} different rows")
            continue
        idle = 0
        rows[key] = {"instruction": instruction, "input": given, "output": output}
    return list(rows.values())


def to_jsonl(rows: list[dict[str, str]]) -> str:
    """One JSON object a line, as Alpaca's fields in Alpaca's order."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def shipped_files() -> dict[str, str]:
    """File name -> content of everything that this script makes; the text is extracted by ``extract_text``."""
    from .tokenizer import FILES, train_instruction_tokenizer, train_tokenizer

    rows = generate(SHIPPED)
    documents = read_rows(embedded_path(TEXT_FILE), text_row)
    return {
        INSTRUCTIONS_FILE: to_jsonl(rows),
        FILES["instructions"]: train_instruction_tokenizer(rows).to_str(pretty=True) + "\n",
        FILES["text"]: train_tokenizer(documents).to_str(pretty=True) + "\n",
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit code (1: ``--check`` found a difference)."""
    parser = argparse.ArgumentParser(
        prog="python -m sonar_repro.data.make_embedded", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--check", action="store_true", help="compare with the files that ship, write nothing")
    parser.add_argument("--count", type=int, help="write this many rows to --out instead")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of --count")
    parser.add_argument("--out", type=Path, help="file for --count")
    options = parser.parse_args(arguments)
    if (options.count is None) != (options.out is None):
        parser.error("--count and --out go together")
    if options.out:
        options.out.write_text(to_jsonl(generate(options.count, options.seed)), encoding="utf-8", newline="\n")
        return 0
    different = 0
    for name, content in shipped_files().items():
        path = embedded_path(name)
        if not options.check:
            path.write_text(content, encoding="utf-8", newline="\n")
        elif not path.is_file() or path.read_text(encoding="utf-8") != content:
            print(f"{path}: differs from what this script makes")
            different += 1
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
