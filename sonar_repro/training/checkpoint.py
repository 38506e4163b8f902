"""Checkpoints inside an arm: a killed run goes on bit for bit; a finished one can be saved for ``from_pretrained``."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..models.experts import find_expert_tensors
from ..records import MODEL_FOLDER, WEIGHTS_FILE

FOLDER = "checkpoint"


def _folder(run: Any) -> Path:
    return run.report.arm_dir / FOLDER


def save(run: Any, step: int) -> None:
    """Write everything that step ``step + 1`` depends on, then swap it in: there is always one whole checkpoint.

    Weights, optimizer state (by parameter name), scheduler, random generators, and the losses and norms so far.
    """
    new, final = _folder(run).with_suffix(".new"), _folder(run)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    state = {
        "fingerprint": run.fingerprint,
        "step": step,
        "model": {name: p.detach() for name, p in run.model.named_parameters()},
        "buffers": {name: b for name, b in run.model.named_buffers()},
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if run.device.type == "cuda" else [],
        "losses": run.train_losses,
        "norms": run.norms,
        "skipped": run.skipped,
    }
    with open(new / "state.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    old = final.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def resume(run: Any) -> int:
    """Load this arm's checkpoint if there is one. Returns the last finished step, 0 for a fresh start."""
    path = next(
        (f / "state.pt" for f in (_folder(run), _folder(run).with_suffix(".old")) if (f / "state.pt").is_file()), None
    )
    if path is None or run.config.force:
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if state["fingerprint"] != run.fingerprint:
        run.report.note("a checkpoint of another configuration was found and not used")
        return 0
    with torch.no_grad():
        parameters, buffers = dict(run.model.named_parameters()), dict(run.model.named_buffers())
        for name, value in state["model"].items():
            parameters[name].copy_(value)
        for name, value in state["buffers"].items():
            buffers[name].copy_(value)
    run.optimizer.load_state_dict(state["optimizer"])
    run.scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"]:
        torch.cuda.set_rng_state_all(state["cuda_rng"])
    run.train_losses, run.norms, run.skipped = list(state["losses"]), list(state["norms"]), state["skipped"]
    return int(state["step"])


def remove(run: Any) -> None:
    """A finished arm needs no checkpoint."""
    for folder in (_folder(run), _folder(run).with_suffix(".old"), _folder(run).with_suffix(".new")):
        shutil.rmtree(folder, ignore_errors=True)


def save_model(run: Any) -> None:
    """Write ``model/`` in the arm's folder: safetensors, config and tokenizer, as ``from_pretrained`` loads them."""
    folder = run.report.arm_dir / MODEL_FOLDER
    new = folder.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    run.model.save_pretrained(new)
    run.tokenizer.save_pretrained(new)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    run.report.section("saved_model", MODEL_FOLDER)


def save_weights(run: Any) -> None:
    """Write the final weights, and which of them are expert tensors, for a comparison with another arm's."""
    names = {tensor.name for tensor in find_expert_tensors(run.model)}
    weights = {name: p.detach().contiguous() for name, p in run.model.named_parameters()}
    new = run.report.arm_dir / f"{WEIGHTS_FILE}.new"
    save_file(weights, new, metadata={"experts": json.dumps(sorted(names))})
    new.rename(run.report.arm_dir / WEIGHTS_FILE)
