"""What is computed: memory, its parts and step time of a training set-up on fake tensors, without a GPU.

The package can be called: ``from sonar_repro import forecast; forecast("olmoe", method="sonar", batch=4)``
(:func:`sonar_repro.harness.ask.forecast`). A name is both a room and its front door; Python allows it by the class of
a module. Nothing here imports torch before it is asked something.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _Room(types.ModuleType):
    """This package, callable."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """:func:`sonar_repro.harness.ask.forecast`."""
        # By its name: composing an arm is the harness's work, which stands on this room.
        ask = importlib.import_module("..harness.ask", __name__)
        return ask.forecast(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
