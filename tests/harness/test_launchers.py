"""Sweeps over several workers: Hydra's joblib and submitit launchers, and one card an arm."""

import dataclasses
import os
import sys
import threading
from pathlib import Path

import pytest
from processes import LIMIT_S, started

from sonar_repro import records
from sonar_repro.config.schema import Config, from_dict
from sonar_repro.harness import gpu_locks, runner
from sonar_repro.harness.runner import make_arm, run

ROOT = Path(__file__).parents[2]
SWEEP = ["seed=1,2,3", "method=sonar,standard_global_clip", "task.name=fault_tasks:counts_runs"]
VARYING = ("started_unix", "wall_s")


def sweep(runs, *more):
    """A context manager of the sweep's process."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
    command = [sys.executable, "-m", "sonar_repro", "-m", *SWEEP, f"runs_dir={runs}", f"hydra.sweep.dir={runs}/hydra"]
    return started([*command, *more], environment, cwd=runs.parent, stdout=-1, stderr=-1, text=True)


def finished(process):
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    return err


def comparable(runs):
    found = {path.parent.name: record for path, record in records.iterate(runs)}
    return {name: {k: v for k, v in record.items() if k not in VARYING} for name, record in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
        ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"],
    ],
    ids=["joblib", "submitit_local"],
)
def test_two_workers_leave_the_records_of_a_run_in_turn(tmp_path, launcher):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    turn, spread = tmp_path / "turn", tmp_path / "spread"
    with sweep(turn) as first, sweep(spread, *launcher) as second:
        finished(first)
        lines = finished(second)
    assert comparable(spread) == comparable(turn) and len(comparable(turn)) == 6
    assert lines.count("  ok  ") == 6
    for folder in (turn, spread):
        assert [p.read_text() for p in folder.glob("*/*/*/runs.txt")] == ["ran\n"] * 6


@pytest.mark.slow
def test_two_commands_over_the_same_arms_run_each_once(tmp_path):
    runs = tmp_path / "runs"
    with sweep(runs) as first, sweep(runs) as second:
        assert sum(finished(process).count("recorded") for process in (first, second)) >= 1
    assert [p.read_text() for p in runs.glob("*/*/*/runs.txt")] == ["ran\n"] * 6


@pytest.mark.parametrize(
    "count, environment, names",
    [
        (3, {}, ["0", "1", "2"]),
        (2, {"CUDA_VISIBLE_DEVICES": "3, 5"}, ["3", "5"]),
        (1, {"CUDA_VISIBLE_DEVICES": "GPU-ab,GPU-cd"}, ["GPU-ab"]),
        (2, {"CUDA_VISIBLE_DEVICES": ""}, ["0", "1"]),
    ],
)
def test_cards_have_the_names_that_the_variable_takes(count, environment, names):
    assert gpu_locks.visible(count, environment) == names


def test_a_taken_card_is_left_out_and_comes_back(tmp_path):
    with gpu_locks.taken(1, ["0", "1"], tmp_path) as first, gpu_locks.taken(1, ["0", "1"], tmp_path) as second:
        assert (first, second) == (["0"], ["1"])
    with gpu_locks.taken(2, ["0", "1"], tmp_path) as both:
        assert both == ["0", "1"]
    with gpu_locks.taken(4, ["0", "1"], tmp_path) as all_there_are:
        assert all_there_are == ["0", "1"]


def test_a_worker_waits_for_a_card_and_takes_all_or_none(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_locks, "WAIT", 0.01)
    got = []

    def both():
        with gpu_locks.taken(2, ["0", "1"], tmp_path) as names:
            got.append(names)

    waiting = threading.Thread(target=both)
    with gpu_locks.taken(1, ["0", "1"], tmp_path):
        waiting.start()
        with gpu_locks.taken(1, ["0", "1"], tmp_path) as free:  # the one that waits for two holds none
            assert free == ["1"] and got == []
    waiting.join(timeout=LIMIT_S)
    assert got == [["0", "1"]]


@pytest.mark.slow
def test_two_arms_at_once_have_a_card_each(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_cuda_cards", lambda config: 2)
    monkeypatch.setattr(runner, "_context", lambda config: runner.multiprocessing.get_context("spawn"))
    monkeypatch.setattr(gpu_locks.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    data = dataclasses.asdict(Config())
    data["task"]["name"] = "fault_tasks:names_its_card"
    arms = [make_arm(from_dict({**data, "runs_dir": str(tmp_path / "runs"), "seed": seed})) for seed in (1, 2, 3)]
    workers = [threading.Thread(target=run, args=(arm,)) for arm in arms]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=LIMIT_S)
    found = [records.load(arm.record_path) for arm in arms]
    assert {r["model"]["card"] for r in found} == {"4", "7"}
    for a in found:
        for b in found:
            if a is not b and a["model"]["card"] == b["model"]["card"]:
                spans = sorted([(r["counts"]["started"], r["counts"]["ended"]) for r in (a, b)])
                assert spans[0][1] <= spans[1][0]
