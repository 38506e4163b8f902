"""Which expert kernels there are, whether they run here, and under which name transformers knows them.

A new backend is one line in ``BACKENDS`` and one YAML file. One that transformers does not bring along has an adapter
module with three functions: ``why_not(device)`` (a reason or None), ``register()`` (puts the implementation into
``transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS`` and returns its name), ``versions()`` (for the record).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Unsupported, UserError


@dataclass(frozen=True)
class Backend:
    """One backend: the adapter module to import (none: transformers has it), and what it needs."""

    adapter: str | None = None
    package: str | None = None
    extra: str | None = None
    install: str | None = None  # in place of an extra, for a library that is not on the package index
    cuda_only: bool = False


#: The commit that the adapter is written for. A package index refuses such a reference in metadata: it is no extra.
SCATTERMOE = "scattermoe @ git+https://github.com/shawntan/scattermoe@47b5e1502e5a10e82c8e5945d761b877849871e7"

BACKENDS: dict[str, Backend] = {
    "eager": Backend(),
    "grouped_mm": Backend(),
    "sonicmoe": Backend("sonar_repro.kernels.sonicmoe", extra="sonicmoe", cuda_only=True),
    "scattermoe": Backend("sonar_repro.kernels.scattermoe", "scattermoe", install=SCATTERMOE, cuda_only=True),
}


def status(name: str, device: str) -> str | None:
    """Why backend ``name`` cannot run on ``device`` here, or None when it can."""
    backend = BACKENDS[name]
    if backend.cuda_only and device != "cuda":
        way_out = "use backend=grouped_mm, or scale=forecast for its memory"
        return f"backend={name}: its kernels need a CUDA GPU and this arm runs on {device}; {way_out}"
    if backend.package and importlib.util.find_spec(backend.package) is None:
        way_out = f"pip install '{backend.install or f'sonar_repro[{backend.extra}]'}'"
        return f"backend={name}: the package {backend.package} is not installed; {way_out}"
    reason = importlib.import_module(backend.adapter).why_not(device) if backend.adapter else None
    return f"backend={name}: {reason}" if reason else None


def require(name: str, device: str) -> str:
    """Make a backend usable and return its transformers name.

    Raises:
        UserError: no such backend.
        Unsupported: it cannot run here; the message says why and what to use.
    """
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"backend={name}: unknown{hint}; choose one of {', '.join(BACKENDS)}")
    reason = status(name, device)
    if reason:
        raise Unsupported(reason)
    adapter = BACKENDS[name].adapter
    return importlib.import_module(adapter).register() if adapter else name


def kernel_versions(name: str) -> dict[str, Any]:
    """Versions of a backend's own packages for the record; {} for what torch and transformers bring along."""
    adapter = BACKENDS[name].adapter if name in BACKENDS else None
    return importlib.import_module(adapter).versions() if adapter else {}


def ran_implementation(model: torch.nn.Module) -> str:
    """The experts implementation that the built model really uses, as transformers resolved it."""
    return str(getattr(model.config, "_experts_implementation", None) or "eager")
