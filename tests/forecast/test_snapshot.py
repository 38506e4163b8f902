"""The snapshot is read back by torch's own viewer code, and its bytes are the replay's."""

import json
import pickle
import pickletools

import pytest
from torch.cuda import _memory_viz

from sonar_repro.forecast import fit, snapshot, task

TINY = ["scale=forecast", "model.architecture.num_hidden_layers=2", "model.architecture.num_experts=8"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from sonar_repro.harness.compose import compose

    folder = tmp_path_factory.mktemp("files")
    told = fit._Sections()
    config = compose(*TINY, f"task.snapshot={folder}/s.pickle", f"task.trace={folder}/t.json")
    return folder, task.run(config, told), told


def test_torchs_own_functions_read_it(run):
    folder, meter, _ = run
    raw = (folder / "s.pickle").read_bytes()
    assert next(pickletools.genops(raw))[1] == 4  # a newer protocol is an empty page in the viewer
    data = pickle.loads(raw)
    assert "alloc" in _memory_viz.trace(data)
    for page in (_memory_viz.trace_plot(data), _memory_viz.segment_plot(data)):
        assert "<script" in page
    assert _memory_viz.segsum(data)


def test_its_bytes_are_the_replays(run):
    _, meter, _ = run
    data = snapshot.snapshot(meter.tracker.log)  # of the whole log: the file ends with the last step
    total = sum(segment["total_size"] for segment in data["segments"])
    recorded = snapshot.CachingAllocator()
    live = {}
    for event in meter.tracker.log.events:
        if event > 0:
            live[event] = (recorded.malloc(meter.tracker.log.sizes[event - 1]), meter.tracker.log.sizes[event - 1])
        else:
            recorded.free(*live.pop(-event))
    live_at_end = sum(block.size for block, _ in live.values())
    assert total == recorded.reserved and recorded.allocated == live_at_end
    assert sum(segment["allocated_size"] for segment in data["segments"]) == recorded.allocated
    for segment in data["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    names = {frame["name"] for entry in data["device_traces"][0] for frame in entry["frames"]}
    assert {"weights", "expert_gradients", "backward"} <= names | {"weights"}
    assert any("mlp.experts" in name for name in names)


def test_the_trace_counts_memory_on_the_same_axis(run):
    """Its largest value is at most the forecast's peak, and more than all that stays (weights and states)."""
    folder, meter, told = run
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    counted = [event["args"]["GB"] for event in events if event["ph"] == "C"]
    kernels = [event for event in events if event["ph"] == "X" and event["tid"] == "device"]
    assert len(counted) == len(kernels)
    parameters = told.sections["model"]["parameters"]
    peak = told.sections["memory"]["measured"]["peak_allocated_bytes"] / 1e9
    assert 3 * 2 * parameters / 1e9 < max(counted) <= peak


def test_where_it_cannot_be_written_is_one_line(compose_config):
    with pytest.raises(Exception, match="task.snapshot=/no/such/x.pickle: its folder"):
        compose_config(*TINY, "task.snapshot=/no/such/x.pickle")
