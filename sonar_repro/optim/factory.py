"""Optimizer factories by name. A new optimizer is one file with a ``build`` function and one line in ``REGISTRY``."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:  # the registry itself loads no torch
    from torch import nn
    from torch.nn import Parameter
    from torch.optim import Optimizer


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _betas(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(_number(b) and 0 <= b < 1 for b in value)


# hyperparameter -> (test, what is allowed)
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (lambda v: _number(v) and v >= 0, "a number of at least 0"),
    "betas": (_betas, "two numbers in [0, 1)"),
    "eps": (lambda v: _number(v) and v > 0, "a positive number"),
    "weight_decay": (lambda v: _number(v) and v >= 0, "a number of at least 0"),
    "momentum": (lambda v: _number(v) and 0 <= v < 1, "a number in [0, 1)"),
    "dampening": (lambda v: _number(v) and 0 <= v < 1, "a number in [0, 1)"),
    "nesterov": (lambda v: isinstance(v, bool), "true or false"),
    "fused": (lambda v: v is None or isinstance(v, bool), "true, false or null"),
    "min_8bit_size": (lambda v: isinstance(v, int) and v >= 0, "an int of at least 0"),
}


@dataclass(frozen=True)
class Entry:
    """Where an optimizer is built (``module:function``), what is passed besides, and which hyperparameters it takes.

    ``allowed=None``: the module checks for itself, with a function ``validate(variant, hyper)`` if it has one.
    """

    path: str
    fixed: dict[str, Any] = field(default_factory=dict)
    allowed: tuple[str, ...] | None = None


_MESH = "sonar_repro.optim.mesh:build"
MESH_NAMES = (
    "sinkgd",
    "sage",
    "direct",
    "mesh",
    "mesh_b",
    "mesh_full",
    "mesh_b_full",
    "mesh_v_only",
    "mesh_sign_only",
    "mesh_factored_v",
    "mesh_adamw",
)
REGISTRY: dict[str, Entry] = {
    "adamw": Entry("sonar_repro.optim.library:adamw", allowed=("lr", "betas", "eps", "weight_decay", "fused")),
    "adamw8bit": Entry(
        "sonar_repro.optim.library:adamw8bit", allowed=("lr", "betas", "eps", "weight_decay", "min_8bit_size")
    ),
    "sgd": Entry(
        "sonar_repro.optim.library:sgd", allowed=("lr", "momentum", "dampening", "nesterov", "weight_decay", "fused")
    ),
    "lion": Entry("sonar_repro.optim.lion:build", allowed=("lr", "betas", "weight_decay")),
    **{name: Entry(_MESH, {"variant": name}) for name in MESH_NAMES},
}


@dataclass(frozen=True)
class Factory:
    """Makes one inner optimizer from the named parameters it must own and the model they belong to."""

    kind: str
    hyper: dict[str, Any]

    def __call__(self, named_parameters: Sequence[tuple[str, Parameter]], model: nn.Module) -> Optimizer:
        entry = REGISTRY[self.kind]
        module, function = entry.path.split(":")
        return getattr(importlib.import_module(module), function)(named_parameters, model, **entry.fixed, **self.hyper)


def make_factory(kind: str, **hyper: Any) -> Factory:
    """A factory for :class:`sonar_repro.methods.ScheduledOptimizer`.

    Args:
        kind: a name in ``REGISTRY``.
        hyper: its hyperparameters; what is left out keeps the optimizer's own default.

    Raises:
        UserError: unknown name (with near matches), unknown hyperparameter, or a value out of range.
    """
    if kind not in REGISTRY:
        raise UserError(f"optimizer={kind!r}: unknown; {_hint(kind, REGISTRY)}")
    entry = REGISTRY[kind]
    hyper = {key: tuple(value) if isinstance(value, list) else value for key, value in hyper.items()}
    if entry.allowed is not None:
        for key, value in hyper.items():
            if key not in entry.allowed:
                raise UserError(f"optimizer {kind} has no hyperparameter {key}={value!r}; {_hint(key, entry.allowed)}")
            test, allowed = CHECKS[key]
            if not test(value):
                raise UserError(f"optimizer {kind}: {key}={value!r} is not {allowed}")
    else:
        validate = getattr(importlib.import_module(entry.path.split(":")[0]), "validate", None)
        if validate is not None:
            validate(hyper=hyper, **entry.fixed)
    return Factory(kind, hyper)


def _hint(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(known)}"
