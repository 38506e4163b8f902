"""What is looked at until the first step is made: was it this model that ran, and did nobody change its gradients?"""

from __future__ import annotations

import functools
import gc
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter

from ..errors import UserError


class _Ran:
    """Forward pre-hook of the model. A copy of the model has a copy of it that tells nobody."""

    def __init__(self, first: weakref.ref | None) -> None:
        self.first = first

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        first = self.first and self.first()
        if first is not None:
            first.ran = True

    def __deepcopy__(self, memo: Any) -> _Ran:
        return _Ran(None)

    def __reduce__(self) -> tuple:
        return _Ran, (None,)


def _note(first: weakref.ref, parameter: Parameter) -> None:
    here = first()
    if here is not None and parameter.grad is not None:
        here.versions[id(parameter)] = parameter.grad._version


class FirstStep:
    """Hooks that are removed once the first step is made; later steps cost nothing.

    Args:
        model: what the optimizer was built on.
        watched: (name, parameter) whose gradients are to reach ``step`` as backward made them.
    """

    def __init__(self, model: nn.Module, watched: Sequence[tuple[str, Parameter]]) -> None:
        self.ran = False
        self.versions: dict[int, int] = {}
        self.watched = list(watched)
        me = weakref.ref(self)
        note = functools.partial(_note, me)
        self._handles = [p.register_post_accumulate_grad_hook(note) for _, p in watched]
        self._handles.append(model.register_forward_pre_hook(_Ran(me)))
        weakref.finalize(self, _remove, self._handles)

    def changed(self) -> list[str]:
        """Names of the gradients that were changed in place since backward made them."""
        pairs = [(name, p) for name, p in self.watched if p.grad is not None and id(p) in self.versions]
        return [name for name, p in pairs if p.grad._version != self.versions[id(p)]]

    def close(self) -> None:
        _remove(self._handles)
        self.watched, self.versions = [], {}


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def check_gradients_arrived(owned: Sequence[Any], arrived: set[int], ran: bool | None) -> None:
    """Every step: some owned parameter has a gradient. First step (``ran`` given): most have, or the model itself ran.

    A part that a step does not use has no gradient and is no fault; it is named once, in a warning.

    Args:
        owned: list of :class:`~.attachment.Owned`.
        arrived: ids of the parameters that had a gradient in this step.
        ran: whether the forward pass of the model itself was called since the optimizer was built.

    Raises:
        RuntimeError: no gradient arrived; or, in the first step, for the smaller part and the model never ran.
    """
    if ran is None and arrived:
        return
    lacking = [o.name for o in owned if id(o.parameter) not in arrived and o.parameter.requires_grad]
    if not arrived:
        raise RuntimeError(
            f"none of its {len(owned)} parameters received a gradient in this step (first {owned[0].name}): {_OTHER}"
        )
    if not lacking:
        return
    found = f"{lacking[0]} ({len(lacking)} of {len(owned)} parameters) received no gradient in the first step"
    if not ran and 2 * len(lacking) > len(owned):
        raise RuntimeError(f"{found}, and the model that the optimizer was built on never ran: {_OTHER}")
    warnings.warn(f"{found}: right for a part that this step does not use; else {_OTHER}", stacklevel=3)


_OTHER = (
    "the model that was trained is not the one the optimizer was built on (deepcopy, a wrapper that copies, PEFT), or "
    "backward did not run: build the optimizer last, on the model that the loop calls"
)


def refuse_scaled_loss(method: str) -> None:
    """Before the first update inside backward: the loss was scaled by a ``GradScaler``.

    Its own calls (``unscale_``, ``step``) come after backward, when hooks have already used scaled gradients. So the
    roots of this backward pass are looked at: a product with a constant, while an enabled scaler is alive that has
    scaled a loss. A scaler of another model alone is no reason.

    Raises UserError.
    """
    if not any(_is_multiple(root) for root in _roots()):
        return
    from torch.amp import GradScaler

    kinds = {GradScaler, *_subclasses(GradScaler)}
    for scaler in [thing for thing in gc.get_objects() if type(thing) in kinds]:
        if scaler._enabled and scaler._scale is not None:  # made by the first scale(loss)
            raise UserError(
                f"GradScaler (fp16) with {method}: updates inside backward see gradients that are not unscaled yet; "
                "nothing was updated. Train in bf16 or use a standard_* method (if the scaler is another model's, set "
                "optimizer.gradients_are_unscaled = True)"
            )


def _roots() -> list[Any]:
    """The tensors that backward was called on, from torch's own frame; hooks of a GPU run on another thread."""
    found: list[Any] = []
    for frame in list(sys._current_frames().values()):
        above: Any = frame
        while above is not None:
            if above.f_code.co_name == "_engine_run_backward":
                found += list(above.f_locals.get("t_outputs", ()))
            above = above.f_back
    del frame, above  # a frame that holds itself would keep this step's tensors until the next garbage collection
    return found


def _is_multiple(root: Any) -> bool:
    """Whether it is a tensor times something that needs no gradient, as ``GradScaler.scale`` returns."""
    node = getattr(root, "grad_fn", None)
    return type(node).__name__ == "MulBackward0" and any(function is None for function, _ in node.next_functions)


def _subclasses(kind: type) -> Iterable[type]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def clip_line_hint(changed: Sequence[str], clip: str) -> str:
    """Why a gradient that was changed between backward and ``step`` does not go with a way of clipping."""
    return (
        f"{changed[0]} ({len(changed)} gradients) was changed between backward and step(), by a clip_grad_norm_ line "
        f"in the loop? clip={clip} clips by itself: leave the line out and give the bound as max_grad_norm="
    )


def changes_matter(clip: str) -> bool:
    """Ways of clipping whose joint norm is wrong after a clip of the loop's own; others find nothing to do."""
    return clip in ("lagged", "offloaded")
