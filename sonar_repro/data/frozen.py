"""The data that ships in ``embedded/``: read only if its bytes are those of ``SHA256``; its README says what it is."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

from ..errors import UserError

FOLDER = Path(__file__).parent / "embedded"
SETS = {"instructions": "instructions.jsonl.gz", "text": "text.jsonl"}
TOKENIZERS = {"instructions": "instructions_bpe_2048.json", "text": "text_bpe_2048.json"}
# What `sha256sum *` prints in that folder. Another file is other data under the same name: it needs another name.
SHA256 = {
    "instructions.jsonl.gz": "52970ee42c5b840172eb2edd05f12a2633cf521cb446abc1fef21a87a42f413b",
    "instructions_bpe_2048.json": "b3ee13b1a2599e5b3c9fa2cf850543bc974e5f7ed9bb2b5f1efd8daa3d9a9bfe",
    "text.jsonl": "86e32cc34a22f7a3e30d71e1a078dca58f6c9ca5f6de209a4600638c56c00fdf",
    "text_bpe_2048.json": "98634efac41f399cf1ca92da7721237ba21138517b48436ff853954320f92fdb",
}
ROWS, SMALL = 9000, 1000


def frozen_file(name: str) -> Path:
    """Path of a file that ships, its sha256 checked (1 ms a megabyte).

    Raises:
        UserError: it is missing, unreadable or changed.
    """
    path = FOLDER / name
    remedy = "restore it (git checkout, or install the package again); data of your own is read with data=own"
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; {remedy}") from None
    if found != SHA256[name]:
        raise UserError(
            f"{path}: not the file that ships (sha256 {found[:16]}…, expected {SHA256[name][:16]}…); {remedy}"
        )
    return path


def frozen_rows(needed: int) -> list[dict[str, str]]:
    """The first rows of the embedded instructions (``instruction``, ``input``, ``output``), in their own order.

    1,000 of them, or exactly ``needed`` where that is more, up to the 9,000 there are. The shuffle before the split
    runs over what this returns: another number of rows is another selection.
    """
    count = min(max(needed, SMALL), ROWS)
    lines = gzip.decompress(frozen_file(SETS["instructions"]).read_bytes()).split(b"\n", count)
    return [json.loads(line) for line in lines[:count]]


def frozen_documents() -> list[str]:
    """The documents of the embedded text, in their own order."""
    return [json.loads(line)["text"] for line in frozen_file(SETS["text"]).read_bytes().splitlines()]
