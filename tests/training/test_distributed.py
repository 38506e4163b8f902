"""One arm over two processes (gloo): the record is rank 0's, and the run is that of one process on the joined batch."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from sonar_repro import records
from sonar_repro.config.schema import from_dict
from sonar_repro.harness.runner import make_arm, run

COMMON = ["model=nanowhale", "dataset=text", "method=standard_no_clip", "steps=3", "warmup_steps=1", "window_start=2"]
COMMON += ["data.train_examples=64", "data.heldout_count=8", "scale.dtype=float32", "keep_weights=true"]


@pytest.fixture
def arm_of(compose_config, tmp_path):
    return lambda *overrides: make_arm(compose_config(*COMMON, "threads=1", f"runs_dir={tmp_path}", *overrides))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["mesh", "sgd"])
def test_two_ranks_equal_one_process_on_the_joined_batch(arm_of, optimizer):
    one = arm_of(f"optimizer={optimizer}", "batch_size=4", "accumulation=2")
    two = arm_of(f"optimizer={optimizer}", "batch_size=2", "accumulation=2", "parallel=ddp", "parallel.processes=2")
    for arm in (one, two):
        record = run(arm)
        assert record["status"] == "ok", record["error"]
    alone, group = (records.load(arm.record_path) for arm in (one, two))
    assert group["arm"]["parallel"] == "ddp"
    assert group["data"]["sha256"] == alone["data"]["sha256"]
    assert group["loss"]["train"] == pytest.approx(alone["loss"]["train"], rel=2e-5)
    assert group["loss"]["heldout"] == pytest.approx(alone["loss"]["heldout"], rel=1e-4)
    assert group["time"]["supervised_tokens_per_step"] == alone["time"]["supervised_tokens_per_step"]
    a, b = (load_file(arm.folder / "weights.safetensors") for arm in (one, two))
    if optimizer == "sgd":  # proportional to the gradient: only the order of four summands differs, in fp32
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
    assert not list(two.folder.glob("rank*.json")) and not list(two.folder.glob("progress*"))


SONAR = [
    "model=olmoe",
    "optimizer=sgd",
    "method=sonar",
    "model.smoke.num_hidden_layers=2",
    "model.smoke.hidden_size=64",
]
SONAR += ["model.smoke.intermediate_size=32", "dataset=instructions", "data.train_examples=16", "data.heldout_count=4"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_experts_updated_inside_backward_on_two_ranks(arm_of, parallel):
    """Bit for bit the standard method on the same ranks; the record counts hooks and has one whole set of weights."""
    sonar, standard = (
        arm_of(*SONAR, f"parallel={parallel}", "parallel.processes=2", f"method={method}", "checkpointing=true")
        for method in ("sonar", "standard_no_expert_clip")
    )
    ours, theirs = run(sonar), run(standard)
    for record in (ours, theirs):
        assert record["status"] == "ok", record["error"]
    assert ours["loss"]["train"] == theirs["loss"]["train"] and ours["loss"]["heldout"] == theirs["loss"]["heldout"]
    assert ours["grad_norm"] == theirs["grad_norm"] and ours["grad_norm"]["scope"] == "non_expert"
    assert ours["counts"]["hook_firings_per_step"] == 4 and theirs["counts"]["hook_firings_per_step"] == 0
    assert ours["memory"]["measured"]["peak_requested_bytes"] < theirs["memory"]["measured"]["peak_requested_bytes"]
    a, b = (load_file(arm.folder / "weights.safetensors") for arm in (sonar, standard))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert ours["weights"] == theirs["weights"] and ours["weights"]["expert"]["changed"] > 0


@pytest.mark.slow
def test_an_arm_under_ddp_that_stopped_resumes_bit_for_bit(arm_of):
    arms = [*SONAR, "parallel=ddp", "parallel.processes=2", "optimizer=adamw", "checkpoint_every=2"]
    whole = arm_of(*arms)
    data = dataclasses.asdict(arm_of(*arms, "repeat=2").config)
    data["task"]["name"] = "fault_tasks:stops_and_resumes"
    resumed = make_arm(from_dict(data))
    for arm in (whole, resumed):
        record = run(arm)
        assert record["status"] == "ok", record["error"]
    assert "resumed at step 3" in " ".join(record["notes"])
    a, b = (load_file(arm.folder / "weights.safetensors") for arm in (whole, resumed))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_failing_rank_is_the_arms_error(arm_of):
    data = dataclasses.asdict(arm_of().config)
    data["task"]["name"] = "fault_tasks:fails_on_rank_1"
    data["parallel"] = {"name": "ddp", "processes": 2, "backend": "gloo"}
    arm = make_arm(from_dict(data))
    record = run(arm)
    assert record["status"] == "failed" and "rank 1 is unwell" in record["error"]["message"]
    json.loads(arm.record_path.read_text())
