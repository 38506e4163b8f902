"""Which files of a checkpoint are here: a local folder, or the hub's cache at a revision. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ..config.schema import ModelConfig
from ..data.sources import offline
from ..errors import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Any one of these groups makes a tokenizer.
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))
#: What a checkpoint is fetched by: weights as safetensors only, and the small files beside them.
PATTERNS = ("*.safetensors", "*.json", "*.txt", "tokenizer.model")

Find = Callable[[str], Path | None]


def in_folder(folder: Path) -> Find:
    """A finder over a local checkpoint folder."""
    return lambda name: folder / name if (folder / name).is_file() else None


def in_cache(repo_id: str, revision: str | None) -> Find:
    """A finder over the hub's cache at one revision; never touches the network."""
    from huggingface_hub import try_to_load_from_cache

    def find(name: str) -> Path | None:
        found = try_to_load_from_cache(repo_id, name, revision=revision)
        return Path(found) if isinstance(found, str) else None

    return find


def missing_files(find: Find, weights: bool = True) -> list[str]:
    """What a causal LM and its tokenizer need and ``find`` does not have, by file name; [] for a whole checkpoint.

    Without ``weights``, what the tokenizer alone needs.
    """
    missing = [] if find("config.json") else ["config.json"]
    if weights:
        index = find(INDEX)
        wanted = [WEIGHTS] if index is None else _shards(index)
        missing += [name for name in wanted if find(name) is None]
    if not any(all(find(name) for name in group) for group in TOKENIZERS):
        missing.append(TOKENIZERS[0][0])
    return missing


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index}: not an index of safetensors shards ({type(error).__name__}); fetch it again"
        ) from error


def source_of(model: ModelConfig) -> str:
    """The checkpoint's folder or hub id. Raises UserError for a model without either."""
    source = model.path or model.hub_id
    if source is None:
        raise UserError(
            f"model.hub_id=null: model={model.name} has no checkpoint; use model.weights=random or model.path=FOLDER"
        )
    return source


def described(model: ModelConfig) -> str:
    """The checkpoint in words: its folder, or its hub id with the revision."""
    source = source_of(model)
    return source if model.path else f"{source} at revision {(model.revision or 'main')[:12]}"


def check_available(model: ModelConfig, weights: bool = True) -> None:
    """Refuse early a checkpoint (without ``weights``: its tokenizer) that cannot be had, naming the missing file.

    A hub id whose files are not in the cache is refused only offline (HF_HUB_OFFLINE): else they are downloaded.

    Raises:
        UserError: as above; also for weights that are not safetensors, the only format that is read.
    """
    source = source_of(model)
    if not model.path:
        missing = missing_files(in_cache(source, model.revision), weights) if offline() else []
        if missing:
            raise UserError(
                f"model={model.name}: {missing[0]} of {described(model)} is not in the local cache, and offline mode "
                f"is on (HF_HUB_OFFLINE); with a network run: {fetch_command(model)}; or give model.path=FOLDER"
            )
        return
    folder = Path(model.path)
    if not folder.is_dir():
        raise UserError(f"model.path={model.path}: no such folder; give a checkpoint folder")
    missing = missing_files(in_folder(folder), weights)
    if WEIGHTS in missing and any(folder.glob("*.bin")):
        raise UserError(
            f"model.path={model.path}: its weights are .bin files and only safetensors are read; "
            "save it once with save_pretrained"
        )
    if missing:
        raise UserError(f"model.path={model.path}: {missing[0]} is missing there; give a whole checkpoint folder")


def fetch_command(model: ModelConfig) -> str:
    """The command that brings a checkpoint into the cache."""
    return f"python -m sonar_repro task=fetch model={model.name}"
