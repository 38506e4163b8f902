"""sonar_repro: what in-backward training of MoE experts really saves, whether it fits your card, and how to trust it.

Importing the package loads no torch: the public names below are resolved on first use (PEP 562).
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_EXPORTS = {
    "ScheduledOptimizer": "sonar_repro.methods",
    "Schedule": "sonar_repro.methods",
    "ScheduledTrainerMixin": "sonar_repro.methods",
    "ScheduledOptimizerCallback": "sonar_repro.methods",
    "data_parallel": "sonar_repro.methods",
    "make_factory": "sonar_repro.optim.factory",
    "from_torch_state": "sonar_repro.methods.convert",
    "find_expert_tensors": "sonar_repro.models.experts",
}
_ROOMS = ("forecast",)  # a package that is called: forecast("olmoe", method="sonar")
__all__ = ["__version__", *_EXPORTS, *_ROOMS]


def __getattr__(name: str):
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'sonar_repro' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
