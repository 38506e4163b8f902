"""What may be given as a factory: a function of named parameters and model, or an optimizer class with its settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import UserError

_WAYS = (
    "give make_factory('adamw', lr=...), a class with its settings (torch.optim.AdamW, method, lr=...), or a function "
    "(named_parameters, model) -> optimizer"
)


def as_factory(factory: Any, hyper: dict[str, Any]) -> Callable:
    """The factory that ``factory`` stands for.

    Args:
        factory: a factory; or an optimizer class, also in a ``functools.partial`` or as ``(class, settings)``, whose
            objects are made over the parameters they are to own.
        hyper: settings for the class.

    Raises:
        UserError: anything else, such as an optimizer that exists already, its name, or a function of other arguments.
    """
    if isinstance(factory, tuple) and len(factory) == 2 and isinstance(factory[1], dict):
        factory, hyper = factory[0], {**factory[1], **hyper}
    if isinstance(factory, functools.partial) and _is_class(factory.func) and not factory.args:
        factory, hyper = factory.func, {**factory.keywords, **hyper}
    if _is_class(factory):
        return functools.partial(_of_class, factory, hyper)
    if hyper:
        raise UserError(f"{next(iter(hyper))}=: ScheduledOptimizer has no such argument; it goes to an optimizer class")
    if isinstance(factory, torch.optim.Optimizer):
        raise UserError(
            f"factory is a {type(factory).__name__} that exists already, but every hooked tensor needs one of its own: "
            f"{_WAYS}"
        )
    if not callable(factory) or isinstance(factory, nn.Module):
        raise UserError(f"factory={factory!r:.80}: {_WAYS}")
    _check_signature(factory)
    return functools.partial(_checked, factory)


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


def _of_class(kind: type, hyper: dict[str, Any], named: Any, model: nn.Module) -> torch.optim.Optimizer:
    try:
        return kind([p for _, p in named], **hyper)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{k}={v!r}" for k, v in hyper.items())
        reason = str(error).splitlines()[0]
        raise UserError(f"{kind.__name__}({given}): {reason}") from error


def _check_signature(factory: Callable) -> None:
    try:
        inspect.signature(factory).bind([], None)
    except TypeError as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        raise UserError(f"factory {name} cannot be called with (named_parameters, model): {error}; {_WAYS}") from error
    except ValueError:  # no signature to look at: builtins
        return


def _checked(factory: Callable, named: Any, model: nn.Module) -> torch.optim.Optimizer:
    made = factory(named, model)
    if not isinstance(made, torch.optim.Optimizer):
        raise UserError(f"factory returned {type(made).__name__}, not a torch.optim.Optimizer: {_WAYS}")
    return made
