"""The three knobs: named methods, refusals before a model exists, and no torch for whoever only checks a config."""

import processes
import pytest

from sonar_repro.errors import UserError
from sonar_repro.methods.schedule import METHODS, Schedule


@pytest.mark.parametrize(
    "name, in_backward, granularity, clip",
    [
        ("standard_global_clip", "none", "tensor", "all"),
        ("standard_no_expert_clip", "none", "tensor", "non_expert"),
        ("standard_no_clip", "none", "tensor", "none"),
        ("optimizer_in_backward", "all", "tensor", "none"),
        ("sonar", "experts", "tensor", "non_expert"),
        ("sonar_per_expert", "experts", "expert", "non_expert"),
    ],
)
def test_six_methods_are_three_knobs(name, in_backward, granularity, clip):
    assert Schedule.named(name) == Schedule(in_backward, granularity, clip)
    assert Schedule(in_backward, granularity, clip).name == name


@pytest.mark.parametrize(
    "knobs, said",
    [
        (("everything", "tensor", "none"), ["in_backward='everything'", "none, experts, all"]),
        (("none", "layer", "all"), ["granularity='layer'", "tensor, expert"]),
        (("none", "tensor", "global"), ["clip='global'", "non_expert"]),
        (("none", "expert", "all"), ["granularity=expert", "in_backward=experts"]),
        (("experts", "tensor", "all"), ["clip=all", "in_backward=experts", "standard_global_clip"]),
        (("all", "tensor", "all"), ["clip=all", "in_backward=all", "standard_global_clip"]),
        (("all", "tensor", "non_expert"), ["clip=non_expert", "in_backward=all", "sonar"]),
    ],
)
def test_bad_knobs_name_the_value_and_what_is_allowed(knobs, said):
    with pytest.raises(UserError) as error:
        Schedule(*knobs)
    assert "\n" not in str(error.value)
    assert all(part in str(error.value) for part in said), str(error.value)


def test_unknown_method_suggests_near_matches():
    with pytest.raises(UserError, match="sonar_per_expert"):
        Schedule.named("sonar_per_experts")
    with pytest.raises(UserError, match="choose one of standard_global_clip"):
        Schedule.named("qqq")


def test_methods_are_distinct():
    assert len(set(METHODS.values())) == len(METHODS)


def test_checking_a_schedule_loads_no_torch():
    code = "import sys, sonar_repro; sonar_repro.Schedule.named('sonar'); sys.exit('torch' in sys.modules)"
    assert processes.python("-c", code).returncode == 0
