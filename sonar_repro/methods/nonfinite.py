"""``on_nonfinite``: a gradient with NaN or infinity in it must not reach the weights, also where hooks update them.

A loop's usual guard (skip the step if the norm is not finite) comes too late for tensors that were updated inside
backward. So each such tensor is checked in its hook. Reading its gradient once more would cost a third of what the
hooks save in time, and a decision on the host would make it wait for the device at every hook. Therefore:

* ``check="incoming"`` looks at the gradient that enters the experts module, dL/dy ``[tokens, hidden]``, from which the
  gradients of its weights are made. What overflows inside the module is not seen. Hooked tensors that are no experts
  are small: their own gradient is read. A norm that the clip has taken anyway is used instead of both.
* ``check="full"`` reads every gradient. So do several processes, where another rank's bad number reaches the average
  only.
* The verdict stays on the device: the fused kernels take it as ``found_inf``, other updates are undone by it
  (:func:`masked_step`). On a CPU the host decides at once, for there is nothing to wait for.

A skipped tensor keeps its weights, moments and step count while others may have moved: the step is partial. It is
counted (``ScheduledOptimizer.skipped_updates``). Without a non-finite gradient every bit is that of ``off``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

Verdict = bool | Tensor  # decided on the host, or a 0-d float32 1 (bad) or 0 on the device


def largest(tensor: Tensor) -> Tensor:
    """The largest magnitude, 0-d: NaN or infinite if any element is. One read, no temporaries."""
    if hasattr(tensor, "device_mesh"):  # a rank's part may be empty, which has no largest element
        return torch.linalg.vector_norm(tensor, 2.0).full_tensor()
    return torch.linalg.vector_norm(tensor, math.inf) if tensor.numel() else tensor.new_zeros(())


def largest_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """:func:`largest` of whole tensors together and of sharded ones together: at most two numbers."""
    sharded = [g for g in gradients if hasattr(g, "device_mesh")]
    whole = [g for g in gradients if not hasattr(g, "device_mesh") and g.numel()]
    norms = [get_total_norm(whole, math.inf)] if whole else []
    return norms + ([get_total_norm(sharded).full_tensor()] if sharded else [])


def on_host(norm: Tensor) -> bool:
    """Whether reading a value makes nobody wait (and there is a value)."""
    return norm.device.type == "cpu" and not isinstance(norm, FakeTensor)


def judge(norm: Tensor) -> Verdict:
    """Whether a norm says that something is not finite."""
    if on_host(norm):
        return not math.isfinite(norm.item())
    return (norm < math.inf).logical_not().to(torch.float32)  # NaN compares false


def decide(verdict: Verdict) -> bool:
    """The verdict on the host: waits for the device. Fake tensors hold no values and count as finite."""
    if isinstance(verdict, Tensor):
        return not isinstance(verdict, FakeTensor) and bool(verdict)
    return verdict


class _Watch:
    """Forward hook of an experts module: sees dL/dy when backward gets there. A copy of the module watches nothing."""

    def __init__(self, guard: weakref.ref | None, parameters: Sequence[int]) -> None:
        self.guard, self.parameters = guard, parameters

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # A compiled graph takes no hook on a tensor inside it: the gradient itself is read then.
        if self.guard is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self.see)

    def see(self, gradient: Tensor) -> None:
        guard = self.guard()
        if guard is not None:
            guard.see(self.parameters, largest(gradient.detach()))

    def __deepcopy__(self, memo: Any) -> _Watch:
        return _Watch(None, ())

    def __reduce__(self) -> tuple:
        return _Watch, (None, ())


class Guard:
    """Knows for every tensor whether the gradient at hand may be used, and counts those that were not.

    Args:
        mode: ``skip`` or ``raise`` (at the end of the step; until then it skips as well).
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._incoming: dict[int, Tensor] = {}  # id(parameter) -> largest magnitude of dL/dy since its last use
        self._skipped = 0
        self._on_device: dict[torch.device, Tensor] = {}
        self._late: list[tuple[Tensor, dict[str, Any], str, Any]] = []
        self._named: list[tuple[str, Verdict]] = []  # of this step, to be named in an error
        self.skipped_here = False  # whether the host knows that something was skipped in this step

    def watch(self, leaves: Iterable[tuple[nn.Module, str, Parameter, str]]) -> list[Any]:
        """Hooks on the modules that hold ``leaves``; returns their handles."""
        held: dict[nn.Module, list[int]] = {}
        for module, _, parameter, _ in leaves:
            held.setdefault(module, []).append(id(parameter))
        me = weakref.ref(self)
        return [module.register_forward_hook(_Watch(me, ids)) for module, ids in held.items()]

    def see(self, parameters: Sequence[int], norm: Tensor) -> None:
        """dL/dy of a module has arrived; a module that ran twice has two."""
        for key in parameters:
            before = self._incoming.get(key)
            self._incoming[key] = norm if before is None else torch.maximum(before, norm)

    def forget(self, parameter: Parameter) -> None:
        """Its gradient was measured only (first pass of ``clip=exact``)."""
        self._incoming.pop(id(parameter), None)

    def verdict(self, name: str, parameter: Parameter, known: Tensor | None) -> Verdict:
        """Whether ``parameter.grad`` must not be used. ``known``: a norm that covers it, if one was taken."""
        norm = self._incoming.pop(id(parameter), None)
        norm = norm if known is None else known
        verdict = judge(largest(parameter.grad) if norm is None else norm)
        self._count(name, verdict, 1)
        return verdict

    def verdict_at_end(self, parameters: Sequence[tuple[str, Parameter]], covered: set[int], norm: Any) -> Verdict:
        """One verdict over all gradients that are left at the end of the step.

        Args:
            covered: ids of the parameters that ``norm`` covers (none if it is ``None``).
        """
        left = [(name, p) for name, p in parameters if p.grad is not None]
        norms = [] if norm is None else [norm]
        unread = []
        for _, p in left:
            seen = self._incoming.pop(id(p), None)
            if norm is not None and id(p) in covered:
                continue
            if seen is None:
                unread.append(p.grad)
            else:
                norms.append(seen)
        norms += largest_of(unread)
        if not left or not norms:
            return False
        device = norms[0].device
        verdict = judge(torch.stack([n.to(device, torch.float32) for n in norms]).amax())
        self._count(left[0][0], verdict, len(left))
        return verdict

    def _count(self, name: str, verdict: Verdict, tensors: int) -> None:
        if not isinstance(verdict, Tensor):
            self._skipped += tensors * verdict
            self.skipped_here |= verdict
            if not verdict:
                return
        elif not isinstance(verdict, FakeTensor):
            total = self._on_device.get(verdict.device)
            self._on_device[verdict.device] = verdict * tensors if total is None else total.add_(verdict, alpha=tensors)
        if self.mode == "raise":
            self._named.append((name, verdict))

    @property
    def skipped(self) -> int:
        """Tensor updates left out so far; waits for the device."""
        return self._skipped + sum(int(total) for total in self._on_device.values())

    def finish(self) -> None:
        """At the end of a step: put host counters right, and raise if that was asked for.

        Raises RuntimeError under ``raise``: names the first tensor that was not updated.
        """
        for found_inf, state, key, change in self._late:
            if decide(found_inf):
                state[key] -= change
        bad = [name for name, verdict in self._named if decide(verdict)]
        self.reset()
        if bad:
            raise RuntimeError(
                f"non-finite gradient of {bad[0]} ({len(bad)} such in this step): it was not updated, what came before "
                "it in backward was; on_nonfinite='skip' goes on and counts it"
            )

    def reset(self) -> None:
        """Forget an unfinished step."""
        self._incoming.clear()
        self._late.clear()
        self._named.clear()
        self.skipped_here = False

    # ---- updates on the device ----------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, verdict: Verdict, made_state: bool) -> bool:
        """``optimizer.step()`` unless the verdict is bad; whether it was called.

        Args:
            made_state: the optimizer has stepped these parameters before. Its first step makes state, which no mask
                can undo: there the host decides.
        """
        if not isinstance(verdict, Tensor):
            if not verdict:
                optimizer.step()
            return not verdict
        if takes_found_inf(optimizer) and made_state:
            optimizer.found_inf = verdict
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf
        elif made_state:
            self._late += masked_step(optimizer, verdict)
        elif decide(verdict):
            self.skipped_here = True
            return False
        else:
            optimizer.step()
        return True


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it runs one of torch's fused kernels, which do nothing where ``found_inf`` is 1."""
    torch_own = type(optimizer) in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
    return torch_own and all(group.get("fused") for group in optimizer.param_groups)


def masked_step(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> list[tuple[Tensor, dict[str, Any], str, Any]]:
    """Step, then take everything back where ``found_inf`` is 1, without waiting for the device.

    Costs a copy of the tensor and its states while it runs. Returns what only the host can take back: counters.
    """
    bad = found_inf.bool()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors: list[Tensor] = [p for p in parameters if p.grad is not None]
    counters: list[tuple[dict[str, Any], str, Any]] = []

    def note(state: dict[str, Any]) -> None:
        for key, value in state.items():
            if isinstance(value, dict):
                note(value)
            elif isinstance(value, Tensor) and value.device == bad.device:
                tensors.append(value)
            elif isinstance(value, (Tensor, int, float)):
                counters.append((state, key, value.clone() if isinstance(value, Tensor) else value))

    for p in list(tensors):
        note(optimizer.state.get(p, {}))
    before = [t.detach().clone() for t in tensors]
    optimizer.step()
    with torch.no_grad():
        for tensor, old in zip(tensors, before):
            torch.where(bad, old, tensor, out=tensor)
    return [(found_inf, state, key, state[key] - old) for state, key, old in counters]
