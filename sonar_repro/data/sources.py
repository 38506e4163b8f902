"""Where rows come from: the package, a local path, or the hub at a pinned revision (only that imports ``datasets``)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..config.schema import DataConfig
from ..errors import UserError
from .checks import check_data, require_rows
from .corpus import SHUFFLE_SEED
from .frozen import ROWS, SETS, TOKENIZERS, frozen_documents, frozen_file, frozen_rows
from .rows import instruction_row, read_rows, text_row

_TRUE = {"1", "ON", "YES", "TRUE"}  # huggingface_hub's own list


def offline() -> bool:
    """Whether the environment forbids the hub (HF_HUB_OFFLINE, HF_DATASETS_OFFLINE or TRANSFORMERS_OFFLINE)."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in _TRUE for name in names)


def instruction_rows(data: DataConfig) -> Sequence[dict[str, str]]:
    """The rows of an instruction set, in their own order: all of them, of the embedded set as many as are needed.

    Raises:
        UserError: a bad row with its file and line, or a hub set that cannot be had, with how to fetch it.
    """
    if data.source == "path":
        return read_rows(data.path, instruction_row)
    if data.source == "hub":
        return _HubRows(load_hub(data), data)
    return frozen_rows(data.rows_needed)


def local_documents(data: DataConfig) -> list[str]:
    """All documents of an embedded or local text set, in their own order."""
    return frozen_documents() if data.source == "embedded" else read_rows(data.path, text_row)


def stream_documents(data: DataConfig, buffer_size: int = 10_000) -> Callable[[], Iterator[str]]:
    """A function that opens the hub's documents at their start, shuffled by ``SHUFFLE_SEED`` through a buffer."""
    check_available(data)

    def documents() -> Iterator[str]:
        stream = load_hub(data, streaming=True).shuffle(seed=SHUFFLE_SEED, buffer_size=buffer_size)
        for number, row in enumerate(stream, start=1):
            yield text_row(row, f"{data.hub_id}: document {number}")

    return documents


class _HubRows(Sequence):
    """Rows of a hub data set, checked as they are taken (only the chosen ones are)."""

    def __init__(self, dataset: Any, data: DataConfig) -> None:
        self.dataset, self.data = dataset, data

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, str]:
        return instruction_row(self.dataset[index], f"{self.data.hub_id}@{self.data.revision[:7]}: row {index}")


def _cached_at_revision(data: DataConfig) -> bool:
    """Whether the cache holds this set at this commit: ``<cache>/<owner>___<name>/<subset>/<version>/<commit>``."""
    home = (
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    )
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets").expanduser()
    owner, _, name = data.hub_id.rpartition("/")
    snake = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)).lower()
    folder = cache / (f"{owner}___{snake}" if owner else snake)
    return any(folder.glob(f"{data.subset or '*'}/*/{data.revision}"))


def _missing(data: DataConfig, why: str) -> UserError:
    fetch = "python -m sonar_repro task=fetch model=olmoe"
    remedy = (
        f"run `{fetch}` once with a network" if data.kind == "instructions" else "it is streamed, so allow the network"
    )
    return UserError(
        f"data set {data.hub_id} at revision {data.revision}: {why}: {remedy}, "
        "or set data.source=path data.path=FILE to read your own copy"
    )


def check_available(data: DataConfig) -> None:
    """Refuse early what cannot be had, without importing torch or datasets and without touching the network.

    Raises:
        UserError: a config that no run can honour, an embedded file that was changed or is too small for the
            selection, or a hub set that is not in the cache while the environment says offline.
    """
    check_data(data)
    if data.source == "embedded":
        for files in (SETS, TOKENIZERS):
            frozen_file(files[data.kind])
        if data.kind == "instructions":
            require_rows(data, ROWS)
    if data.source == "hub" and offline() and not _cached_at_revision(data):
        raise _missing(data, "not in the local cache, and offline mode is on (HF_HUB_OFFLINE)")


def load_hub(data: DataConfig, streaming: bool = False) -> Any:
    """``datasets.load_dataset`` at the pinned revision, split ``train``.

    Offline, ``datasets`` would take the newest cached copy whatever its revision; that copy is refused here.

    Raises:
        UserError: names the data set, the revision, the reason and the way out.
    """
    check_available(data)
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"data set {data.hub_id}: the hub is read with the datasets library: pip install datasets"
        ) from None
    try:
        loaded = datasets.load_dataset(
            data.hub_id, name=data.subset, revision=data.revision, split="train", streaming=streaming
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _missing(data, first) from error
    if not streaming and re.fullmatch(r"[0-9a-f]{40}", data.revision):
        folders = {Path(file["filename"]).parent.name for file in loaded.cache_files}
        if folders and folders != {data.revision}:
            raise _missing(data, f"the cache holds another revision ({', '.join(sorted(folders))})")
    return loaded


def fetch_dataset(data: DataConfig) -> str:
    """Download a hub set into the cache; returns one line that says what is there. Streamed text is not downloaded."""
    if data.source != "hub":
        return f"{data.name}: local, nothing to fetch"
    if data.kind == "text":
        return f"{data.hub_id}: streamed while training, nothing to fetch"
    return f"{data.hub_id} at revision {data.revision}: {len(load_hub(data)):,} rows in the cache"
