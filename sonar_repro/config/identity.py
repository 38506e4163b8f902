"""What an arm is and what it is called: axes, folder name, fingerprint. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from .schema import AXES, FILES_ASIDE, NOT_IDENTITY, TITLED, Config, GpuConfig, ModelConfig, host_file


def accumulation_mode(config: Config) -> str:
    """The mode in force: what was asked, or what the method does by itself."""
    if config.accumulation == 1:
        return "standard"  # one micro-batch is one step, whatever the mode
    if config.accumulation_mode is not None:
        return config.accumulation_mode
    return "standard" if config.method.in_backward == "none" else "update_each"


def fingerprint(config: Config) -> str:
    """sha256 over everything that decides what an arm computes; files count by their content, not their path."""
    data = dataclasses.asdict(config)
    for key in NOT_IDENTITY:
        data.pop(key)
    drop_titles(data)
    for group in ("data", "model"):
        for key in ("path", "config"):
            if data[group].get(key):
                data[group][key] = content_digest(data[group][key])
    data["host"] = content_digest(str(host_file(config.host)))
    if config.scale.name != "forecast":
        data.pop("gpu")
        data.pop("host")
    drop_guard(data)
    data["task"].pop("inputs")
    for key in FILES_ASIDE:
        data["task"].pop(key)
    # The scale's own defaults are already in the top-level keys that they feed.
    data["scale"] = {"name": config.scale.name, "dtype": config.scale.dtype, "device": config.scale.device}
    data["accumulation_mode"] = accumulation_mode(config)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def drop_guard(data: dict[str, Any]) -> None:
    """Where nothing is looked at, the arm is that of before these keys existed."""
    if data["method"]["on_nonfinite"] == "off":
        data["method"].pop("nonfinite_check")
        data["method"].pop("on_nonfinite")


def drop_titles(data: dict[str, Any]) -> None:
    """Take out what only tables use: it decides nothing and is not recorded."""
    for group in TITLED:
        data[group].pop("title")
        data[group].pop("short")


def content_digest(path: str) -> str:
    """sha256 of a file, or of a folder's config.json; the text itself for something that is no path (a hub id)."""
    file = Path(os.path.expanduser(path))
    if file.is_dir():
        file = file / "config.json"
    return hashlib.sha256(file.read_bytes() if file.is_file() else path.encode()).hexdigest()


def method_label(config: Config) -> str:
    """The method axis: of a comparison both sides, of an evaluation the method behind the checkpoint."""
    return "_vs_".join(config.task.pair) or config.task.of or config.method.name


def axes(config: Config) -> dict[str, Any]:
    """The record's ``arm``: every axis by name."""
    return {
        "experiment": config.experiment_name,
        "task": config.task.name,
        "scale": config.scale.name,
        "model": config.model.name,
        "backend": config.backend.name,
        "method": method_label(config),
        "optimizer": config.optimizer.name,
        "batch_size": config.batch_size,
        "accumulation": config.accumulation,
        "accumulation_mode": accumulation_mode(config),
        "checkpointing": config.checkpointing,
        "outputs": config.outputs,
        "memory_cap_gb": config.memory_cap_gb,
        "seed": config.seed,
        "repeat": config.repeat,
        "data": config.data.name,
        "parallel": config.parallel.name,
        "processes": config.parallel.processes,
        "gpu": config.gpu.name if config.scale.name == "forecast" else None,
    }


def arm_id(config: Config, overrides: list[str] | None = None) -> str:
    """Folder name of an arm: its choices, its non-default axes, and six hex digits for any other override."""
    parts = [config.model.name, config.backend.name, method_label(config), config.optimizer.name]
    parts += [f"bs{config.batch_size}", f"s{config.seed}"]
    if config.task.name != "train":
        parts.insert(0, config.task.name)
    if config.accumulation > 1:
        parts.append(f"A{config.accumulation}")
        if config.accumulation_mode == "fold":
            parts.append("fold")
    if config.checkpointing:
        parts.append("gc")
    if config.memory_cap_gb is not None:
        parts.append(f"cap{config.memory_cap_gb!r}".removesuffix(".0"))
    if config.scale.name == "forecast" and config.gpu.name != GpuConfig().name:
        parts.append(config.gpu.name)
    if config.repeat > 1:
        parts.append(f"r{config.repeat}")
    if config.parallel.name != "none":
        parts.append(f"{config.parallel.name}{config.parallel.processes}")
    if any(_is_other(o) for o in overrides or []):
        parts.append(fingerprint(config)[:6])
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in "-".join(parts))


def _is_other(override: str) -> bool:
    """Whether an override changes the arm without being an axis that its id already shows."""
    key = override.lstrip("+~").split("=", 1)[0]
    if key in ("data", "dataset", "accumulation_mode"):  # axes that the id has no part for
        return True
    shown = (*AXES, "experiment", "parallel.processes", "task.pair", "task.of", *(f"task.{key}" for key in FILES_ASIDE))
    return key not in shown and key.split(".")[0] not in (*NOT_IDENTITY, "hydra")


def parameter_count(model: ModelConfig, scale: str) -> int | None:
    """Trainable parameters of a model at a scale, without building it; None for a user's own configuration."""
    if model.config or model.path:
        return None
    return model.parameters.get("smoke" if scale == "smoke" else "full")
