"""``task.profile=true``: the profiled steps come after the arm's own and change nothing of what it records."""

import pytest
import torch

from sonar_repro.training.train import PROFILED_STEPS, Training

PARTS = ("forward_backward_ms", "clipping_ms", "optimizer_ms")


@pytest.mark.parametrize(
    "overrides",
    [["method=standard_global_clip"], ["method=sonar", "accumulation=2"], ["method=sonar", "optimizer=lion"]],
    ids=" ".join,
)
def test_a_profiled_arm_trains_to_the_same_bits(tiny, reporter, overrides):
    plain, profiled = (
        Training(tiny(*overrides, "steps=4", *more), reporter(f"arm{len(more)}"))
        for more in ([], ["task.profile=true"])
    )
    plain.run()
    profiled.run()
    weights = dict(profiled.model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in plain.model.named_parameters())
    for section in ("counts", "loss", "grad_norm", "weights"):
        assert plain.report.sections[section] == profiled.report.sections[section], section
    time = profiled.report.sections["time"]
    assert "kernel_breakdown" not in plain.report.sections["time"] and len(time["step_s"]) == 4
    got = time["kernel_breakdown"]
    assert got["steps"] == PROFILED_STEPS and got["source"] == "profiler (cpu operators)"
    assert all(got[name] > 0 for name in PARTS)
    assert got["busy_ms"] == pytest.approx(sum(got[name] for name in PARTS))
    assert got["step_ms"] == pytest.approx(got["busy_ms"] + got["idle_ms"])


@pytest.mark.parametrize("method", ["standard_global_clip", "sonar"])
def test_a_traced_step_has_the_measured_peak_and_moves_no_weight(tiny, reporter, method):
    """The timeline's largest total is the tracker's peak of the measured step: the same batch, state and code."""
    plain, traced = reporter("plain"), reporter("traced")
    Training(tiny(f"method={method}", "outputs=kept"), plain).run()
    Training(tiny(f"method={method}", "outputs=kept", "task.timeline=true"), traced).run()
    for section in ("loss", "weights", "memory"):
        assert plain.sections[section] == traced.sections[section]
    assert "timeline" not in plain.sections
    timeline, memory = traced.sections["timeline"], traced.sections["memory"]
    assert abs(timeline["peak_bytes"]["total"] - memory["measured"]["peak_requested_bytes"]) <= 64
    assert timeline["peak_bytes"]["optimizer_state"] == memory["optimizer_state_bytes"]
    gradients = timeline["peak_bytes"]["expert_gradients"]
    if method == "sonar":
        assert 0 < gradients <= memory["m_floor_bound_bytes"] < memory["m_floor_bytes"]
    else:
        assert gradients == memory["m_floor_bytes"]
