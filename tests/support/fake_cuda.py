"""CUDA without a GPU: a driver, an nvidia-smi and a ``torch.cuda`` that answer as the real ones do, and keep a log."""

import ctypes
import os
from pathlib import Path

import torch

UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"


PATCHED = ("is_available", "init", "reset_peak_memory_stats", "memory_stats", "synchronize", "max_memory_allocated")
PATCHED += ("max_memory_reserved", "mem_get_info", "get_device_properties", "get_device_name", "get_device_capability")
PATCHED += ("set_per_process_memory_fraction", "empty_cache")


class Driver:
    """libcuda's calls that ``sonar_repro.machine`` makes; each returns 0 (CUDA_SUCCESS) and fills its pointer."""

    def __init__(self, devices=1, total=24_000_000_000, name=b"Fake GPU", capability=(9, 0), fail=None):
        self.devices, self.total, self.name, self.capability, self.fail = devices, total, name, capability, fail

    def _end(self, call):
        return 999 if call == self.fail else 0

    def cuInit(self, flags):
        return self._end("cuInit")

    def cuDeviceGetCount(self, count):
        count._obj.value = self.devices
        return self._end("cuDeviceGetCount")

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return self._end("cuDeviceGet")

    def cuDeviceGetName(self, name, size, device):
        name.value = self.name
        return self._end("cuDeviceGetName")

    def cuDeviceGetUuid(self, identity, device):
        ctypes.memmove(identity._obj, bytes.fromhex(UUID[4:].replace("-", "")), 16)
        return self._end("cuDeviceGetUuid")

    def cuDeviceTotalMem_v2(self, total, device):
        total._obj.value = self.total
        return self._end("cuDeviceTotalMem_v2")

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.capability[attribute - 75]
        return self._end("cuDeviceGetAttribute")


def nvidia_smi(folder: Path, monkeypatch, card: str, apps: str = "", code: int = 0) -> Path:
    """Put an ``nvidia-smi`` on the PATH that prints ``card`` or ``apps``, as queried; returns its log of calls."""
    folder.mkdir(exist_ok=True)
    log, script = folder / "calls.txt", folder / "nvidia-smi"
    (folder / "card.txt").write_text(card)
    (folder / "apps.txt").write_text(apps)
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in\n'
        f"*query-gpu*) cat {folder}/card.txt ;;\n*query-compute-apps*) cat {folder}/apps.txt ;;\nesac\nexit {code}\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return log


class Cuda:
    """The statistics that PyTorch keeps of one device. Before :meth:`init` they are empty and cannot be reset."""

    def __init__(self, total=24_000_000_000, free=None, name="Fake GPU", capability=(9, 0)):
        self.total, self.free, self.name, self.capability = total, total if free is None else free, name, capability
        self.log, self.ready = [], False
        self.allocated = self.peak = self.reserved = self.peak_reserved = self.retries = self.ooms = 0

    def allocate(self, nbytes):
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        self.reserved = self.peak_reserved = max(self.reserved, self.allocated)

    def install(self, monkeypatch):
        for name in PATCHED:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        return self

    def is_available(self):
        return True

    def init(self):
        self.ready = True

    def reset_peak_memory_stats(self, device=None):
        if not self.ready:
            raise RuntimeError("Invalid device argument 0: did you call init?")
        self.log.append("reset")
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def memory_stats(self, device=None):
        if not self.ready or not self.peak:
            return {}
        counts = {"num_alloc_retries": self.retries, "num_ooms": self.ooms}
        return {**counts, "requested_bytes.all.peak": self.peak - 100}

    def synchronize(self, device=None):
        self.log.append("synchronize")

    def max_memory_allocated(self, device=None):
        return self.peak

    def max_memory_reserved(self, device=None):
        return self.peak_reserved

    def mem_get_info(self, device=None):
        return self.free, self.total

    def get_device_properties(self, device=None):
        return type("Properties", (), {"total_memory": self.total})

    def get_device_name(self, device=None):
        return self.name

    def get_device_capability(self, device=None):
        return self.capability

    def set_per_process_memory_fraction(self, share, device=None):
        self.log.append(("fraction", share))

    def empty_cache(self):
        self.log.append("empty_cache")
