"""The runner leaves a row for every arm, whatever happens in its process."""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import alive, started, within_limit

from sonar_repro import records
from sonar_repro.config.schema import Config, from_dict
from sonar_repro.harness.runner import make_arm, recorded, run, state


def arm_for(task: str, runs: Path, **more):
    data = dataclasses.asdict(Config())
    data["task"]["name"] = f"fault_tasks:{task}"
    data.update(runs_dir=str(runs), **more)
    return make_arm(from_dict(data))


@pytest.mark.parametrize(
    ("task", "status", "phase", "message"),
    [
        ("raises", "failed", "work", "boom"),
        ("out_of_memory", "oom", "step 7", "asked for too much"),
        ("unsupported", "unsupported", "start", "cannot run here"),
        ("user_error", "failed", "start", "give another"),
        ("killed", "crashed", "deep inside", "SIGKILL"),
        ("exits", "crashed", "start", "exit code 3"),
    ],
)
def test_every_end_leaves_its_row(tmp_path, task, status, phase, message):
    arm = arm_for(task, tmp_path)
    record = run(arm)
    on_disk = records.load(arm.record_path)
    assert record["status"] == on_disk["status"] == status
    assert on_disk["error"]["phase"] == phase
    assert message in on_disk["error"]["message"]
    assert (on_disk["error"]["traceback"] is not None) == (task in ("raises", "out_of_memory"))
    assert [p.name for p in arm.folder.iterdir() if p.suffix == ".tmp"] == []


def test_sections_known_before_a_fault_are_kept(tmp_path):
    arm = arm_for("raises", tmp_path)
    run(arm)
    record = records.load(arm.record_path)
    assert record["model"] == {"name": "known before the fault"}
    assert record["loss"] is None and record["arm"]["method"] == "sonar"


def test_an_ok_record_is_strict_json_with_its_log(tmp_path):
    arm = arm_for("ok", tmp_path)
    run(arm)
    text = arm.record_path.read_text()
    assert json.loads(text, parse_constant=lambda token: pytest.fail(token))["loss"]["heldout"] is None
    assert "a line for the log" in (arm.folder / "log.txt").read_text()


def test_a_stalled_arm_is_killed_and_recorded(tmp_path):
    begun = time.monotonic()
    record = run(arm_for("stalls", tmp_path, stall_timeout_s=3.0))
    assert record["status"] == "crashed" and record["error"]["type"] == "Stalled"
    assert time.monotonic() - begun < 60


def test_final_records_are_not_run_again_and_others_are(tmp_path):
    arm = arm_for("counts_runs", tmp_path)
    assert run(arm)["outcome"] == "run"
    assert run(arm)["outcome"] == "recorded"
    assert (arm.folder / "runs.txt").read_text() == "ran\n"
    for status, again in (("oom", False), ("failed", True), ("crashed", True), ("unsupported", True)):
        record = {**records.load(arm.record_path), "status": status}
        records.write(arm.record_path, record)
        assert (recorded(arm) is None) == again, status
    forced = arm_for("counts_runs", tmp_path, force=True)
    assert forced.fingerprint == arm.fingerprint
    run(forced)
    assert (arm.folder / "runs.txt").read_text() == "ran\nran\n"


def test_the_same_computation_under_another_experiment_is_referenced(tmp_path):
    first = arm_for("counts_runs", tmp_path, experiment_name="table1")
    second = arm_for("counts_runs", tmp_path, experiment_name="table3")
    run(first)
    assert state(second) == "referenced"
    record = run(second)
    assert record["outcome"] == "referenced"
    assert not (second.folder / "runs.txt").exists()
    on_disk = records.load(second.record_path)
    assert on_disk["arm"]["experiment"] == "table3"
    assert on_disk["referenced_from"] == f"table1/smoke/{first.arm_id}"


def test_an_arm_of_another_fingerprint_in_the_same_folder_runs_again(tmp_path):
    arm = arm_for("counts_runs", tmp_path)
    run(arm)
    other = arm_for("counts_runs", tmp_path, learning_rate=0.5)
    assert other.folder == arm.folder and other.fingerprint != arm.fingerprint
    assert run(other)["outcome"] == "run"


def test_children_die_with_a_killed_parent(tmp_path):
    """SIGKILL on the runner: the arm's process must not go on holding memory."""
    arm = arm_for("sleeps", tmp_path)
    code = (
        "import sys, dataclasses, json; sys.path.insert(0, sys.argv[1])\n"
        "from sonar_repro.config.schema import from_dict; from sonar_repro.harness.runner import make_arm, run\n"
        "if __name__ == '__main__': run(make_arm(from_dict(json.loads(sys.argv[2]))))\n"
    )
    script = tmp_path / "runner_script.py"
    script.write_text(code)
    harness = str(Path(__file__).parents[1] / "support")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([harness, str(Path(__file__).parents[2])])}
    pid_file = arm.folder / "child.pid"
    with started([sys.executable, str(script), harness, json.dumps(dataclasses.asdict(arm.config))], env) as parent:
        assert within_limit(lambda: pid_file.exists() and pid_file.read_text())
        child = int(pid_file.read_text())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert within_limit(lambda: not alive(child))
