"""Build or load a causal LM: tiny and random, full-size and random, from a checkpoint, or on fake tensors."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..config.schema import ModelConfig
from ..errors import UserError
from . import files

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


def class_error(error: ValueError, config: Any, attention: str | None) -> ValueError:
    """A UserError where transformers says that a class does not exist or lacks an attention; else ``error`` itself."""
    if "Unrecognized configuration class" in str(error):
        return UserError(f"model.config: model_type={config.model_type} has no causal LM class in transformers")
    if "attention implementation" in str(error) or "attn_implementation" in str(error):
        return UserError(
            f"model.attention={attention}: model_type={config.model_type} does not have it; use model.attention=eager"
        )
    return error


def build_random(
    config: Any, *, dtype: torch.dtype, device: torch.device | str, experts: str, attention: str | None, seed: int
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
        raise class_error(error, config, attention) from error


def load_pretrained(
    model: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, experts: str, attention: str | None
) -> Any:
    """Load safetensors weights from the hub's cache or a local folder, straight to ``device`` in ``dtype``.

    Checkpoints that store one tensor an expert (OLMoE) are merged into batched tensors on ``device``, one target tensor
    at a time: beyond the model itself at most one gate/up tensor more is alive (see :func:`_one_tensor_at_a_time`).

    Raises:
        UserError: a file that is missing and how to fetch it; weights that are missing (they would be random) or of
            another shape; a checkpoint that wants to run code of its own, which is never done.
    """
    from transformers import AutoModelForCausalLM

    files.check_available(model)
    _need_accelerate()
    source = files.source_of(model)
    try:
        with _one_tensor_at_a_time():
            loaded, info = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype,
                device_map={"": str(device)},
                experts_implementation=experts,
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
                **_revision(model),
            )
    except (OSError, ValueError) as error:
        raise UserError(
            f"model={model.name}: {files.described(model)} cannot be loaded ({_first_line(error)}); "
            f"give model.path=FOLDER, or fetch it with: {files.fetch_command(model)}"
        ) from error
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):
            raise
        raise UserError(
            f"model={model.name}: the expert tensors of {files.described(model)} cannot be merged (one of them is "
            "missing or of another shape, the log names it): give a complete checkpoint"
        ) from error
    _refuse_incomplete(model, info)
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # what merging took is not part of the run
    return loaded


@contextmanager
def _one_tensor_at_a_time() -> Iterator[None]:
    """Switch off transformers' read-ahead threads, which hold up to the whole checkpoint as separate expert tensors.

    They run ahead of the merging; on a GPU their 4 MB pieces then stay in the allocator's cache: a second copy's worth
    of reserved memory. The variable is read at each call of ``from_pretrained``.
    """
    before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before


def _need_accelerate() -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise UserError(
            "model.weights=pretrained: the package accelerate, with which transformers loads straight to a device, is "
            "not installed; pip install accelerate, or use model.weights=random"
        )


def _refuse_incomplete(model: ModelConfig, info: dict[str, Any]) -> None:
    lacking = sorted(info["missing_keys"])
    if lacking:
        raise UserError(
            f"model={model.name}: checkpoint {files.described(model)} lacks {len(lacking)} weights, {lacking[0]} "
            "first; they would be random: give a complete checkpoint"
        )
    if info["mismatched_keys"]:
        name, found, wanted = sorted(info["mismatched_keys"])[0]
        raise UserError(
            f"model={model.name}: checkpoint {files.described(model)} has {name} as {list(found)} and its config wants "
            f"{list(wanted)}: give a checkpoint that fits its config.json"
        )
    if info["unexpected_keys"]:
        names = sorted(info["unexpected_keys"])
        print(f"{len(names)} weights of the checkpoint are not in the model and were left out: {names[0]} first")


def _revision(model: ModelConfig) -> dict[str, str]:
    return {} if model.path or not model.revision else {"revision": model.revision}


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:160]


def pretrained_architecture(model: ModelConfig) -> Any:
    """The checkpoint's own transformers config. Raises UserError when it cannot be read."""
    from transformers import AutoConfig

    files.check_available(model)
    try:
        return AutoConfig.from_pretrained(files.source_of(model), trust_remote_code=False, **_revision(model))
    except (OSError, ValueError) as error:
        raise UserError(
            f"model={model.name}: no usable config.json in {files.described(model)} ({_first_line(error)}); "
            f"fetch it with: {files.fetch_command(model)}"
        ) from error


def load_tokenizer(model: ModelConfig) -> Any:
    """The checkpoint's own tokenizer, from the hub's cache or its folder. Raises UserError when it is not there."""
    from transformers import AutoTokenizer

    files.check_available(model, weights=model.weights == "pretrained")
    try:
        return AutoTokenizer.from_pretrained(files.source_of(model), trust_remote_code=False, **_revision(model))
    except (OSError, ValueError) as error:
        raise UserError(
            f"model={model.name}: no tokenizer in {files.described(model)} ({_first_line(error)}); "
            f"fetch it with: {files.fetch_command(model)}"
        ) from error
