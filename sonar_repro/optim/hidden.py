"""Hidden momentum: the expert first moment H lives in the gradient buffer between steps (MESH, implementation).

One step: ``prepare`` (p.grad ← β1 H, once) → A backward passes, each adds its gradient in place → ``collect`` (checks;
p.grad is the new H) → the update → ``stash`` (H kept, p.grad = None). At A = 1 the bits are those of an explicit H.

Every silent failure of the naive version shows as a buffer that is another tensor (storage) or that was written by
something else than the accumulation (version counter: one more a backward pass), so both are followed: at each
accumulation by a hook, and at ``collect``. Under DDP the averaged gradient is copied back at the end of backward, one
more write, which an end-of-backward callback takes into account. DDP communication hooks that compress (fp16_compress,
PowerSGD) would round or approximate the momentum in the buffer along with the gradient, so they are not supported: the
scheduled optimizer refuses them where it was built on the DDP wrapper, and cannot see them where it was not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import UserError

_EXIT = "or use the full-state variant (mesh_full, mesh_b_full), which keeps H out of the gradient"


@dataclass
class _Slot:
    """One parameter's buffer. ``attached``: between prepare and stash, when ``buffer`` is p.grad."""

    name: str
    parameter: Parameter
    buffer: Tensor | None = None
    attached: bool = False
    storage: int = 0
    version: int = 0
    backwards: int = 0


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _accumulated(owner: weakref.ref, index: int, _: Tensor) -> None:
    hidden = owner()
    if hidden is not None:
        hidden._on_accumulate(hidden.slots[index])


def _remove(handles: list) -> None:
    for handle in handles:
        handle.remove()


