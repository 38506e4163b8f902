"""An arm's process before its model: threads, determinism, device, and the facts about it that go to the record."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..config import Config
from ..errors import Unsupported
from ..machine import cpu_name, git_state, gpu_facts


def prepare_process(config: Config) -> None:
    """Threads, seeds and determinism, the same for every arm of a comparison."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)


def device_of(config: Config) -> torch.device:
    """The device of a real run. Raises Unsupported when the scale names CUDA and there is none."""
    wanted = config.scale.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise Unsupported(f"scale={config.scale.name}: needs a CUDA GPU; use scale=smoke or scale=forecast")
    return torch.device(wanted)


def set_memory_cap(config: Config, device: torch.device) -> str | None:
    """Cap PyTorch's allocator inside this process (Table 6). Returns how the cap is enforced, None without a cap."""
    if config.memory_cap_gb is None:
        return None
    if device.type != "cuda":
        return "tracker"
    total = torch.cuda.get_device_properties(device).total_memory
    cap = config.memory_cap_gb * 1e9
    # Rounded up to the next representable share: a cap one byte short is a spurious out-of-memory.
    share = min(1.0, (int(cap) + 1) / total)
    torch.cuda.set_per_process_memory_fraction(share, device)
    return "cuda"


def environment(config: Config, device: str, experts: str, attention: str | None, optimizer: str) -> dict[str, Any]:
    """The record's ``environment``: versions, commit, machine, and what really ran."""
    import transformers

    commit, dirty = git_state(Path(__file__).parent.parent)
    facts: dict[str, Any] = {
        "package_version": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "git_commit": commit,
        "git_dirty": dirty,
        "device": device,
        "device_name": cpu_name(),
        "driver": None,
        "power_limit_w": None,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "experts_implementation": experts,
        "attention_implementation": attention,
        "deterministic": config.deterministic,
        "optimizer_class": optimizer,
    }
    if device == "cuda":
        facts["device_name"] = torch.cuda.get_device_name()
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        facts["cuda"] = torch.version.cuda
        facts["device_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        facts.update(gpu_facts())
    return facts
