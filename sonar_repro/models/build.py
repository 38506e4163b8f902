"""Build or load a causal LM: tiny and random, full-size and random, from a checkpoint, or on fake tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..config import ModelConfig
from ..errors import UserError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters are created in ``dtype`` from the start: no second copy while a model is cast."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def architecture(model: ModelConfig, scale: str, vocab_size: int | None = None) -> Any:
    """The transformers config of a model at a scale.

    Args:
        model: the model group; ``model.config`` (a local config.json, its folder, or a hub id) replaces its fields.
        scale: at ``smoke`` the group's ``smoke`` overrides are applied.
        vocab_size: replaces the vocabulary's size (smoke models fit their tokenizer).

    Raises:
        UserError: an unknown model type, or a config that cannot be read; the message names it.
    """
    from transformers import AutoConfig

    if model.config:
        config = _config_from(model.config)
    else:
        fields = {**model.architecture, **(model.smoke if scale == "smoke" else {})}
        try:
            config = AutoConfig.for_model(model.model_type, **fields)
        except ValueError as error:
            raise UserError(f"model.model_type={model.model_type}: {str(error).splitlines()[0][:200]}") from error
    if vocab_size is not None:
        config.vocab_size = vocab_size
    return config


def _config_from(source: str) -> Any:
    from transformers import AutoConfig

    path = Path(source)
    if path.suffix == ".json" or path.exists():
        file = path / "config.json" if path.is_dir() else path
        try:
            data = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"model.config={source}: cannot be read ({error}); give a config.json or its folder"
            ) from error
        if "model_type" not in data:
            raise UserError(f"model.config={source}: has no model_type; give the config.json of a transformers model")
        try:
            return AutoConfig.for_model(**data)
        except ValueError as error:
            raise UserError(f"model.config={source}: {str(error).splitlines()[0][:200]}") from error
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.config={source}: no local file and not to be had from the hub; give a local config.json"
        ) from error


def build_random(
    config: Any, *, dtype: torch.dtype, device: torch.device | str, experts: str, attention: str, seed: int
) -> Any:
    """A model with seeded random weights, created on ``device`` in ``dtype``.

    Raises UserError when the model type has no causal LM class in transformers.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, experts_implementation=experts, attn_implementation=attention
            )
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            raise UserError(
                f"model.config: model_type={config.model_type} has no causal LM class in transformers"
            ) from error
        raise


def load_pretrained(
    model: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, experts: str, attention: str
) -> Any:
    """Load safetensors weights from the hub's cache or a local folder, straight to ``device``.

    Raises UserError naming what is missing and how to fetch it. Remote code is never run.
    """
    from transformers import AutoModelForCausalLM

    source = model.path or model.hub_id
    if source is None:
        raise UserError(
            f"model.hub_id=null: model={model.name} has no checkpoint; use model.weights=random or model.path=FOLDER"
        )
    if model.path and not (Path(model.path) / "config.json").is_file():
        raise UserError(f"model.path={model.path}: no config.json there; give a checkpoint folder")
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            source,
            revision=None if model.path else model.revision,
            dtype=dtype,
            device_map={"": str(device)},
            experts_implementation=experts,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except OSError as error:
        first = str(error).splitlines()[0][:160]
        raise UserError(
            f"model={model.name}: {source} is not here and cannot be downloaded ({first}); "
            f"fetch it with: python -m sonar_repro task=fetch model={model.name}"
        ) from error
    lacking = sorted(info["missing_keys"])
    if lacking:
        raise UserError(
            f"model={model.name}: checkpoint {source} lacks {len(lacking)} weights, {lacking[0]} first; "
            "they would be random: give a complete checkpoint"
        )
    return loaded


def load_tokenizer(model: ModelConfig) -> Any:
    """The checkpoint's own tokenizer, from the hub's cache or its folder. Raises UserError when it is not there."""
    from transformers import AutoTokenizer

    source = model.path or model.hub_id
    try:
        return AutoTokenizer.from_pretrained(source, revision=None if model.path else model.revision)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model={model.name}: no tokenizer for {source} ({str(error).splitlines()[0][:160]}); "
            f"fetch it with: python -m sonar_repro task=fetch model={model.name}"
        ) from error
