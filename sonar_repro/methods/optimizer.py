"""One optimizer for all methods: three knobs decide when each parameter is updated and what is clipped."""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from ..errors import UserError
from ..models.experts import Experts
from . import checks, first_step, fold, nonfinite, parallel
from .answering import Answering
from .attachment import Attachment
from .clipping import CLIPS, ClipReport
from .factories import as_factory
from .inner import EXECUTION_KEYS, Factory, HookedTensor, Inner, outer_groups
from .ranges import CLIP, OPTIMIZER, named_range
from .replay import Replay
from .schedule import Schedule


def _fire(optimizer_ref: weakref.ref, index: int, parameter: Parameter) -> None:
    """The post-accumulate-grad hook. A weak reference, so that dropping the optimizer frees it and detaches it."""
    optimizer = optimizer_ref()
    if optimizer is not None:
        optimizer._on_gradient(index)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


class ScheduledOptimizer(Answering):
    """An optimizer that updates experts (or everything) inside backward: Algorithm 1 of Sonar-MoE (§4.2).

    ``param_groups`` are the groups that schedulers act on: one for ``experts``, one for ``other`` (more if the factory
    gives different hyperparameters to different parameters). Inner optimizers take their hyperparameters from them
    right before each of their steps, so the learning rate inside a hook at step k is the scheduler's at step k.

    Args:
        model: its trainable parameters are owned, each once; frozen ones are left alone and reported. Over several
            processes it is what ``sonar_repro.data_parallel`` returned.
        factory: makes one inner optimizer from named parameters (``sonar_repro.make_factory``); or an optimizer class,
            whose settings are then given as keywords (``torch.optim.AdamW, "sonar", lr=1e-4``).
        schedule: a :class:`Schedule` or the name of a method.
        max_grad_norm: bound of the norm that ``schedule.clip`` names; ``None`` clips and measures nothing.
        accumulation: A, the backward passes between two ``step`` calls, each of loss/A (§4.4).
        accumulation_mode: ``standard`` (gradients are summed; in-backward methods only at A = 1), ``update_each`` (A
            updates a step, the paper's Sonar) or ``fold``.
        on_nonfinite: what a gradient with NaN or infinity in it does (:mod:`.nonfinite`). ``skip``: the tensor keeps
            its weights, moments and step count, others may have moved: a partial step, which ``skipped_updates``
            counts. ``raise``: the same, then RuntimeError from ``step``. ``off``: it is used, as the paper's code does.
            ``None`` is ``skip``, because one bad batch would destroy every expert before a loop can see it; with
            hidden momentum, which lies in the gradient and is lost anyway, it is ``off``.
        nonfinite_check: ``incoming`` (the small gradient that enters each experts module) or ``full`` (every gradient
            is read once more).
        experts: which tensors are experts, where the model does not say it: names, globs (``"*.experts.*"``), modules
            or a predicate ``(name, parameter) -> bool`` (:func:`sonar_repro.find_expert_tensors`).

    Attributes:
        optimizer_calls, hook_firings, steps: cumulative counts.
        last_clip: :class:`ClipReport` of the last step.
        gradients_are_reduced: set it if unsharded gradients are already averaged over processes when hooks see them.
        gradients_are_unscaled: set it if a ``GradScaler`` in this process belongs to another model.
        expert_parameters, other_parameters: what is owned, in model order.

    Raises:
        UserError: bad values, no batched experts where they are needed, accumulation that the schedule cannot honour.
    """

    def __init__(
        self,
        model: nn.Module,
        factory: Factory | type[torch.optim.Optimizer],
        schedule: Schedule | str,
        *,
        max_grad_norm: float | None = 1.0,
        accumulation: int = 1,
        accumulation_mode: str = "standard",
        on_nonfinite: str | None = None,
        nonfinite_check: str = "incoming",
        experts: Experts | None = None,
        **hyper: Any,
    ) -> None:
        checks.check_types(model, schedule)
        factory = as_factory(factory, hyper)
        self.schedule = Schedule.named(schedule) if isinstance(schedule, str) else schedule
        checks.check_arguments(self.schedule, max_grad_norm, accumulation, accumulation_mode)
        checks.check_nonfinite(on_nonfinite, nonfinite_check)
        self.accumulation, self.accumulation_mode = accumulation, accumulation_mode
        self.max_grad_norm = max_grad_norm
        self.gradients_are_reduced = self.gradients_are_unscaled = False
        self.optimizer_calls = self.hook_firings = self.steps = 0
        self.last_clip = ClipReport(None, "none")
        self._attachment = Attachment(model, self.schedule.needs_experts, experts)
        self._owned = self._attachment.owned
        self._names = {id(o.parameter): o.name for o in self._owned}
        self.expert_parameters = [o.parameter for o in self._owned if o.expert is not None]
        self.other_parameters = [o.parameter for o in self._owned if o.expert is None]
        self._build_inners(factory, model)
        defaults = {k: v for k, v in self._inners[-1].optimizer.defaults.items() if k not in EXECUTION_KEYS}
        super().__init__(outer_groups(self._owned, self._hooked, self._inners), defaults)
        self._ready = True
        self._folds = accumulation > 1 and accumulation_mode == "fold"
        for unit in self._hooked if self._folds else ():
            fold.check_foldable(unit.inners[0].optimizer)
        self._given = model
        self._reduction = parallel.reduction_for(model, self._attachment.model, self._hooked)
        parallel.check_sharded(self._attachment.model, self._hooked, self._inners, self.schedule.clip, self._folds)
        clip, scope = CLIPS[self.schedule.clip]
        self._clip = clip(scope, self._clip_parameters(scope), max_grad_norm, accumulation)
        self._clipped = self._checked = False
        self._first = first_step.FirstStep(self._attachment.model, self._watched_for_changes())
        self._guard, watches = self._make_guard(on_nonfinite, nonfinite_check)
        self._handles = self._attach(watches)
        self.check_attached()

    def _build_inners(self, factory: Factory, model: nn.Module) -> None:
        """Hooked tensors with inner optimizers of their own, and one inner optimizer over the rest."""
        who = self.schedule.in_backward
        rest = []
        self._hooked: list[HookedTensor] = []
        for o in self._owned:
            if who == "all" or (who == "experts" and o.expert is not None):
                per_expert = self.schedule.granularity == "expert" and o.expert is not None
                self._hooked.append(HookedTensor(o.name, o.parameter, o.expert.num_experts if per_expert else None))
            else:
                rest.append((o.name, o.parameter))
        for unit in self._hooked:
            unit.build(factory, model)
        checks.refuse_hidden_momentum(self._hooked, self.schedule)
        checks.refuse_unstackable(self._hooked)
        self.slices_with_fp32_state = checks.warn_of_fp32_slices(self._hooked)
        self._end = [Inner(factory(rest, model), rest)] if rest else []
        self._inners = [inner for unit in self._hooked for inner in unit.inners] + self._end
        self._kind = "+".join(sorted({type(inner.optimizer).__name__ for inner in self._inners}))

    def _watched_for_changes(self) -> list[tuple[str, Parameter]]:
        """Whose gradients a clip line of the loop's own would spoil: kept ones of joint norms, unclipped experts."""
        spread = isinstance(self._given, nn.parallel.DistributedDataParallel) or self._reduction is not None
        if spread or any(parallel.is_sharded(o.parameter) for o in self._owned) or self.max_grad_norm is None:
            return []
        if first_step.changes_matter(self.schedule.clip):
            return [pair for inner in self._end for pair in inner.named]
        if self.schedule.in_backward == "none" and self.schedule.clip == "non_expert":
            return [(o.name, o.parameter) for o in self._owned if o.expert is not None]
        return []

    def _make_guard(self, mode: str | None, check: str) -> tuple[nonfinite.Guard | None, list[Any]]:
        """The guard against non-finite gradients and the handles of what it watches; ``(None, [])`` for ``off``."""
        if self.needs_prepare:
            checks.refuse_to_guard_momentum(mode)
            mode = "off"
        self.on_nonfinite = mode or "skip"
        if mode == "off":
            return None, []
        guard = nonfinite.Guard(self.on_nonfinite)
        self._clip.guarded = True
        full = check == "full" or self._reduction is not None or self._clip.joint
        sharded = any(parallel.is_sharded(o.parameter) for o in self._owned)
        if full or sharded or isinstance(self._given, nn.parallel.DistributedDataParallel):
            return guard, []
        return guard, guard.watch(self._attachment.leaves({id(p) for p in self.expert_parameters}))

    def _attach(self, handles: list[Any]) -> list[Any]:
        checks.own(self._owned, self)
        me, others = weakref.ref(self), list(handles)
        handles = []
        for index, unit in enumerate(self._hooked):
            handles.append(unit.parameter.register_post_accumulate_grad_hook(functools.partial(_fire, me, index)))
        handles += others
        weakref.finalize(self, _remove, handles)
        return handles

    def detach(self) -> None:
        """Remove the hooks: the model trains as before, and another optimizer can be attached."""
        _remove(self._handles)
        self._first.close()
        checks.disown(self._owned, self)

    def prepare(self) -> None:
        """Called once before a step's first backward: lets inner optimizers (hidden momentum) prepare."""
        if self.needs_prepare:
            parallel.refuse_altering_hook(self._given)
        for inner in self._inners:
            if hasattr(inner.optimizer, "prepare"):
                inner.sync()
                inner.optimizer.prepare()

    @torch.no_grad()
    def _on_gradient(self, index: int) -> None:
        unit = self._hooked[index]
        unit.firings += 1
        if unit.firings > self.accumulation:
            raise checks.too_many_firings(unit, self.accumulation)
        if self.hook_firings == 0:
            if not self.gradients_are_unscaled:
                first_step.refuse_scaled_loss(self.schedule.name)
            checks.refuse_reentrant(self._attachment.model)
            checks.refuse_local_gradients(unit, self.gradients_are_reduced or self._reduction is not None)
        self.hook_firings += 1
        if self._reduction is None:
            self._use_gradient(unit)
        else:
            self._reduction.arrived(index, unit, self._use_gradient)

    def _use_gradient(self, unit: HookedTensor) -> None:
        """A hooked tensor's gradient is there, averaged: clip, update or fold, and free it."""
        with named_range(CLIP):
            use_now = self._clip.on_gradient(unit)
        if not use_now:
            if self._guard is not None and unit.parameter.grad is None and self.passes > 1:
                self._guard.forget(unit.parameter)
            return
        verdict = self._verdict(unit)
        with named_range(OPTIMIZER):
            if self._folds:
                unit.spoiled |= nonfinite.decide(verdict)
                if not unit.spoiled:
                    fold.fold_in(unit, first=unit.firings == 1)
            else:
                self.optimizer_calls += unit.update(self._guard, verdict)
        unit.parameter.grad = None

    def _verdict(self, unit: HookedTensor) -> nonfinite.Verdict:
        """Whether the gradient at hand of a hooked tensor must not be used."""
        if self._guard is None:
            return False
        known = self._clip.norm_of(unit) if not self.gradients_are_reduced else None
        if self.gradients_are_reduced:  # by somebody else: dL/dy is this process's own
            self._guard.forget(unit.parameter)
        with named_range(CLIP):
            return self._guard.verdict(unit.name, unit.parameter, known)

    def clip_gradients(self) -> ClipReport:
        """Clip what the schedule names, once a step; ``step`` does it if the loop did not."""
        if not self._clipped:
            self._check_unchanged()
            with named_range(CLIP):
                self.last_clip = self._clip.finish()
            self._clipped = True
        return self.last_clip

    def _check_unchanged(self) -> None:
        """First step: no clip of the loop's own came before. Raises UserError where the joint norm would be wrong."""
        changed = self._first.changed()
        if changed and first_step.changes_matter(self.schedule.clip):
            raise UserError(first_step.clip_line_hint(changed, self.schedule.clip))
        if changed:
            warnings.warn(first_step.clip_line_hint(changed, self.schedule.clip), stacklevel=3)

    def _clip_parameters(self, scope: str) -> list[Parameter]:
        """Whose gradients are clipped together, in model order. Expert momentum (MESH) stays out of every norm."""
        momentum = {id(p) for i in self._inners for p in getattr(i.optimizer, "hidden_parameters", ())}
        covered = self._owned if scope == "all" else [o for o in self._owned if o.expert is None]
        return [o.parameter for o in covered if id(o.parameter) not in momentum]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish a step: check that every hook did its work, clip, and step what was not updated inside backward.

        Raises:
            RuntimeError: a hook did not fire or is gone, a parameter was replaced, a gradient bypassed its hook.
        """
        loss = None
        if closure is not None:
            for _ in self.backward_passes():
                with torch.enable_grad():
                    loss = closure()
        first = not self._checked  # the first step of this process, resumed or not
        if first:
            self._attachment.check_cover()
        else:
            self._attachment.check()
        self._check_hooks()
        checks.check_hooks_worked(self._hooked)
        self.clip_gradients()
        self._clip.check_unscaled()
        with_grad = self._arrived(first)
        with named_range(OPTIMIZER):
            self._update_late()
            verdict = self._verdict_at_end()
            for inner in self._end:
                self.optimizer_calls += inner.step(self._guard, verdict)
        if first and not (self._guard and self._guard.skipped_here):
            checks.check_all_stepped(self._hooked, self._end, with_grad)
            self._checked = True
            self._first.close()
        self.steps += 1
        try:
            if self._guard is not None:
                self._guard.finish()
        finally:
            self.abandon_step()
        return loss

    def _arrived(self, first: bool) -> set[int]:
        """Ids of parameters that have a gradient to be used at the end of the step: all in the first step, else one."""
        hidden = {id(p) for i in self._inners for p in getattr(i.optimizer, "hidden_parameters", ())}
        fired = {id(u.parameter) for u in self._hooked if u.firings}
        there = (id(o.parameter) for o in self._owned if o.parameter.grad is not None and id(o.parameter) not in hidden)
        left = set(there) if first else set(itertools.islice(there, 1))
        if first:
            left |= hidden
        first_step.check_gradients_arrived(self._owned, left | fired, self._first.ran if first else None)
        return left

    def _verdict_at_end(self) -> nonfinite.Verdict:
        """Whether the gradients that are left at the end of the step must not be used."""
        named = [pair for inner in self._end for pair in inner.named]
        return self._guard is not None and self._guard.verdict_at_end(named, self._clip.ids, self.last_clip.norm)

    @torch.no_grad()
    def _update_late(self) -> None:
        """Hooked tensors whose update had to wait: for the norm, or for the last micro-batch to be folded."""
        for unit in self._clip.pending():
            self.optimizer_calls += unit.update(self._guard, self._verdict(unit))
            unit.parameter.grad = None
        for unit in self._hooked if self._folds else ():
            if unit.firings and not unit.spoiled:
                self.optimizer_calls += fold.apply(unit)

    @property
    def expert_names(self) -> list[str]:
        """Names of the expert tensors, in model order."""
        return [o.name for o in self._owned if o.expert is not None]

    @property
    def needs_prepare(self) -> bool:
        """Whether :meth:`prepare` does something (an inner optimizer keeps hidden momentum)."""
        return any(checks.keeps_hidden_momentum(inner.optimizer) for inner in self._inners)

    @property
    def passes(self) -> int:
        """Backward passes a step: 2 for ``clip=exact``, else 1."""
        return self._clip.passes

    def backward_passes(self) -> Iterator[int]:
        """Loop over it with forward and backward in the body: ``for _ in optimizer.backward_passes(): ...``.

        The body runs once, or twice on the same random numbers for ``clip=exact`` (give it the same batch again).
        """
        if self.passes == 1:
            yield 0
            return
        replay = Replay(self._attachment.model)
        self._clip.measure()
        yield 0
        with named_range(CLIP):
            self._clip.apply([p for inner in self._end for _, p in inner.named])
        for unit in self._hooked:
            unit.firings = 0
        replay.restore()
        yield 1
        self.clip_gradients()  # now, so that a clip_grad_norm_ line of the loop's own finds nothing to do

    def abandon_step(self) -> None:
        """Forget an unfinished step, after an exception inside forward or backward (updates already made stay)."""
        self._clipped = False
        self._clip.reset()
        if self._guard is not None:
            self._guard.reset()
        for unit in self._hooked:
            unit.firings, unit.spoiled = 0, False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients; an inner optimizer with a ``zero_grad`` of its own (hidden momentum) decides for its own."""
        for unit in self._hooked:
            unit.parameter.grad = None
        for inner in self._end:
            if type(inner.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
                inner.optimizer.zero_grad(set_to_none=set_to_none)
                continue
            for _, parameter in inner.named:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_()

    def check_attached(self) -> None:
        """Raise RuntimeError, naming the parameter, unless every trainable one is owned and every hook is in place."""
        self._attachment.check_cover()
        self._check_hooks()

    def _check_hooks(self) -> None:
        for unit, handle in zip(self._hooked, self._handles):
            hook = (unit.parameter._post_accumulate_grad_hooks or {}).get(handle.id)
            if getattr(hook, "func", None) is not _fire or hook.args[0]() is not self:
                raise RuntimeError(
                    f"{unit.name}: its in-backward hook is gone (deepcopy and detach() drop hooks): build the "
                    "optimizer on the model that is trained"
                )
