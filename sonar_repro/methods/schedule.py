"""A method is three knobs, and the named methods are data. Imports no torch: configs are checked with it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..errors import UserError

IN_BACKWARD = ("none", "experts", "all")
GRANULARITY = ("tensor", "expert")
ACCUMULATION_MODES = ("standard", "update_each", "fold")
#: What a gradient that is not finite does, and what is looked at (methods/nonfinite.py).
NONFINITE_MODES = ("skip", "raise", "off")
NONFINITE_CHECKS = ("incoming", "full")
#: Ways of clipping that know sharded gradients (FSDP2): joint norms of what is left at the end of backward.
SHARDED_CLIPS = ("all", "non_expert", "none")


@dataclass(frozen=True)
class ClipRule:
    """What a value of ``clip`` goes with.

    Args:
        in_backward: the values of in_backward under which the gradients still exist when they are clipped.
        modes: the accumulation modes that an in-backward method can honour with it at A > 1.
        needs_experts: whether experts are treated apart from the rest.
    """

    in_backward: tuple[str, ...]
    modes: tuple[str, ...] = ()
    needs_experts: bool = False


CLIP: dict[str, ClipRule] = {
    # the joint norm of all gradients, of the non-expert ones, or nothing (the paper's three)
    "all": ClipRule(("none",)),
    "non_expert": ClipRule(("none", "experts"), ("update_each", "fold"), needs_experts=True),
    "none": ClipRule(("none", "experts", "all"), ("update_each", "fold")),
    # each hooked tensor by its own norm, inside its hook
    "tensor": ClipRule(("experts", "all"), ("update_each",)),
    # the joint norm of all, exactly: measured by a first backward pass, applied by a second
    "exact": ClipRule(("experts", "all")),
    # the joint norm of all, of the step before
    "lagged": ClipRule(("experts", "all")),
    # the joint norm of all, exactly: hooked gradients wait for it on the device, or on the host
    "kept": ClipRule(("experts", "all"), ("standard",)),
    "offloaded": ClipRule(("experts", "all"), ("standard",)),
}


@dataclass(frozen=True)
class Schedule:
    """When each parameter is updated and what is clipped.

    Args:
        in_backward: whose gradients are used and freed inside backward: ``none`` | ``experts`` | ``all``.
        granularity: one update a batched expert ``tensor`` (2L a step) or one an ``expert`` slice (2EL a step, §4.3).
        clip: what is clipped: ``all`` | ``non_expert`` | ``none``, or one of the other keys of :data:`CLIP`.

    Raises:
        UserError: a value that is not one of these, or a clip whose gradients the schedule has already freed.
    """

    in_backward: str
    granularity: str = "tensor"
    clip: str = "non_expert"

    def __post_init__(self) -> None:
        for knob, allowed in (("in_backward", IN_BACKWARD), ("granularity", GRANULARITY), ("clip", tuple(CLIP))):
            value = getattr(self, knob)
            if value not in allowed:
                raise UserError(f"{knob}={value!r}: choose one of {', '.join(allowed)}")
        if self.granularity == "expert" and self.in_backward == "none":
            raise UserError("granularity=expert with in_backward=none: per-expert updates need in_backward=experts")
        if self.in_backward not in CLIP[self.clip].in_backward:
            raise UserError(f"clip={self.clip} with in_backward={self.in_backward}: {_instead(self.clip)}")

    @classmethod
    def named(cls, name: str) -> Schedule:
        """The schedule of a named method. Raises UserError with near matches for an unknown name."""
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(METHODS)}"
            raise UserError(f"method={name!r}: unknown; {hint}")
        return METHODS[name]

    @property
    def needs_experts(self) -> bool:
        """Whether the schedule treats experts apart, and so makes no sense without batched expert tensors."""
        return self.in_backward == "experts" or CLIP[self.clip].needs_experts

    @property
    def name(self) -> str:
        """The named method with these knobs, or the knobs themselves."""
        known = {schedule: name for name, schedule in METHODS.items()}
        return known.get(self, f"in_backward={self.in_backward},granularity={self.granularity},clip={self.clip}")


def _instead(clip: str) -> str:
    """Why a clip does not go with a schedule, and the methods that do what was wanted."""
    if clip not in ("all", "non_expert"):
        return "it clips gradients inside backward; choose in_backward=experts"
    wanted = ("all", "exact", "kept", "offloaded") if clip == "all" else (clip,)
    able = ", ".join(name for name, schedule in METHODS.items() if schedule.clip in wanted)
    return f"gradients are freed before their joint norm is known; methods that can clip it: {able}"


METHODS: dict[str, Schedule] = {}
METHODS |= {
    # the six of the paper
    "standard_global_clip": Schedule("none", "tensor", "all"),
    "standard_no_expert_clip": Schedule("none", "tensor", "non_expert"),
    "standard_no_clip": Schedule("none", "tensor", "none"),
    "optimizer_in_backward": Schedule("all", "tensor", "none"),
    "sonar": Schedule("experts", "tensor", "non_expert"),
    "sonar_per_expert": Schedule("experts", "expert", "non_expert"),
    # clipping that the paper leaves to future work ("Limitations")
    "sonar_exact_clip": Schedule("experts", "tensor", "exact"),
    "sonar_tensor_clip": Schedule("experts", "tensor", "tensor"),
    "sonar_lagged_clip": Schedule("experts", "tensor", "lagged"),
    "sonar_delayed_clip": Schedule("experts", "tensor", "kept"),
    "sonar_offload_clip": Schedule("experts", "tensor", "offloaded"),
}
