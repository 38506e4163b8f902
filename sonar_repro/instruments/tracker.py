"""Live storage bytes of a training run, counted by us: the same accounting on real CPU tensors and on fake tensors.

A storage is born when an operator returns a tensor on storage that was not seen before, and dies when the storage is
finalised. No formula stands in for the run: what is counted is what PyTorch's own dispatcher and autograd create and
drop. Owners (whose bytes are these?) are decided when that is known and written back to the storage's birth, so a
gradient is a gradient from the moment its kernel's output exists, and a buffer that lives from forward into backward
is an activation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from .events import (
    ACTIVATION,
    BACKWARD,
    EXPERT_GRADIENT,
    FORWARD,
    LOAD,
    OPTIMIZER,
    OTHER_GRADIENT,
    OWNERS,
    STATE,
    TEMPORARY,
    EventLog,
    PhasePeak,
    round_to_block,
)


class _Storage:
    """One live storage: its bytes, its owner and its block in the event log."""

    __slots__ = ("nbytes", "owner", "block", "in_forward", "ref")

    def __init__(self, nbytes: int, owner: int, block: int, in_forward: bool) -> None:
        self.nbytes, self.owner, self.block, self.in_forward = nbytes, owner, block, in_forward
        self.ref: weakref.ref | None = None


class AllocationTracker(TorchDispatchMode):
    """Counts live storage bytes of everything created inside it, by phase, owner and (with ``events``) event.

    Use as a context manager around the model's construction and its training steps, inside a ``FakeTensorMode`` if one
    is active. ``phase`` resets the peak; ``attach`` names a model's weights and gradients; ``track`` adds tensors that
    were made outside. Works with non-re-entrant checkpointing, accumulation, frozen parameters, updates in hooks.

    Args:
        events: keep an :class:`EventLog` (needed for the allocator replay and for timelines).
        device_model: called as ``(tracker, operator, args, result, region)`` after each operator; returns the sizes of
            device buffers that the operator's CUDA kernel allocates and frees inside, which no dispatcher sees
            (:class:`sonar_repro.forecast.cuda_buffers.CudaModel`).
        observers: called as ``(operator, args, kwargs, result, region)`` after every operator (time models).
    """

    def __init__(
        self,
        *,
        events: bool = False,
        device_model: Callable[[AllocationTracker, Any, tuple, Any, int], Iterable[int]] | None = None,
        observers: Iterable[Callable[..., None]] = (),
    ) -> None:
        super().__init__()
        self.log: EventLog | None = EventLog() if events else None
        self.peaks: dict[str, PhasePeak] = {}
        self.live_requested = 0
        self.live_allocated = 0
        self.operators = 0
        self._device_model = device_model
        self._observers = tuple(observers)
        self._storages: dict[int, _Storage] = {}
        self._current = PhasePeak()
        self._reserved_bytes = 0
        self._optimizer_depth = 0
        self._loading = True
        self._in_backward = False
        self._handles: list[Any] = []
        self._gradient_owner: dict[int, int] = {}
        self._depth = 0
        self._paused = False
        self._place = 0

    # -- phases ---------------------------------------------------------------------------------------------------

    def phase(self, name: str) -> None:
        """Start phase ``name``: its peak starts at what is live now. A name used again goes on from its old peak."""
        self._current = self.peaks.setdefault(name, PhasePeak())
        self._loading = name == "load"
        self._raise_peak()
        if self.log is not None:
            self.log.marks.append((len(self.log.events), "phase", name))

    def step(self, label: str | int) -> None:
        """Mark the start of a training step in the event log (an out-of-memory is reported with it)."""
        self._loading = False
        if self.log is not None:
            self.log.marks.append((len(self.log.events), "step", str(label)))

    def micro_batch(self, index: int) -> None:
        """Mark where micro-batch ``index`` of the current step starts."""
        if self.log is not None:
            self.log.marks.append((len(self.log.events), "micro_batch", str(index)))

    @property
    def region(self) -> int:
        """Where the run is now: an index into :data:`REGIONS`."""
        if self._optimizer_depth:
            return OPTIMIZER
        if torch._C._current_graph_task_id() != -1:
            return BACKWARD
        return LOAD if self._loading else FORWARD

    # -- owners ---------------------------------------------------------------------------------------------------

    def track(self, tensors: Iterable[torch.Tensor], owner: str = "temporaries") -> None:
        """Give ``owner`` (a name in :data:`OWNERS`) to ``tensors``; count those that were made outside the tracker."""
        code = OWNERS.index(owner)
        for tensor in tensors:
            self._see(tensor, LOAD if self._loading else self.region)
            self._own(tensor, code)
        self._raise_peak()

    def attach(self, model: torch.nn.Module, expert_parameters: Iterable[torch.nn.Parameter] = ()) -> None:
        """Name ``model``'s parameters and buffers weights, and watch its gradients arrive.

        A hook on each trainable parameter sees its incoming gradient before it is accumulated, so it is named even if
        a post-accumulate hook frees it. ``expert_parameters`` tells expert gradients from the others.
        """
        self.track([*model.parameters(), *model.buffers()], "weights")
        experts = {id(parameter) for parameter in expert_parameters}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                owner = EXPERT_GRADIENT if id(parameter) in experts else OTHER_GRADIENT
                self._gradient_owner[id(parameter)] = owner
                self._handles.append(parameter.register_hook(self._gradient_hook(owner, name)))
        if self.log is not None:
            self._follow(model)

    def _follow(self, model: torch.nn.Module) -> None:
        """Keep ``place`` at the module that runs: its name goes with each block that is allocated meanwhile."""
        log, stack = self.log, [0]
        assert log is not None

        def enter(place: int) -> Callable[..., None]:
            def pre_hook(*_: Any) -> None:
                stack.append(place)
                self._place = place

            return pre_hook

        def leave(*_: Any) -> None:
            if len(stack) > 1:
                stack.pop()
            self._place = stack[-1]

        for name, module in model.named_modules():
            if name:
                self._handles.append(module.register_forward_pre_hook(enter(log.place(name))))
                self._handles.append(module.register_forward_hook(leave, always_call=True))

    def detach(self) -> None:
        """Remove the hooks of :meth:`attach`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._gradient_owner.clear()

    def reserve(self, nbytes: int) -> None:
        """Count a buffer that no tensor shows and that stays for good (a library's workspace)."""
        block = self._hold(nbytes, self.region)
        if self.log is not None:
            self.log.workspaces.append(block)
        self._reserved_bytes += nbytes

    def bytes_by_owner(self) -> dict[str, int]:
        """Live requested bytes by owner, now."""
        totals = dict.fromkeys(OWNERS, 0)
        totals["temporaries"] = self._reserved_bytes
        for storage in self._storages.values():
            totals[OWNERS[storage.owner]] += storage.nbytes
        return totals

    def _gradient_hook(self, owner: int, name: str) -> Callable[[torch.Tensor], None]:
        place = self.log.place(name) if self.log is not None else 0

        def name_gradient(gradient: torch.Tensor) -> None:
            self._place = place
            self._own(gradient, owner)

        return name_gradient

    def _own(self, tensor: torch.Tensor, owner: int) -> None:
        for storage in _untyped_storages(tensor):
            entry = self._storages.get(storage._cdata)
            if entry is not None:
                self._set_owner(entry, owner)

    def _set_owner(self, entry: _Storage, owner: int) -> None:
        entry.owner = owner
        if self.log is not None and entry.block >= 0:
            self.log.owners[entry.block] = owner

    # -- the dispatch mode ----------------------------------------------------------------------------------------

    def __enter__(self) -> AllocationTracker:
        if self._depth == 0:
            self._optimizer_handles = (
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
            )
            self._patches = self._patched()
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            for handle in self._optimizer_handles:
                handle.remove()
            self._patches.close()
        return super().__exit__(*exc)

    def _patched(self) -> ExitStack:
        """Two places of torch's FSDP2 that hide from a dispatch mode, or show it what is not there."""
        stack, plain = ExitStack(), torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            # Gathered parameters are freed and refilled in place.
            result = plain(storage, size)
            entry = self._storages.get(storage._cdata)
            if entry is not None and entry.nbytes != storage.nbytes():
                self._resize(entry, storage.nbytes(), self.region)
                self._raise_peak()
            return result

        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            from torch.distributed.tensor._sharding_prop import ShardingPropagator

            infer = ShardingPropagator._propagate_tensor_meta_non_cached

            def unseen(*args: Any) -> Any:
                # An operator on whole fake tensors, to learn the shape of a sharded one's result.
                self._paused = True
                try:
                    return infer(*args)
                finally:
                    self._paused = False

            stack.enter_context(mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen))
        return stack

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # A distributed tensor is desugared first; its local shards come back here as plain tensors.
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented
        result = func(*args, **kwargs) if kwargs else func(*args)
        if self._paused:
            return result
        region = self.region
        if region == BACKWARD:
            if not self._in_backward:
                self._enter_backward()
        elif region == FORWARD:
            self._in_backward = False
        self.operators += 1
        self._see(result, region)
        if self._device_model is not None:
            self._pass_through(self._device_model(self, func, args, result, region), region)
        self._raise_peak()
        for observe in self._observers:
            observe(func, args, kwargs or {}, result, region)
        return result

    def _see(self, result: Any, region: int) -> None:
        if isinstance(result, torch.Tensor):
            if result.is_meta:  # has a shape and no memory
                return
            for storage in _untyped_storages(result):
                key = storage._cdata
                entry = self._storages.get(key)
                if entry is None:
                    self._birth(storage, key, region)
                elif entry.nbytes != storage.nbytes():
                    self._resize(entry, storage.nbytes(), region)
        elif isinstance(result, (tuple, list)):
            for item in result:
                self._see(item, region)

    def _birth(self, storage: torch.UntypedStorage, key: int, region: int) -> None:
        nbytes = storage.nbytes()
        in_forward = region == FORWARD
        # Code that runs with gradients on inside backward is a checkpointed block being recomputed.
        owner = ACTIVATION if region == BACKWARD and torch.is_grad_enabled() else TEMPORARY
        block = self.log.add(nbytes, owner, region, self._place) if self.log is not None and nbytes else -1
        entry = _Storage(nbytes, owner, block, in_forward)
        self._storages[key] = entry
        entry.ref = weakref.ref(storage, lambda _, key=key: self._death(key))
        self._count(nbytes)

    def _death(self, key: int) -> None:
        entry = self._storages.pop(key)
        if self.log is not None and entry.block >= 0:
            self.log.free(entry.block)
        self._count(-entry.nbytes)

    def _resize(self, entry: _Storage, nbytes: int, region: int) -> None:
        # FSDP frees and refills a flat parameter's storage in place: an allocator sees a free and an allocation.
        if self.log is not None:
            if entry.block >= 0:
                self.log.free(entry.block)
            entry.block = self.log.add(nbytes, entry.owner, region, self._place) if nbytes else -1
        self._count(-entry.nbytes)
        self._count(nbytes)
        entry.nbytes = nbytes

    def _count(self, nbytes: int) -> None:
        self.live_requested += nbytes
        self.live_allocated += round_to_block(nbytes) if nbytes >= 0 else -round_to_block(-nbytes)

    def _pass_through(self, sizes: Iterable[int], region: int) -> None:
        blocks = [(nbytes, self._hold(nbytes, region)) for nbytes in sizes if nbytes]
        if not blocks:
            return
        self._raise_peak()
        for nbytes, block in blocks:
            self._count(-nbytes)
            if self.log is not None:
                self.log.free(block)

    def _hold(self, nbytes: int, region: int) -> int:
        self._count(nbytes)
        return self.log.add(nbytes, TEMPORARY, region, self._place) if self.log is not None else -1

    def _raise_peak(self) -> None:
        peak = self._current
        if self.live_requested > peak.requested:
            peak.requested = self.live_requested
        if self.live_allocated > peak.allocated:
            peak.allocated = self.live_allocated

    def _enter_backward(self) -> None:
        # What forward made and is still alive when backward starts is what autograd (or the caller) kept.
        self._in_backward = True
        for entry in self._storages.values():
            if entry.in_forward and entry.owner == TEMPORARY:
                self._set_owner(entry, ACTIVATION)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizer_depth += 1
        # Where autograd could not keep the incoming gradient itself it copied it: the copy is named here.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = self._gradient_owner.get(id(parameter))
                if owner is not None and parameter.grad is not None:
                    self._own(parameter.grad, owner)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizer_depth -= 1
        # The plain attribute only: an optimizer over optimizers builds it on demand, and its inner ones come here too.
        for parameter, state in vars(optimizer).get("state", {}).items():
            if isinstance(state, dict):
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        self._own(value, STATE)
                        self._place_state(parameter, value)

    def _place_state(self, parameter: Any, value: torch.Tensor) -> None:
        """A state lies where its parameter does: under ``experts`` for an expert tensor's."""
        if self.log is None or self._gradient_owner.get(id(parameter)) != EXPERT_GRADIENT:
            return
        for storage in _untyped_storages(value):
            entry = self._storages.get(storage._cdata)
            if entry is not None and entry.block >= 0:
                self.log.places[entry.block] = self.log.place("experts")


def _untyped_storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages under ``tensor``: one, or those of the inner tensors of a wrapper subclass."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.untyped_storage()]
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]  # a DTensor names its mesh among them
    return [storage for part in inner if isinstance(part, torch.Tensor) for storage in _untyped_storages(part)]
