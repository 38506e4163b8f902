"""What others ask of the scheduled optimizer: checkpoints, logs, learning-rate schedulers, gradient scalers."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UserError
from . import nonfinite
from . import state as states
from .attachment import Attachment
from .convert import is_torch_state
from .inner import EXECUTION_KEYS, HookedTensor, Inner
from .schedule import Schedule
from .state_view import StateView


class Answering(torch.optim.Optimizer):
    """The part of :class:`~.optimizer.ScheduledOptimizer` that reports and restores; the step is the subclass's."""

    schedule: Schedule
    steps: int
    _attachment: Attachment
    _owned: list[Any]
    _names: dict[int, str]
    _hooked: list[HookedTensor]
    _end: list[Inner]
    _inners: list[Inner]
    _kind: str
    _clip: Any
    _guard: nonfinite.Guard | None

    def abandon_step(self) -> None:
        """Forget an unfinished step."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the constructor: a parameter added later would have no hook. Raises UserError afterwards."""
        if getattr(self, "_ready", False):
            raise UserError("add_param_group after the optimizer was built: unfreeze or add parameters, then build it")
        super().add_param_group(param_group)

    @property
    def skipped_updates(self) -> int:
        """Updates of tensors that were left out so far because a gradient was not finite; waits for the device."""
        return 0 if self._guard is None else self._guard.skipped

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by ``GradScaler.step``: scaled gradients would already have been applied inside backward."""
        if self._hooked:
            raise UserError(
                f"GradScaler (fp16) with {self.schedule.name}: updates inside backward see gradients that are not "
                "unscaled yet; train in bf16 or use a standard_* method"
            )
        return False

    def __getstate__(self) -> dict[str, Any]:
        raise UserError("ScheduledOptimizer cannot be copied or pickled: build a new one and use load_state_dict()")

    def state_dict(self) -> dict[str, Any]:
        """State keyed by parameter name, the same for every method (format: ``methods/state.py``).

        Raises RuntimeError in the middle of a step, when some parameters have been updated and others have not.
        """
        if any(unit.firings for unit in self._hooked):
            raise RuntimeError(
                "state_dict() between backward and step(): call it after step(), or abandon_step() first"
            )
        by_name = states.named_states(self._hooked, self._end)
        return {
            "format": states.FORMAT,
            "optimizer": self._kind,
            "steps": self.steps,
            "state": {o.name: by_name[o.name] for o in self._owned},
            "clip": self._clip.state(),
            "param_groups": states.dump_groups(self.param_groups, self._names),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved under any method; nothing is changed unless all of it fits.

        Raises:
            UserError: missing or unknown parameter names, shapes or groups that differ, another optimizer's state.
        """
        if is_torch_state(state_dict):
            raise UserError(
                "optimizer state lacks format, optimizer, steps: it is a plain torch optimizer's; load what "
                "sonar_repro.from_torch_state(state_dict, optimizer) makes of it"
            )
        states.check_format(state_dict, self._kind)
        states.check_names(state_dict, {o.name: tuple(o.parameter.shape) for o in self._owned})
        states.check_groups(state_dict, states.dump_groups(self.param_groups, self._names))
        states.restore(self._hooked, self._end, state_dict["state"])
        for outer, saved in zip(self.param_groups, state_dict["param_groups"]):
            outer.update({k: v for k, v in saved.items() if k not in EXECUTION_KEYS | {"name", "shapes"}})
        self._clip.load_state(state_dict.get("clip", {}))
        self.steps = state_dict["steps"]
        self.abandon_step()

    @property
    def state(self) -> StateView:
        """The inner optimizers' states by parameter; changing it changes theirs (:class:`.state_view.StateView`)."""
        return StateView(*((self._owned, self._hooked, self._end) if getattr(self, "_ready", False) else ((), (), ())))

    @state.setter
    def state(self, value: Any) -> None:
        if getattr(self, "_ready", False):  # the base class's constructor assigns an empty mapping
            self.state.replace(value)

    def optimizer_state_bytes(self) -> int:
        """Bytes of all tensors that the inner optimizers hold (the local part of sharded ones)."""
        seen: set[int] = set()
        return sum(states.inner_bytes(inner.optimizer, seen) for inner in self._inners)

    def hidden_buffer_bytes(self) -> int:
        """Bytes of hidden momentum (MESH keeps it in gradient buffers, outside the optimizer state); 0 without it."""
        return sum(
            i.optimizer.hidden_buffer_bytes() for i in self._inners if hasattr(i.optimizer, "hidden_buffer_bytes")
        )

    def describe(self) -> list[str]:
        """One line a group: what it owns, with which optimizer, when it is updated; one more for what is frozen."""
        hooked = {id(u.parameter): u for u in self._hooked}
        lines = []
        for group in self.param_groups:
            calls = sum(len(hooked[id(p)].inners) for p in group["params"] if id(p) in hooked)
            when = f"inside backward in {calls} optimizer calls" if calls else "at the end of the step"
            count = sum(p.numel() for p in group["params"])
            what = f"{len(group['params'])} tensors, {count:,} parameters, {self.optimizer_label()}"
            lines.append(f"{group['name']}: {what}, lr {group['lr']}, updated {when}")
        if frozen := [name for name, _ in self._attachment.frozen]:
            lines.append(f"frozen: {len(frozen)} tensors skipped, first {frozen[0]}")
        return lines

    def optimizer_label(self) -> str:
        """The inner optimizers' classes and kernels, such as ``torch.optim.AdamW(fused)``."""
        return " + ".join(sorted({inner.label() for inner in self._inners}))
