"""Measuring the host: the correction, the file, and that it sees the operators that a forecast sees."""

import json
from collections import Counter

import processes
import pytest

from sonar_repro.forecast import footprints, host_costs, measure_host
from sonar_repro.forecast.kernel_model import Work
from sonar_repro.forecast.recorder import Operator


def test_the_mode_is_taken_off_evenly_and_the_sum_is_the_truth():
    assert measure_host._take_off([10.0, 10.0, 10.0], 24.0) == pytest.approx([8, 8, 8])
    assert measure_host._take_off([10.0, 1.0, 7.0], 11.0) == pytest.approx([7, 0, 4])  # none below 0
    assert measure_host._take_off([1.0, 2.0], 5.0) == [1.0, 2.0]


@pytest.fixture(scope="module")
def measured():
    footprints.register()
    return {
        m: measure_host.measure("olmoe", "sonicmoe_footprint", m, "adamw", repeats=3)
        for m in ("sonar", "sonar_per_expert")
    }


def test_operators_add_up_to_the_step_without_the_mode(measured):
    for one in measured.values():
        parts = sum(us for _, _, _, us in one["operators"]) + one["head_us"] + one["tail_us"]
        assert parts == pytest.approx(one["step_us"], rel=0.05)


def test_updates_are_found_in_their_contexts(measured):
    def updates(method):
        return Counter(c for name, c, _, _ in measured[method]["operators"] if name == "aten::_fused_adamw_")

    layers, experts = measure_host.SIZES["num_hidden_layers"], measure_host.SIZES["num_experts"]
    assert updates("sonar") == {"hook": 2 * layers, "end": 1}
    assert updates("sonar_per_expert") == {"hook": 2 * layers, "piece": 2 * layers * (experts - 1), "end": 1}


def test_a_host_file_gives_each_operator_its_cost(measured, tmp_path):
    data = measure_host.summarise(list(measured.values()), "here")
    path = tmp_path / "here.json"
    path.write_text(json.dumps(data))
    host = host_costs.load(str(path))

    def cost(name, context, tensors=1, library=False):
        return host.cost(Operator(name, Work(tensors=tensors), context, 0, 0, library))

    assert cost("aten::mm", "forward") == data["operators"]["forward"]["aten::mm"] > 0
    assert cost("aten::_fused_adamw_", "end", 40) == 40 * data["tensors"]["end"]["aten::_fused_adamw_"]
    assert cost("aten::never_seen", "backward") == data["default"]["backward"]
    assert cost("aten::topk", "backward") == data["operators"]["forward"]["aten::topk"]  # measured elsewhere
    assert cost("sonicmoe: up", "forward", library=True) == 0.0  # launches only


def test_committed_hosts_hold_the_papers_operators():
    host = host_costs.load("amd_epyc")
    for context, name in (
        ("forward", "aten::mm"),
        ("backward", "aten::mm"),
        ("hook", "aten::_fused_adamw_"),
        ("piece", "aten::_fused_adamw_"),
        ("hook", "bitsandbytes::optimizer_update_8bit_blockwise"),
    ):
        assert host.operators[context][name] > 0, (context, name)
    assert host.tensors["end"]["aten::_foreach_norm"] > 0


def test_a_wrong_command_is_one_line():
    done = processes.python("-m", "sonar_repro.forecast.measure_host")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "give one file to write" in done.stderr
