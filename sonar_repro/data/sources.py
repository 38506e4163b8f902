"""Where rows come from: the package, a local path, or the hub at a pinned revision (only that imports ``datasets``)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import UserError
from .rows import instruction_row, read_rows, text_row
from .spec import DataSpec

INSTRUCTIONS_FILE, TEXT_FILE = "instructions.jsonl", "text.jsonl"
_TRUE = {"1", "ON", "YES", "TRUE"}  # huggingface_hub's own list


def embedded_path(name: str) -> Path:
    """Path of a file that ships in ``sonar_repro/data/embedded``."""
    return Path(str(resources.files("sonar_repro.data"))) / "embedded" / name


def offline() -> bool:
    """Whether the environment forbids the hub (HF_HUB_OFFLINE, HF_DATASETS_OFFLINE or TRANSFORMERS_OFFLINE)."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in _TRUE for name in names)


def instruction_rows(spec: DataSpec) -> Sequence[dict[str, str]]:
    """All rows of an instruction set, in their own order. The embedded set grows on demand beyond the rows that ship.

    Raises:
        UserError: a bad row with its file and line, or a hub set that cannot be had, with how to fetch it.
    """
    if spec.source == "path":
        return read_rows(spec.path, instruction_row)
    if spec.source == "hub":
        return _HubRows(load_hub(spec), spec)
    shipped = read_rows(embedded_path(INSTRUCTIONS_FILE), instruction_row)
    if spec.rows_needed <= len(shipped):
        return shipped
    from .make_embedded import generate

    return generate(spec.rows_needed)


def local_documents(spec: DataSpec) -> list[str]:
    """All documents of an embedded or local text set, in their own order."""
    return read_rows(embedded_path(TEXT_FILE) if spec.source == "embedded" else spec.path, text_row)


def stream_documents(spec: DataSpec, buffer_size: int = 10_000) -> Callable[[], Iterator[str]]:
    """A function that opens the hub's documents at their start, shuffled by ``spec.seed`` through a buffer."""
    check_available(spec)

    def documents() -> Iterator[str]:
        stream = load_hub(spec, streaming=True).shuffle(seed=spec.seed, buffer_size=buffer_size)
        for number, row in enumerate(stream, start=1):
            yield text_row(row, f"{spec.hub_id}: document {number}")

    return documents


class _HubRows(Sequence):
    """Rows of a hub data set, checked as they are taken (only the chosen ones are)."""

    def __init__(self, dataset: Any, spec: DataSpec) -> None:
        self.dataset, self.spec = dataset, spec

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, str]:
        return instruction_row(self.dataset[index], f"{self.spec.hub_id}@{self.spec.revision[:7]}: row {index}")


def _cached_at_revision(spec: DataSpec) -> bool:
    """Whether the cache holds this set at this commit: ``<cache>/<owner>___<name>/<subset>/<version>/<commit>``."""
    home = (
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    )
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets").expanduser()
    owner, _, name = spec.hub_id.rpartition("/")
    snake = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)).lower()
    folder = cache / (f"{owner}___{snake}" if owner else snake)
    return any(folder.glob(f"{spec.subset or '*'}/*/{spec.revision}"))


def _missing(spec: DataSpec, why: str) -> UserError:
    fetch = "python -m sonar_repro task=fetch model=olmoe"
    remedy = (
        f"run `{fetch}` once with a network" if spec.kind == "instructions" else "it is streamed, so allow the network"
    )
    return UserError(
        f"data set {spec.hub_id} at revision {spec.revision}: {why}: {remedy}, "
        "or set data.source=path data.path=FILE to read your own copy"
    )


def check_available(spec: DataSpec) -> None:
    """Refuse early what cannot be had, without importing torch or datasets and without touching the network.

    Raises:
        UserError: a local path that is missing, or a hub set that is not in the cache while the environment says
            offline.
    """
    if spec.source == "path" and not Path(spec.path).expanduser().exists():
        raise UserError(f"data.path={spec.path}: no such file or directory")
    if spec.source == "hub" and offline() and not _cached_at_revision(spec):
        raise _missing(spec, "not in the local cache, and offline mode is on (HF_HUB_OFFLINE)")


def load_hub(spec: DataSpec, streaming: bool = False) -> Any:
    """``datasets.load_dataset`` at the pinned revision, split ``train``.

    Offline, ``datasets`` would take the newest cached copy whatever its revision; that copy is refused here.

    Raises:
        UserError: names the data set, the revision, the reason and the way out.
    """
    check_available(spec)
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"data set {spec.hub_id}: the hub is read with the datasets library: pip install datasets"
        ) from None
    try:
        loaded = datasets.load_dataset(
            spec.hub_id, name=spec.subset, revision=spec.revision, split="train", streaming=streaming
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _missing(spec, first) from error
    if not streaming and re.fullmatch(r"[0-9a-f]{40}", spec.revision):
        folders = {Path(file["filename"]).parent.name for file in loaded.cache_files}
        if folders and folders != {spec.revision}:
            raise _missing(spec, f"the cache holds another revision ({', '.join(sorted(folders))})")
    return loaded


def fetch_dataset(spec: DataSpec) -> str:
    """Download a hub set into the cache; returns one line that says what is there. Streamed text is not downloaded."""
    if spec.source != "hub":
        return f"{spec.name}: local, nothing to fetch"
    if spec.kind == "text":
        return f"{spec.hub_id}: streamed while training, nothing to fetch"
    return f"{spec.hub_id} at revision {spec.revision}: {len(load_hub(spec)):,} rows in the cache"
