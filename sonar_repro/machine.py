"""Facts about the machine that need no torch: the parent process stays light."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Card:
    """The first CUDA device that the driver shows to this process."""

    name: str
    uuid: str  # as nvidia-smi writes it
    total_bytes: int
    capability: tuple[int, int]


@functools.cache
def _driver() -> Any:
    """The CUDA driver, initialised without a context on any card; None without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


@functools.cache
def cuda_device_count() -> int:
    """How many CUDA devices the driver shows to this process (CUDA_VISIBLE_DEVICES respected); 0 without a driver."""
    driver, count = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@functools.cache
def first_card() -> Card | None:
    """Name, UUID, memory and compute capability of the first visible device, or None."""
    if cuda_device_count() == 0:
        return None
    driver, device = _driver(), ctypes.c_int(0)
    name, identity, total = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)(), ctypes.c_size_t(0)
    version = (ctypes.c_int(0), ctypes.c_int(0))
    calls = (
        driver.cuDeviceGet(ctypes.byref(device), 0),
        driver.cuDeviceGetName(name, 256, device),
        driver.cuDeviceGetUuid(ctypes.byref(identity), device),
        driver.cuDeviceTotalMem_v2(ctypes.byref(total), device),
        driver.cuDeviceGetAttribute(ctypes.byref(version[0]), 75, device),  # COMPUTE_CAPABILITY_MAJOR
        driver.cuDeviceGetAttribute(ctypes.byref(version[1]), 76, device),  # COMPUTE_CAPABILITY_MINOR
    )
    if any(calls):
        return None
    major, minor = (number.value for number in version)
    return Card(name.value.decode(), f"GPU-{uuid.UUID(bytes=bytes(identity))}", total.value, (major, minor))


def cpu_name() -> str:
    """The processor's model name, or the architecture where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """(commit, dirty) of the checkout that holds ``folder``; (None, None) in a wheel or without git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        inside = Path(_git(folder, "rev-parse", "--show-toplevel")) == folder.parent
    except (OSError, subprocess.SubprocessError):
        return None, None
    return (commit, bool(_git(folder, "status", "--porcelain", "-uno"))) if inside else (None, None)


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


#: nvidia-smi's field -> the record's key in ``environment``
GPU_FIELDS = {
    "power.limit": "power_limit_w",
    "clocks.sm": "clock_mhz",
    "clocks.max.sm": "clock_max_mhz",
    "temperature.gpu": "temperature_c",
    "memory.used": "used_before_mib",
}
#: An idle card shows up to about this much in use: what the driver itself keeps.
IDLE_MIB = 1024


def gpu_facts(identifier: str | None = None) -> dict[str, Any]:
    """Driver, power limit, clocks, temperature, memory in use and other processes of one card; {} without nvidia-smi.

    Call it before this process uses the card: ``used_before_mib`` is then what others hold.

    Args:
        identifier: UUID of the card; None for the first visible one (nvidia-smi itself ignores CUDA_VISIBLE_DEVICES).
    """
    if identifier is None:
        card = first_card()
        identifier = card.uuid if card else "0"
    lines = _nvidia_smi(identifier, "--query-gpu=driver_version," + ",".join(GPU_FIELDS))
    if not lines:
        return {}
    driver, *values = [value.strip() for value in lines[0].split(",")]
    facts: dict[str, Any] = {"driver": driver, **{key: _number(v) for key, v in zip(GPU_FIELDS.values(), values)}}
    apps = [line.split(",") for line in _nvidia_smi(identifier, "--query-compute-apps=pid,used_memory") or []]
    others = [(int(pid), _number(used)) for pid, used in apps if pid.strip().isdigit() and int(pid) != os.getpid()]
    facts["other_processes"] = [{"pid": pid, "used_mib": used} for pid, used in others]
    return facts


def shared_card(facts: dict[str, Any]) -> str | None:
    """In one sentence who else is on the card, or None: peaks are ours alone, times and what is left are not."""
    others = facts.get("other_processes") or []
    used = facts.get("used_before_mib") or 0.0
    if not others and used <= IDLE_MIB:
        return None
    who = ", ".join(str(other["pid"]) for other in others) or "not shown to us"
    gigabytes = used * 1024**2 / 1e9
    return f"the GPU is shared: {gigabytes:.1f} GB are in use before this run (processes: {who}); times suffer"


def _nvidia_smi(identifier: str, query: str) -> list[str] | None:
    command = ["nvidia-smi", "-i", identifier, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line for line in done.stdout.splitlines() if line.strip()]


def _number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text)
    return None