class HiddenMomentum:
    """The lifecycle of H for some parameters.

    Args:
        named: the parameters, with names for messages.
        stored: reads H of a parameter (``None`` at the start); H itself is kept by the optimizer, so that it is in the
            state dict.
        diagnostics: keep a shadow H, computed outside the gradient buffer, and compare (costs two more copies).
        watch_idle: note which experts got a gradient, for :meth:`live_experts`.

    Attributes:
        prepares: calls of ``prepare`` that reattached H; calls between two steps are idempotent.
        last_cosine, last_relative_error: worst of all parameters at the last step, 0-d tensors (diagnostics only).
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Parameter]],
        stored: Callable[[Parameter], Tensor | None],
        diagnostics: bool = False,
        watch_idle: bool = False,
    ) -> None:
        self.slots = [_Slot(name, parameter) for name, parameter in named]
        self._stored = stored
        self._task = -1
        self.prepares = 0
        self.last_cosine: Tensor | None = None
        self.last_relative_error: Tensor | None = None
        self._shadow = Shadow(self.slots) if diagnostics else None
        self._live = LiveExperts(self.slots) if watch_idle else None
        me = weakref.ref(self)
        handles = [
            slot.parameter.register_post_accumulate_grad_hook(_Hook(me, index)) for index, slot in enumerate(self.slots)
        ]
        weakref.finalize(self, _remove, handles)

    # ---- the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare(self, beta1_of: Callable[[Parameter], float]) -> None:
        """p.grad ← β1 H for every parameter; does nothing for those already prepared since the last step.

        Raises UserError if a gradient is there already (prepare comes before the first backward) or was lost since.
        """
        fresh = [slot for slot in self.slots if not slot.attached]
        for slot in self.slots:
            if slot.attached:
                self._check(slot)
            elif slot.parameter.grad is not None:
                raise UserError(
                    f"prepare() found a gradient in {slot.name}: call zero_grad(), then prepare(), then backward()"
                )
        if not fresh:
            return
        self.prepares += 1
        decaying: dict[float, list[Tensor]] = {}
        for slot in fresh:
            slot.buffer = self._load(slot)
            decaying.setdefault(beta1_of(slot.parameter), []).append(slot.buffer)
        for beta1, buffers in decaying.items():
            torch._foreach_mul_(buffers, beta1)
        for slot in fresh:
            slot.parameter.grad = slot.buffer
            slot.attached, slot.backwards = True, 0
            slot.storage, slot.version = _storage(slot.buffer), slot.buffer._version
        if self._live:
            self._live.begin()
        if self._shadow:
            self._shadow.begin([beta1_of(slot.parameter) for slot in self.slots])

    def _load(self, slot: _Slot) -> Tensor:
        """H, on the parameter's device and in its dtype (``model.to`` may have moved it), or zeros at the start."""
        stored = self._stored(slot.parameter)
        if stored is None:
            return torch.zeros_like(slot.parameter)
        return stored.to(device=slot.parameter.device, dtype=slot.parameter.dtype)

    def _on_accumulate(self, slot: _Slot) -> None:
        if not slot.attached:
            return  # a backward without prepare: step() refuses it
        grad = slot.parameter.grad
        if grad is None or _storage(grad) != slot.storage:
            raise UserError(self._replaced(slot))
        if grad._version != slot.version + 1:
            raise UserError(self._written(slot, "between prepare() and backward()"))
        slot.version, slot.backwards = grad._version, slot.backwards + 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._follow_end_of_backward()

    def _follow_end_of_backward(self) -> None:
        """DDP writes averaged gradients in a callback at the end of backward: look at the versions after it.

        DDP queues its callback when its last bucket is ready, so ours queues another one and runs last.
        """
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self.accept))

    def collect(self) -> dict[Parameter, Tensor]:
        """H of this step for every parameter, after the checks; the buffers stay where they are until ``stash``.

        Raises UserError: no prepare, no backward, or a buffer that was replaced or written by something else.
        """
        for slot in self.slots:
            if not slot.attached:
                why = "a gradient but no hidden momentum" if slot.parameter.grad is not None else "no hidden momentum"
                raise UserError(
                    f"step() without prepare(): {slot.name} holds {why}; call prepare() before the first backward "
                    f"(MeshTrainerCallback does it in HF Trainer), {_EXIT}"
                )
            self._check(slot)
        if not any(slot.backwards for slot in self.slots):
            raise UserError("step() without a backward pass since prepare(): call loss.backward() first")
        if self._shadow:
            self.last_cosine, self.last_relative_error = self._shadow.compare(self.slots)
        return {slot.parameter: slot.buffer for slot in self.slots}

    def owns(self, parameter: Parameter) -> bool:
        """Whether this parameter's momentum is hidden."""
        return any(slot.parameter is parameter for slot in self.slots)

    def live_experts(self, parameter: Parameter) -> Tensor | None:
        """Which experts got a gradient since ``prepare``, bool ``[E]``; ``None`` if none did."""
        return self._live.of(parameter) if self._live else None

    def accept(self) -> None:
        """The gradients were changed on purpose in a way that is right for H too (an all-reduce written by hand)."""
        for slot in self.slots:
            grad = slot.parameter.grad
            if slot.attached and grad is not None and _storage(grad) == slot.storage:
                slot.version = grad._version

    def stash(self) -> None:
        """End of the step: the buffers leave the gradients."""
        for slot in self.slots:
            slot.parameter.grad = None
            slot.buffer, slot.attached = None, False

    # ---- around the step ----------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Safe: before backward a prepared buffer stays (there is no gradient to clear); a stray gradient is dropped.

        Raises UserError after a backward pass: clearing the gradient would clear H with it.
        """
        for slot in self.slots:
            if not slot.attached:
                slot.parameter.grad = None
                continue
            self._check(slot)
            if slot.backwards:
                raise UserError(
                    f"zero_grad() between backward() and step() would erase the momentum of {slot.name}: "
                    f"step first, {_EXIT}"
                )

    def check_idle(self, what: str) -> None:
        """State can be saved or loaded only while H holds no part of a new gradient."""
        for slot in self.slots:
            if slot.attached:
                raise UserError(f"{what} between prepare() and step(): {slot.name} holds β1·H; do it after step()")

    def _check(self, slot: _Slot) -> None:
        grad = slot.parameter.grad
        stored = self._stored(slot.parameter)
        moved = stored is not None and (stored.dtype, stored.device) != (slot.buffer.dtype, slot.buffer.device)
        if stored is not None and slot.buffer is not stored and not moved:
            raise UserError(f"the state of {slot.name} was replaced between prepare() and step(): load it after step()")
        if grad is None or _storage(grad) != slot.storage:
            raise UserError(self._replaced(slot))
        if grad._version != slot.version:
            raise UserError(self._written(slot, f"after {slot.backwards} backward passes"))

    def _replaced(self, slot: _Slot) -> str:
        grad = slot.parameter.grad
        if grad is None:
            why = "zero_grad() ran on the model between prepare() and step(): call it before prepare()"
        elif grad.requires_grad or grad.grad_fn is not None:
            why = "backward(create_graph=True) replaces gradients: it cannot be used with hidden momentum"
        else:
            why = (
                "zero_grad() between prepare() and backward() does this (call it before prepare()), and so does "
                "DDP(gradient_as_bucket_view=True) (leave it False)"
            )
        return f"hidden momentum of {slot.name} was replaced: {why}, {_EXIT}"

    def _written(self, slot: _Slot, when: str) -> str:
        return (
            f"hidden momentum of {slot.name} was changed in place {when}: clip_grad_norm_ and GradScaler.unscale_ must "
            "leave it out (give the optimizer clip=..., or clip only its clippable_parameters()), zero_grad comes "
            f"before prepare(), {_EXIT}"
        )


class _Hook:
    """The post-accumulate hook; holds the lifecycle weakly, so that dropping the optimizer frees it."""

    def __init__(self, owner: weakref.ref, index: int) -> None:
        self.owner, self.index = owner, index

    def __call__(self, parameter: Tensor) -> None:
        _accumulated(self.owner, self.index, parameter)


class LiveExperts:
    """Which experts of each parameter ``[E, ...]`` got a gradient that is not exactly 0, over the passes of a step."""

    def __init__(self, slots: Sequence[_Slot]) -> None:
        self._seen: dict[int, Tensor] = {}
        handles = [slot.parameter.register_hook(self._hook(id(slot.parameter))) for slot in slots]
        weakref.finalize(self, _remove, handles)

    def _hook(self, key: int) -> Callable[[Tensor], None]:
        me = weakref.ref(self)

        def look(grad: Tensor) -> None:
            live = me()
            if live is not None:
                new = expert_is_live(grad)
                live._seen[key] = new | live._seen[key] if key in live._seen else new

        return look

    def begin(self) -> None:
        self._seen.clear()

    def of(self, parameter: Parameter) -> Tensor | None:
        return self._seen.get(id(parameter))


def expert_is_live(grad: Tensor) -> Tensor:
    """bool ``[E]``: whether each slice of a gradient ``[E, ...]`` has an element that is not 0."""
    return torch.linalg.vector_norm(grad, torch.inf, dim=tuple(range(1, grad.ndim))) != 0


class Shadow:
    """H computed beside the gradient buffer from the gradients that enter it (local ones, under DDP)."""

    def __init__(self, slots: Sequence[_Slot]) -> None:
        self._h: list[Tensor | None] = [None] * len(slots)
        self._sum: list[Tensor | None] = [None] * len(slots)
        handles = [slot.parameter.register_hook(self._seen(index)) for index, slot in enumerate(slots)]
        weakref.finalize(self, _remove, handles)

    def _seen(self, index: int) -> Callable[[Tensor], None]:
        me = weakref.ref(self)

        def add(grad: Tensor) -> None:
            shadow = me()
            if shadow is not None:
                total = shadow._sum[index]
                shadow._sum[index] = grad.detach().clone() if total is None else total.add_(grad.detach())

        return add

    def begin(self, betas: Sequence[float]) -> None:
        self._betas = list(betas)
        self._sum = [None] * len(self._sum)

    def compare(self, slots: Sequence[_Slot]) -> tuple[Tensor, Tensor]:
        """(lowest cosine, largest relative error) between buffers and shadow, which takes its own step first."""
        cosines, errors = [], []
        for index, slot in enumerate(slots):
            old, new = self._h[index], self._sum[index]
            old = torch.zeros_like(slot.buffer) if old is None else old
            self._h[index] = h = old.mul_(self._betas[index]).add_(0 if new is None else new)
            a, b = slot.buffer.flatten().float(), h.flatten().float()
            norm = torch.linalg.vector_norm(b).clamp_(min=torch.finfo(torch.float32).tiny)
            cosines.append(torch.nn.functional.cosine_similarity(a, b, dim=0, eps=0.0))
            errors.append(torch.linalg.vector_norm(a - b) / norm)
        return torch.stack(cosines).nan_to_num(nan=1.0).amin(), torch.stack(errors).amax()
