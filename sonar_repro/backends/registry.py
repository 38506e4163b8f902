"""Which expert kernels there are, whether they run here, and under which name transformers knows them.

A new backend is one line in ``BACKENDS`` and one YAML file; its adapter module registers the implementation with
``transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS`` when it is imported by :func:`require`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from dataclasses import dataclass

import torch

from ..errors import Unsupported, UserError


@dataclass(frozen=True)
class Backend:
    """One backend: its transformers name, the adapter to import (if any), and what it needs."""

    implementation: str
    adapter: str | None = None  # module whose ``register()`` puts the implementation into transformers
    package: str | None = None
    extra: str | None = None
    cuda_only: bool = False
    min_python: tuple[int, int] = (3, 11)


BACKENDS: dict[str, Backend] = {
    "eager": Backend("eager"),
    "grouped_mm": Backend("grouped_mm"),
    "sonicmoe": Backend("sonicmoe", package="kernels", extra="sonicmoe", cuda_only=True),
    "scattermoe": Backend("scattermoe", package="scattermoe", extra="scattermoe", cuda_only=True),
}


def status(name: str, device: str) -> str | None:
    """Why backend ``name`` cannot run on ``device`` here, or None when it can."""
    backend = BACKENDS[name]
    if sys.version_info[:2] < backend.min_python:
        need = ".".join(map(str, backend.min_python))
        return f"backend={name}: needs Python {need} or newer, this is {sys.version_info[0]}.{sys.version_info[1]}"
    if backend.cuda_only and device != "cuda":
        way_out = "use backend=grouped_mm, or scale=forecast for its memory"
        return f"backend={name}: its kernels need a CUDA GPU and this arm runs on {device}; {way_out}"
    if backend.package and importlib.util.find_spec(backend.package) is None:
        way_out = f"pip install 'sonar_repro[{backend.extra}]'"
        return f"backend={name}: the package {backend.package} is not installed; {way_out}"
    if name == "scattermoe" and backend.adapter is None:
        return f"backend={name}: this version has no adapter for it yet; use backend=grouped_mm"
    return None


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
    backend = BACKENDS[name]
    if backend.adapter:
        importlib.import_module(backend.adapter).register()
    return backend.implementation


def ran_implementation(model: torch.nn.Module) -> str:
    """The experts implementation that the built model really uses, as transformers resolved it."""
    return str(getattr(model.config, "_experts_implementation", None) or "eager")
