"""What is clipped, and the norm that is reported with its scope: one class a way of clipping, chosen by ``clip``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from ..errors import UserError
from .inner import HookedTensor
from .norms import joint_norm, tensor_norm
from .parallel import is_sharded
from .ranges import CLIP, named_range


@dataclass(frozen=True)
class ClipReport:
    """Norm before clipping (0-d tensor on the gradients' device, not synchronised) and whose norm it is.

    ``norm`` is ``None`` when nothing was measured; it is never 0 for "not measured".
    """

    norm: Tensor | None
    scope: str  # all | non_expert | none


class Clip:
    """``clip=all|non_expert|none``: clip the joint norm of the gradients that are left at the end of backward.

    Args:
        scope: what the reported norm covers.
        parameters: those that it covers, in model order.
        max_norm: its bound; ``None`` clips and measures nothing.
    """

    passes = 1  # backward passes a step
    guarded = False  # whether a norm that is not finite must leave no trace (on_nonfinite)

    def __init__(self, scope: str, parameters: Sequence[Parameter], max_norm: float | None, accumulation: int) -> None:
        self.scope = scope if max_norm is not None else "none"
        self.parameters = list(parameters)
        self.ids = {id(p) for p in self.parameters}
        self.max_norm = max_norm
        self.accumulation = accumulation

    @property
    def joint(self) -> bool:
        """Whether a norm that it takes anyway covers every expert gradient, hooked or not."""
        return self.max_norm is not None and (self.scope == "all" or type(self) is TensorClip)

    def on_gradient(self, unit: HookedTensor) -> bool:
        """A hooked tensor's gradient is complete: whether it is to be used at once (and freed)."""
        return True

    def finish(self) -> ClipReport:
        """Clip what is left, in place, exactly as ``clip_grad_norm_`` does."""
        if self.scope == "none":
            return ClipReport(None, "none")
        left = [p for p in self.parameters if p.grad is not None]
        if not left:
            return ClipReport(None, self.scope)
        norm = get_total_norm([p.grad for p in left])
        if is_sharded(norm):  # FSDP2: each rank has the norm of its parts, the joint norm needs all of them
            norm = norm.full_tensor()
        clip_grads_with_norm_(left, self.max_norm, norm)
        return ClipReport(norm, self.scope)

    def norm_of(self, unit: HookedTensor) -> Tensor | None:
        """A norm that was taken already and covers the hooked tensor's gradient at hand, or None."""
        return None

    def pending(self) -> Iterator[HookedTensor]:
        """Hooked tensors whose update had to wait for the norm; each has its clipped gradient while it is yielded."""
        return iter(())

    def check_unscaled(self) -> None:
        """Raise UserError if gradients were scaled down again after they were clipped (``clip=exact``)."""

    def reset(self) -> None:
        """Forget an unfinished step."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs of it."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state`; a state of another way of clipping is ignored."""


class TensorClip(Clip):
    """``clip=tensor``: each hooked tensor by its own norm inside its hook, the rest by their joint norm."""

    _own: Tensor | None = None

    def on_gradient(self, unit: HookedTensor) -> bool:
        if self.max_norm is not None:
            self._own = clip_grad_norm_([unit.parameter], self.max_norm)
        return True

    def norm_of(self, unit: HookedTensor) -> Tensor | None:
        return self._own


class LaggedClip(Clip):
    """``clip=lagged``: hooked gradients are scaled by the coefficient of the previous step's joint norm.

    The first step has no previous norm and leaves hooked gradients as they are. What is left at the end of backward is
    scaled by the coefficient of this step's own joint norm, which is known by then and is the one reported.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.previous: Tensor | None = None
        self._norms: dict[int, Tensor] = {}

    def on_gradient(self, unit: HookedTensor) -> bool:
        if self.max_norm is not None and id(unit.parameter) in self.ids:
            self._norms[id(unit.parameter)] = tensor_norm(unit.parameter.grad)
            if self.previous is not None:
                clip_grads_with_norm_([unit.parameter], self.max_norm, self.previous)
        return True

    def norm_of(self, unit: HookedTensor) -> Tensor | None:
        return self._norms.get(id(unit.parameter))

    def finish(self) -> ClipReport:
        if self.max_norm is None:
            return ClipReport(None, "none")
        left = [p for p in self.parameters if p.grad is not None]
        norms = self._norms | {id(p): tensor_norm(p.grad) for p in left}
        self._norms = {}
        if not norms:
            return ClipReport(None, "all")
        norm = joint_norm(self.parameters, norms)
        before, self.previous = self.previous, norm
        if self.guarded:  # the last finite norm; before there is one, 0, which clips nothing
            before = torch.zeros_like(norm) if before is None else before
            self.previous = torch.where(norm.isfinite(), norm, before)
        clip_grads_with_norm_(left, self.max_norm, norm)
        return ClipReport(norm, "all")

    def reset(self) -> None:
        self._norms = {}

    def state(self) -> dict[str, Any]:
        return {} if self.previous is None else {"previous_norm": self.previous}

    def load_state(self, state: dict[str, Any]) -> None:
        saved = state.get("previous_norm")
        self.previous = None if saved is None else saved.to(self.parameters[0].device, copy=True)


class KeptClip(Clip):
    """``clip=kept``: hooked gradients wait on the device for the joint norm ("delaying the update", Limitations).

    The update is ``clip=all``'s; so is the memory. It is there for comparison.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._waiting: dict[HookedTensor, None] = {}
        self._total: Tensor | None = None

    def on_gradient(self, unit: HookedTensor) -> bool:
        self._waiting[unit] = None
        return False

    def finish(self) -> ClipReport:
        report = super().finish()
        self._total = report.norm
        return report

    def norm_of(self, unit: HookedTensor) -> Tensor | None:
        return self._total if id(unit.parameter) in self.ids else None

    def pending(self) -> Iterator[HookedTensor]:
        yield from self._waiting
        self._waiting = {}

    def reset(self) -> None:
        self._waiting, self._total = {}, None


class OffloadedClip(Clip):
    """``clip=offloaded``: hooked gradients wait in host memory ("offloading", Limitations) and come back one at a time.

    With accumulation they are summed on the host. On a CPU-only machine the host is the device: nothing is saved there.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._host: dict[HookedTensor, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        self._total: Tensor | None = None

    def on_gradient(self, unit: HookedTensor) -> bool:
        gradient = unit.parameter.grad
        if self.accumulation == 1:
            self._norms[id(unit.parameter)] = tensor_norm(gradient)
        if unit in self._host:
            self._host[unit] += gradient.to("cpu")
        else:
            pin = gradient.device.type == "cuda"
            self._host[unit] = torch.empty_like(gradient, device="cpu", pin_memory=pin).copy_(gradient)
        unit.parameter.grad = None
        return False

    def finish(self) -> ClipReport:
        if self.max_norm is None:
            return ClipReport(None, "none")
        left = [p for p in self.parameters if p.grad is not None]
        for unit, held in self._host.items():
            if id(unit.parameter) not in self._norms:
                self._norms[id(unit.parameter)] = tensor_norm(held.to(unit.parameter.device))
        norms = {k: v for k, v in self._norms.items() if k in self.ids} | {id(p): tensor_norm(p.grad) for p in left}
        if not norms:
            return ClipReport(None, "all")
        self._total = joint_norm(self.parameters, norms)
        clip_grads_with_norm_(left, self.max_norm, self._total)
        return ClipReport(self._total, "all")

    def norm_of(self, unit: HookedTensor) -> Tensor | None:
        return self._total if id(unit.parameter) in self.ids else None

    def pending(self) -> Iterator[HookedTensor]:
        while self._host:
            unit = next(iter(self._host))
            unit.parameter.grad = self._host.pop(unit).to(unit.parameter.device)
            if self._total is not None and id(unit.parameter) in self.ids:
                with named_range(CLIP):
                    clip_grads_with_norm_([unit.parameter], self.max_norm, self._total)
            yield unit

    def reset(self) -> None:
        self._host, self._norms, self._total = {}, {}, None


class ExactClip(Clip):
    """``clip=exact``: the joint norm of all gradients with none of the hooked ones kept.

    A first backward pass only takes each gradient's norm and frees it; then the coefficient min(1, max_norm / (norm +
    1e-6)) is known, and a second pass over the same batch and random numbers scales each gradient by it and uses it at
    once. Bit for bit ``clip=all`` where kernels are deterministic; memory of Sonar; about twice the forward and
    backward time. ``ScheduledOptimizer.backward_passes`` drives it.
    """

    passes = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.max_norm is None:
            raise UserError("max_grad_norm=None with clip=exact: there is nothing to measure for; use clip=none")
        self._looked = False
        self._after: Any = None
        self.reset()

    def reset(self) -> None:
        self._phase: str | None = None
        self._norms: dict[int, Tensor] = {}
        self._total: Tensor | None = None

    def measure(self) -> None:
        """Start the first pass."""
        self.reset()
        self._phase = "measure"

    def apply(self, others: Sequence[Parameter]) -> None:
        """End the first pass: join the norms, drop the gradients of ``others`` (not hooked), start the second."""
        for p in others:
            if p.grad is not None and id(p) in self.ids:
                self._norms[id(p)] = tensor_norm(p.grad)
            p.grad = None
        self._total = joint_norm(self.parameters, self._norms) if self._norms else None
        self._norms = {}
        self._phase = "apply"

    def on_gradient(self, unit: HookedTensor) -> bool:
        if self._phase is None:
            raise RuntimeError(_TWO_PASSES)
        clipped = id(unit.parameter) in self.ids
        if self._phase == "measure":
            if clipped:
                self._norms[id(unit.parameter)] = tensor_norm(unit.parameter.grad)
            unit.parameter.grad = None
            return False
        if clipped and self._total is not None:
            clip_grads_with_norm_([unit.parameter], self.max_norm, self._total)
        return True

    def norm_of(self, unit: HookedTensor) -> Tensor | None:
        return self._total if id(unit.parameter) in self.ids else None

    def finish(self) -> ClipReport:
        if self._phase != "apply":
            raise RuntimeError(_TWO_PASSES)
        left = [p for p in self.parameters if p.grad is not None]
        if self._total is not None:
            clip_grads_with_norm_(left, self.max_norm, self._total)
        if left and not self._looked:  # by the first step a loop has shown what it does
            self._after = ([(p, p.grad._version) for p in left], get_total_norm([p.grad for p in left]))
            self._looked = True
        return ClipReport(self._total, "all")

    def check_unscaled(self) -> None:
        (versions, before), self._after = self._after or ([], None), None
        left = [p.grad for p, _ in versions if p.grad is not None]
        if left and any(p.grad is not None and p.grad._version != version for p, version in versions):
            now = get_total_norm(left)
            if bool(now < 0.999 * before):
                raise UserError(
                    f"gradients were scaled to {float(now):.4g} after clip=exact had clipped them (their norm was "
                    f"{float(before):.4g}), by a clip_grad_norm_ line in the loop with a lower bound? The experts were "
                    "updated before it: leave the line out and give the bound as max_grad_norm="
                )


_TWO_PASSES = (
    "clip=exact needs two backward passes a step: put forward and backward into "
    "`for _ in optimizer.backward_passes(): ...` (or pass them to step() as a closure)"
)

CLIPS: dict[str, tuple[type[Clip], str]] = {
    "all": (Clip, "all"),
    "non_expert": (Clip, "non_expert"),
    "none": (Clip, "none"),
    "tensor": (TensorClip, "non_expert"),
    "lagged": (LaggedClip, "all"),
    "kept": (KeptClip, "all"),
    "offloaded": (OffloadedClip, "all"),
    "exact": (ExactClip, "all"),
}
