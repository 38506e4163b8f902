"""Methods: when each parameter is updated and what is clipped. Importing the package loads no torch (PEP 562)."""

from __future__ import annotations

import importlib

_EXPORTS = {
    "Schedule": ".schedule",
    "METHODS": ".schedule",
    "ScheduledOptimizer": ".optimizer",
    "data_parallel": ".parallel",
    "ClipReport": ".clipping",
    "ScheduledTrainerMixin": ".trainer",
    "ScheduledOptimizerCallback": ".trainer",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name], __name__), name)
    raise AttributeError(f"module 'sonar_repro.methods' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
