"""The forecast meter on small models: what it reads, where it runs out of memory, how the replay goes on."""

import pytest
import tiny_runs as tiny
import torch

from sonar_repro.errors import UserError
from sonar_repro.forecast.cuda_buffers import CudaModel, cublas_workspace_bytes
from sonar_repro.forecast.fake_model import fake_environment
from sonar_repro.forecast.memory import ForecastMeter
from sonar_repro.forecast.step_template import NoTemplate, StepTemplate
from sonar_repro.instruments.tracker import AllocationTracker
from sonar_repro.training.step import training_step

MIB = 1 << 20


def forecast(
    method="sonar", kind="adamw", cap=None, accumulation=1, experts="grouped_mm", length=64, build=None, **run
):
    with fake_environment() as environment, ForecastMeter(cap_bytes=cap) as meter:
        meter.phase("load")
        model = environment.build(tiny.config(**(build or {})), experts=experts)
        meter.attach(model, tiny.experts_of(model))
        made = tiny.optimizer(model, method, kind, accumulation)

        def step(micro_batches):
            training_step(model, made, None, micro_batches, accumulation)

        meter.run(environment, step, batch_size=2, max_length=length, accumulation=accumulation, **run)
        meter.read()
    return meter, model


def test_same_run_same_bytes():
    first, second = forecast()[0].read(), forecast()[0].read()
    assert first == second and first["source"] == "forecast"
    assert first["allocator"]["sequence"]["replayed_steps"] == 64 and first["allocator"]["oom"] is None


def test_reads_three_phases_in_order_of_size():
    block = forecast("standard_global_clip")[0].read()
    load, warmup, measured = (block[name] for name in ("load", "warmup", "measured"))
    assert load["peak_requested_bytes"] < warmup["peak_requested_bytes"] <= measured["peak_requested_bytes"]
    for phase in (load, warmup, measured):
        assert phase["peak_requested_bytes"] <= phase["peak_allocated_bytes"] <= phase["peak_reserved_bytes"]
    assert load["peak_reserved_bytes"] % (2 * MIB) == 0


def test_two_cublas_workspaces_are_part_of_every_steady_peak():
    """One for the main thread, one for autograd's: 32 MiB from Hopper on, 8.125 MiB before."""
    assert cublas_workspace_bytes(12) == cublas_workspace_bytes(9) == 32 * MIB
    assert cublas_workspace_bytes(8) == 8 * MIB + 128 * 1024
    live = []
    for workspace in (0, 1000):
        tracker = AllocationTracker(device_model=CudaModel(workspace))
        with fake_environment() as environment, tracker:
            model = environment.build(tiny.config())
            tiny.run_steps(model, lambda: environment.batch(2, 16), steps=3)
            live.append(tracker.live_requested)
    assert live[1] - live[0] == 2 * 1000


def test_accumulation_replays_each_micro_batch_at_its_own_length():
    meter, _ = forecast(accumulation=3, replayed_steps=5)
    sequence = meter.read()["allocator"]["sequence"]
    assert sequence["recorded"][1:] == [[32] * 3, [64] * 3] and len(sequence["recorded"][0]) == 3
    sizes = [meter._template.sizes(lengths) for lengths in ([64, 64, 64], [32, 64, 64], [64, 32, 64], [64, 64, 32])]
    changed = [{i for i, (a, b) in enumerate(zip(sizes[0], other)) if a != b} for other in sizes[1:]]
    assert all(changed) and not (changed[0] & changed[1] | changed[1] & changed[2] | changed[0] & changed[2])


@pytest.mark.parametrize(("method", "checkpointing"), [("sonar", False), ("standard_global_clip", True)])
def test_template_gives_the_sizes_of_a_third_recorded_length(method, checkpointing):
    tracker = AllocationTracker(events=True)
    with fake_environment() as environment, tracker:
        model = environment.build(tiny.config())
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        made = tiny.optimizer(model, method)

        def record(label, length):
            tracker.step(label)
            training_step(model, made, None, iter([environment.batch(2, length)]), 1)

        for label, length in enumerate((64, 32, 64)):
            record(label, length)
        tracker.step("end")
        template = StepTemplate(tracker.log, (32, 64))
        before = len(tracker.log.sizes)
        record("third", 48)
        after = len(tracker.log.sizes)
    assert template.sizes([48]) == list(tracker.log.sizes[before:after])
    assert template.sizes([64]) == list(tracker.log.sizes[template.first_block : template.first_block + after - before])


