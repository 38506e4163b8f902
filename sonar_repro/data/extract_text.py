"""Make the embedded text set from two Debian packages: ``python -m sonar_repro.data.extract_text``.

The file ships with the package; this script is how it was made. See ``embedded/README.md`` for sources and licences.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

LIMIT = 1_000_000  # bytes of the JSONL file
NOVELS = (("prideprejudice", "Jane Austen, Pride and Prejudice"), ("northangerabbey", "Jane Austen, Northanger Abbey"))
STATE = (
    ("us-declaration.gz", "Declaration of Independence (1776)"),
    ("us-constitution.gz", "Constitution of the United States"),
)
_CHAPTER = re.compile(r"^chapter \d+$", re.IGNORECASE)


def r_strings(serialized: bytes) -> list[str]:
    """The elements of the first character vector in an R object serialized as XDR: type 16, length, then CHARSXPs."""
    match = re.search(rb"\x00\x00\x00\x10(....)\x00\x04\x00\x09", serialized, re.DOTALL)
    position, (count,) = match.end() - 4, struct.unpack(">I", match.group(1))
    strings = []
    for _ in range(count):
        flags, size = struct.unpack_from(">Ii", serialized, position)
        if flags & 0xFF != 9:
            raise ValueError(f"not a string at byte {position}")
        position += 8
        strings.append(serialized[position : position + max(size, 0)].decode("utf-8"))
        position += max(size, 0)
    return strings


def novels(rdata: Path) -> dict[str, list[str]]:
    """Name -> lines of each novel of janeaustenr, from ``data/Rdata.rdb`` and its index ``Rdata.rdx``.

    The database is a row of zlib streams, each behind a four-byte length; the index lists names, offsets and lengths.
    """
    index = zlib.decompress(rdata.with_suffix(".rdx").read_bytes(), wbits=47)
    names = r_strings(index[index.index(b"names") :])
    pairs = re.findall(rb"\x00\x00\x00\x0d\x00\x00\x00\x02(....)(....)", index, re.DOTALL)[: len(names)]
    database = rdata.with_suffix(".rdb").read_bytes()
    found = {}
    for name, pair in zip(names, pairs):
        offset, length = (struct.unpack(">I", field)[0] for field in pair)
        found[name] = r_strings(zlib.decompress(database[offset + 4 : offset + length]))
    return found


def paragraphs(lines: list[str]) -> str:
    """Join wrapped lines into paragraphs, which stay separated by an empty line."""
    blocks, block = [], []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line.strip())
        elif block:
            blocks.append(" ".join(block))
            block = []
    return "\n\n".join(blocks)


def chapters(lines: list[str]) -> list[str]:
    """One text a chapter; front matter before the first chapter and the closing ``THE END`` are left out."""
    starts = [i for i, line in enumerate(lines) if _CHAPTER.match(line.strip())]
    parts = [lines[a + 1 : b] for a, b in zip(starts, [*starts[1:], len(lines)])]
    return [paragraphs([line for line in part if line.strip().upper().rstrip(".") != "THE END"]) for part in parts]


def documents(rdata: Path, state: Path) -> Iterator[tuple[str, str]]:
    """``(source, text)`` of every document in the order of the file: state papers, then novels chapter by chapter."""
    for file, source in STATE:
        lines = gzip.decompress((state / file).read_bytes()).decode("ascii").splitlines()
        for part in re.split(r"\n\n(?=Article [IVX]+\n\n)", paragraphs(lines)):
            yield source, part
    books = novels(rdata)
    for key, source in NOVELS:
        for chapter in chapters(books[key]):
            yield source, chapter


def main(arguments: list[str] | None = None) -> int:
    """Command line entry: write whole documents until the next would pass one megabyte."""
    parser = argparse.ArgumentParser(
        prog="python -m sonar_repro.data.extract_text", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rdata", type=Path, required=True, help="janeaustenr/data/Rdata.rdb of r-cran-janeaustenr")
    parser.add_argument("--state", type=Path, required=True, help="usr/share/state of miscfiles")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    options = parser.parse_args(arguments)
    size, lines = 0, []
    for source, text in documents(options.rdata, options.state):
        line = json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n"
        size += len(line.encode("utf-8"))
        if size > LIMIT:
            break
        lines.append(line)
    options.out.write_text("".join(lines), encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
