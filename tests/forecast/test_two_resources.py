"""The two-resource schedule against schedules solved by hand, and its identities."""

import json

import numpy as np
import pytest

from sonar_repro.forecast.two_resources import Kernels, parts_us, schedule, write_trace


def kernels(host, device, *, kind=None, waits=(), tail=0.0, gap=0.0):
    count = len(host)
    return Kernels(
        np.array(host, dtype=float),
        np.array(device, dtype=float),
        np.array(kind if kind is not None else [0] * count),
        np.array([i in waits for i in range(count)]),
        tail,
        gap,
    )


def by_loop(made):
    """The definition, kernel by kernel."""
    host = device = busy = 0.0
    ends = []
    for index, (issue, run) in enumerate(zip(made.host_us, made.device_us)):
        host += issue
        start = max(host, device + (made.gap_us if ends else 0.0))
        device = start + run
        busy += run
        ends.append(device)
        if made.waits[index]:
            host = max(host, device)
    return ends, max(host + made.tail_us, device), busy


def test_host_bound_device_bound_and_mixed_steps_by_hand():
    # issued at 10, 20, 30; each runs 2 as soon as it is issued: the host's 30 and the last kernel's 2
    host_bound = schedule(kernels([10, 10, 10], [2, 2, 2]))
    assert (host_bound.step_us, host_bound.busy_us, host_bound.idle_us) == (32, 6, 26)
    # issued at 1, 2, 3; the first starts at 1 and the rest queue up behind it
    device_bound = schedule(kernels([1, 1, 1], [10, 10, 10]))
    assert (device_bound.step_us, device_bound.idle_us) == (31, 1)
    # a long kernel hides what the host does meanwhile: 1 + 20, then 5 at 21 (issued at 11); then idle until 41
    mixed = schedule(kernels([1, 10, 30], [20, 5, 5]))
    assert mixed.end.tolist() == [21, 26, 46] and mixed.step_us == 46 and mixed.idle_us == 16


def test_a_wait_stops_the_host_and_the_tail_is_host_time():
    # the second kernel is issued 10 after the first one's end at 21, not at 11
    waited = schedule(kernels([1, 10], [20, 5], waits=[0]))
    assert waited.end.tolist() == [21, 36]
    assert schedule(kernels([1], [2], tail=50)).step_us == 51
    assert schedule(kernels([1], [20], tail=5)).step_us == 21


def test_gaps_stand_between_kernels_that_are_both_issued():
    queued = schedule(kernels([1, 1, 1], [10, 10, 10], gap=2))
    assert queued.step_us == 1 + 30 + 2 * 2 and queued.busy_us == 30
    assert schedule(kernels([10, 10], [2, 2], gap=2)).step_us == 22  # the host's pace is slower than the gap


@pytest.mark.parametrize("seed", range(4))
def test_closed_form_is_the_definition(seed):
    random = np.random.default_rng(seed)
    made = kernels(
        random.exponential(5, 300), random.exponential(5, 300), waits=set(range(0, 300, 37)), tail=9, gap=0.7
    )
    ends, step, busy = by_loop(made)
    timeline = schedule(made)
    np.testing.assert_allclose(timeline.end, ends, rtol=1e-12)
    assert timeline.step_us == pytest.approx(step) and timeline.busy_us == pytest.approx(busy)


def test_identities():
    random = np.random.default_rng(1)
    host, device = random.exponential(5, 200), random.exponential(5, 200)
    kind = random.integers(0, 3, 200)
    timeline = schedule(kernels(host, device))
    assert timeline.idle_us == pytest.approx(timeline.step_us - device.sum())
    assert schedule(kernels(host * 0, device)).step_us == pytest.approx(device.sum())  # an infinitely fast host
    assert schedule(kernels(host, device * 0)).step_us == pytest.approx(host.sum())
    steps = [schedule(kernels(host * slow, device)).step_us for slow in (0.5, 1, 2, 4)]
    assert steps == sorted(steps) and steps[0] < steps[-1]
    assert sum(parts_us(kernels(host, device, kind=kind), 3)) == pytest.approx(timeline.busy_us)


def test_trace_has_both_rows(tmp_path):
    made = kernels([1, 10], [20, 5], waits=[0])
    write_trace(tmp_path / "a" / "trace.json", ["aten::mm", "aten::add"], made, schedule(made))
    events = json.loads((tmp_path / "a" / "trace.json").read_text())["traceEvents"]
    device = [(e["name"], e["ts"], e["dur"]) for e in events if e["tid"] == "device"]
    assert device == [("aten::mm", 1, 20), ("aten::add", 31, 5)]
    assert [(e["ts"], e["dur"]) for e in events if e["tid"] == "host"] == [(0, 1), (21, 10)]