def test_steps_that_differ_in_more_than_sizes_leave_no_template():
    tracker = AllocationTracker(events=True)
    with tracker:
        for step, count in enumerate((1, 2, 3)):
            tracker.step(step)
            for _ in range(count):
                torch.empty(8)
        tracker.step("end")
    with pytest.raises(NoTemplate, match="2 allocations at length 4, 3 at 8"):
        StepTemplate(tracker.log, (4, 8))
    with pytest.raises(NoTemplate, match="two complete steady steps"):
        StepTemplate(tracker.log, (8, 8))


def test_an_algorithm_change_between_lengths_is_met_by_closer_lengths():
    """Above 3,072 tokens the embedding's backward sorts: 2 x 1024 is below, 2 x 1792 and 2 x 2048 are above."""
    meter, _ = forecast(length=2048, replayed_steps=2)
    sequence = meter.read()["allocator"]["sequence"]
    assert [lengths[0] for lengths in sequence["recorded"][1:]] == [1024, 2048, 1792, 2048]
    assert sequence["reason"] is None and sequence["replayed_steps"] == 2


def test_a_cap_ends_the_run_where_it_is_too_small():
    free = forecast("standard_global_clip")[0].read()
    enough = forecast("standard_global_clip", cap=free["measured"]["peak_reserved_bytes"])[0]
    assert enough.oom is None
    small = forecast("standard_global_clip", cap=free["load"]["peak_reserved_bytes"])[0]
    assert (small.oom["phase"], small.oom["step"], small.oom["region"]) == ("warmup", "1", "forward")
    assert small.oom["reserved_bytes"] <= free["load"]["peak_reserved_bytes"]
    block = small.read()
    assert block["measured"]["peak_allocated_bytes"] is None
    assert block["measured"]["reason"] == "the run ended before this phase"


def test_timeline_keeps_every_maximum_and_shows_the_gradient_floor():
    standard, model = forecast("standard_no_clip", build={"layers": 6})
    sonar, _ = forecast("sonar", build={"layers": 6})
    expert_bytes = sum(p.numel() * p.element_size() for p in tiny.experts_of(model))
    for meter, floor in ((standard, expert_bytes), (sonar, expert_bytes // 6)):
        timeline = meter.timeline(points=60)
        assert len(timeline["position"]) <= 130 < timeline["events"]
        for owner, values in timeline["bytes"].items():
            assert max(values) == timeline["peak_bytes"][owner], owner
            assert min(values) >= 0
        totals = [sum(values) for values in zip(*timeline["bytes"].values())]
        assert max(totals) == timeline["peak_bytes"]["total"]
        assert timeline["peak_bytes"]["expert_gradients"] <= floor
        assert timeline["position"] == sorted(timeline["position"])
    assert standard.timeline()["peak_bytes"]["expert_gradients"] == expert_bytes
    assert sonar.timeline()["peak_bytes"]["expert_gradients"] > expert_bytes // 12
    with pytest.raises(UserError, match="timeline of step 9"):
        from sonar_repro.instruments.timeline import step_timeline

        step_timeline(sonar.tracker.log, 9)


def test_cost_grows_linearly_with_layers():
    operators = []
    for layers in (2, 4, 6):
        meter, _ = forecast(build={"layers": layers}, replayed_steps=0)
        operators.append(meter.tracker.operators)
    assert operators[2] - operators[1] == operators[1] - operators[0] > 0


def test_padding_builds_a_mask_and_costs_more_than_no_padding():
    full = forecast(build={"family": "granitemoe"}, replayed_steps=0)[0].read()["measured"]
    padded = forecast(build={"family": "granitemoe"}, padded=True, replayed_steps=0)[0].read()["measured"]
    # grouped queries lose their shared keys and values with a mask: both are repeated and kept, in each layer
    repeated = 2 * (2 * 64) * 64 * 2  # layers x tokens x hidden size x bf16, for keys alone
    assert padded["peak_requested_bytes"] - full["peak_requested_bytes"] >= repeated


def test_bad_shapes_are_refused_in_one_line():
    with pytest.raises(UserError, match="max_length=1: a forecast needs at least 2 tokens"):
        forecast(length=1)
    with fake_environment() as environment, pytest.raises(UserError, match="0 x 8: both must be at least 1"):
        environment.batch(0, 8)
