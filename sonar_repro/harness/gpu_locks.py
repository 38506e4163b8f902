"""One card an arm: workers of one machine take free GPUs by file locks, whichever command or launcher started them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

#: Seconds between two looks at cards that are all taken.
WAIT = 0.5


def visible(count: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the visible cards as ``CUDA_VISIBLE_DEVICES`` takes them: its own entries, or 0, 1, ..."""
    named = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


@contextlib.contextmanager
def taken(count: int, of: list[str], folder: Path | None = None) -> Iterator[list[str]]:
    """Hold ``count`` of the cards ``of`` while the body runs; wait while fewer are free.

    A lock is an open file in the user's temporary folder: it ends with the process, however that ends. All or nothing,
    so that two workers never wait for each other's half. More cards than there are: all of them are taken.

    Yields:
        The names of the cards, for ``CUDA_VISIBLE_DEVICES``.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"sonar_repro-cards-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    count = min(count, len(of))
    while True:
        with contextlib.ExitStack() as held:
            got = []
            for name in of:
                file = held.enter_context(open(folder / re.sub(r"[^\w-]", "_", name), "w"))
                if len(got) < count and _lock(file):
                    got.append(name)
            if len(got) == count:
                yield got
                return
        time.sleep(WAIT)


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
