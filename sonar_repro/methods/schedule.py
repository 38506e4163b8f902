"""A method is three knobs, and the named methods are data. Imports no torch: configs are checked with it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..errors import UserError

IN_BACKWARD = ("none", "experts", "all")
GRANULARITY = ("tensor", "expert")
# What is clipped -> the values of in_backward under which its gradients still exist when they are needed.
CLIP: dict[str, tuple[str, ...]] = {
    "all": ("none",),
    "non_expert": ("none", "experts"),
    "none": ("none", "experts", "all"),
}
ACCUMULATION_MODES = ("standard", "update_each", "fold")


@dataclass(frozen=True)
class Schedule:
    """When each parameter is updated and what is clipped.

    Args:
        in_backward: whose gradients are used and freed inside backward: ``none`` | ``experts`` | ``all``.
        granularity: one update a batched expert ``tensor`` (2L a step) or one an ``expert`` slice (2EL a step, §4.3).
        clip: the gradients whose joint norm is clipped: ``all`` | ``non_expert`` | ``none``.

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
            raise UserError(
                "granularity=expert with in_backward=none: per-expert updates need in_backward=experts or all"
            )
        if self.in_backward not in CLIP[self.clip]:
            able = ", ".join(
                n for n, m in METHODS.items() if m.clip == self.clip or m.clip in _SAME_NORM.get(self.clip, ())
            )
            raise UserError(
                f"clip={self.clip} with in_backward={self.in_backward}: gradients are freed before their joint norm is "
                f"known; methods that clip it: {able}"
            )

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
        return self.in_backward == "experts" or self.clip == "non_expert"

    @property
    def name(self) -> str:
        """The named method with these knobs, or the knobs themselves."""
        known = {schedule: name for name, schedule in METHODS.items()}
        return known.get(self, f"in_backward={self.in_backward},granularity={self.granularity},clip={self.clip}")


METHODS: dict[str, Schedule] = {}
# clip -> other clips that apply the same norm
_SAME_NORM: dict[str, tuple[str, ...]] = {}
METHODS |= {
    "standard_global_clip": Schedule("none", "tensor", "all"),
    "standard_no_expert_clip": Schedule("none", "tensor", "non_expert"),
    "standard_no_clip": Schedule("none", "tensor", "none"),
    "optimizer_in_backward": Schedule("all", "tensor", "none"),
    "sonar": Schedule("experts", "tensor", "non_expert"),
    "sonar_per_expert": Schedule("experts", "expert", "non_expert"),
}
