"""Facts about the machine that need no torch: the parent process stays light."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import subprocess
from pathlib import Path
from typing import Any


@functools.cache
def cuda_device_count() -> int:
    """How many CUDA devices the driver shows to this process (CUDA_VISIBLE_DEVICES respected); 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


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


def gpu_facts() -> dict[str, Any]:
    """Driver, power limit (W), clocks (MHz), memory in use of the first visible card, by nvidia-smi; {} without."""
    fields = "driver_version,power.limit,clocks.sm,clocks.max.sm,memory.used"
    try:
        out = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    driver, power, clock, top, used = [v.strip() for v in out.split(",")]

    def number(text: str) -> float | None:
        with contextlib.suppress(ValueError):
            return float(text)
        return None

    return {
        "driver": driver,
        "power_limit_w": number(power),
        "clock_mhz": number(clock),
        "clock_max_mhz": number(top),
        "used_before_mib": number(used),
    }
