"""``task=fetch``: bring a model's checkpoint, its tokenizer and the paper-scale data into the local cache.

    python -m sonar_repro task=fetch model=olmoe

Runs in the command's own process and leaves no record. Everything is pinned by revision; only safetensors weights are
taken, and no code from a repository is run.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ..config.identity import parameter_count
from ..config.schema import Config, DataConfig, conf_dir
from ..data.sources import fetch_dataset, offline
from ..errors import UserError
from ..models import files

BYTES_A_WEIGHT = 2  # both papers' checkpoints are stored in bf16


def run(config: Config) -> None:
    """Download what the arm needs at paper scale; print one line for each part. Raises UserError in one line."""
    print(fetch_model(config), flush=True)
    print(fetch_data(config), flush=True)


def fetch_model(config: Config) -> str:
    """Put every file of ``model.hub_id`` at ``model.revision`` into the hub's cache; returns a line that says so.

    Raises:
        UserError: offline and not complete in the cache, no network, too little disk; names the file or the reason.
    """
    model = config.model
    if model.path or not model.hub_id:
        return f"model={model.name}: {'local' if model.path else 'has no checkpoint'}, nothing to fetch"
    find = files.in_cache(model.hub_id, model.revision)
    missing = files.missing_files(find)
    if missing and offline():
        raise UserError(
            f"model={model.name}: {missing[0]} of {files.described(model)} is not in the local cache, and offline mode "
            "is on (HF_HUB_OFFLINE); unset it and run the same command with a network"
        )
    if missing:
        _check_disk(config)
        _download(config)
        missing = files.missing_files(find)
        if missing:
            raise UserError(
                f"model={model.name}: {files.described(model)} has no {missing[0]}; only safetensors are read"
            )
    return f"model={model.name}: {files.described(model)} is in the cache: {find('config.json').parent}"


def _check_disk(config: Config) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    count = parameter_count(config.model, "paper")
    folder = next(p for p in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if count and count * BYTES_A_WEIGHT > free:
        raise UserError(
            f"model={config.model.name}: its weights take {count * BYTES_A_WEIGHT / 1e9:.1f} GB and {folder} has "
            f"{free / 1e9:.1f} GB free; set HF_HOME to another disk"
        )


def _download(config: Config) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import logging

    model = config.model
    try:
        import httpx
    except ImportError:  # a hub client on another HTTP library raises OSErrors for a lost network
        network: tuple[type[Exception], ...] = (OSError,)
    else:
        network = (OSError, httpx.HTTPError)
    print(f"fetching {files.described(model)}", flush=True)
    logging.set_verbosity_error()  # it would tell of each of its retries; what came of them is told below
    try:
        snapshot_download(model.hub_id, revision=model.revision, allow_patterns=list(files.PATTERNS))
    except (*network, HfHubHTTPError, HFValidationError, ValueError, RuntimeError) as error:
        raise UserError(
            f"model={model.name}: {files.described(model)} cannot be downloaded ({_first_line(error)}); "
            "check the network, or copy the folder from elsewhere and give model.path=FOLDER"
        ) from error


def fetch_data(config: Config) -> str:
    """Download the data set that the paper scale trains on; returns a line that says what is there."""
    spec = paper_data(config)
    return "data: local, nothing to fetch" if spec is None else f"data: {fetch_dataset(spec)}"


def paper_data(config: Config) -> DataConfig | None:
    """The hub set of this dataset group: the one chosen, else the group's at paper scale; None for local data."""
    if config.data.source == "hub":
        return config.data
    path = conf_dir() / "data" / f"{config.dataset.name}_paper.yaml"
    if config.data.source == "path" or not path.is_file():
        return None
    fields: dict[str, Any] = {
        key: value
        for key, value in OmegaConf.to_container(OmegaConf.load(path), resolve=False).items()
        if not str(value).startswith("${")
    }
    return DataConfig(**fields)


def _first_line(error: Exception) -> str:
    line = next((part.strip() for part in str(error).splitlines() if part.strip()), type(error).__name__)
    return line[:160]
