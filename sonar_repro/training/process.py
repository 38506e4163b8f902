"""An arm's process before its model: threads, determinism, device, and the facts about it that go to the record."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..config.schema import Config
from ..errors import Unsupported
from ..kernels.registry import kernel_versions
from ..machine import cpu_name, git_state, gpu_facts

#: glibc's ``mallopt`` names (malloc.h) and what an arm's process sets: freed pages stay with the process.
HEAP_SETTINGS = {"M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_TOP_PAD": (-2, 64 * 2**20), "M_MMAP_MAX": (-4, 0)}


def prepare_process(config: Config) -> None:
    """Threads, heap, seeds and determinism, the same for every arm of a comparison."""
    torch.set_num_threads(config.threads)
    keep_freed_pages()
    torch.manual_seed(config.seed)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)


def keep_freed_pages() -> None:
    """Let glibc reuse freed memory instead of returning it to the kernel after every operator.

    By default each tensor of over 128 KB is a mapping of its own, and its page faults are a fifth of a CPU step. CUDA's
    allocator keeps its blocks in the same way. Another C library has no ``mallopt``: then nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in HEAP_SETTINGS.values():
            mallopt(name, value)


def device_of(config: Config) -> torch.device:
    """The device of a real run. Raises Unsupported when the scale names CUDA and there is none."""
    wanted = config.scale.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise Unsupported(f"scale={config.scale.name}: needs a CUDA GPU; use scale=smoke or scale=forecast")
    return torch.device(wanted)


def set_memory_cap(config: Config, device: torch.device) -> str | None:
    """Cap PyTorch's allocator inside this process (Table 6). Returns how the cap is enforced, None without a cap.

    Raises:
        Unsupported: the card, or what others left of it, is smaller than the cap: an out-of-memory would not be its.
    """
    if config.memory_cap_gb is None:
        return None
    if device.type != "cuda":
        return "tracker"
    cap = int(config.memory_cap_gb * 1e9)
    free, total = torch.cuda.mem_get_info(device)
    if cap > free:
        raise Unsupported(
            f"memory_cap_gb={config.memory_cap_gb:g}: the card has {free / 1e9:.1f} GB free of {total / 1e9:.1f}; an "
            "out-of-memory would not be the cap's: free the card or use a larger one"
        )
    torch.cuda.set_per_process_memory_fraction(memory_fraction(cap, total_memory(device)), device)
    return "cuda"


def lift_memory_cap(cap: str | None, device: torch.device) -> None:
    """End the cap once everything is measured: evaluation and the comparison with the start are not part of the arm."""
    if cap == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def total_memory(device: torch.device | str | int = "cuda") -> int:
    """The bytes that the allocator takes its fraction of."""
    return torch.cuda.get_device_properties(device).total_memory


def memory_fraction(cap: int, total: int) -> float:
    """The share that allows ``cap`` bytes and not 1 KB more: the allocator truncates ``share * total`` to an integer.

    Rounded up: a cap one byte short is a spurious out-of-memory.
    """
    share = min(1.0, cap / total)
    while share < 1.0 and int(share * total) < cap:
        share = min(1.0, math.nextafter(share, 2.0))
    return share


def environment(
    config: Config,
    device: str,
    experts: str,
    attention: str | None,
    optimizer: str,
    card: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The record's ``environment``: versions, commit, machine, and what really ran.

    Args:
        card: :func:`sonar_repro.machine.gpu_facts` from before the run used the card; read now if None.
    """
    import transformers

    commit, dirty = git_state(Path(__file__).parents[1])
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
        facts["device_memory_bytes"] = total_memory()
        facts["allocator_settings"] = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
        facts["cublas_workspace_config"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        facts["kernels"] = kernel_versions(config.backend.name)
        facts.update(gpu_facts() if card is None else card)
    return facts
