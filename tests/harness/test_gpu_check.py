"""The prepared GPU script, without a GPU: its plan, its clock, its summary, and the whole of it on a tiny model."""

import json
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import processes
import pytest

from sonar_repro import records
from sonar_repro.config.identity import parameter_count
from sonar_repro.gpu_check import arms, bootstrap, summary
from sonar_repro.gpu_check.__main__ import between, main
from sonar_repro.gpu_check.clock import Clock
from sonar_repro.gpu_check.session import Session, compose

ROOT = Path(__file__).parents[2]
RUNS_HERE = {"backend_reason": lambda name: None, "free_disk": 10**12}


@pytest.mark.parametrize("setting", [arms.Setting(), arms.Setting(layers=4), arms.Setting(dry=True)])
def test_every_planned_arm_composes_and_needs_no_network(setting):
    plan = arms.stages(setting, **RUNS_HERE)
    names = [stage.name for stage in plan]
    assert names == [
        "table1",
        "per_expert",
        "scattermoe",
        "sonicmoe",
        "eight_bit",
        "caps",
        "table4",
        "lengths",
        "repeat",
    ]
    for planned in [arm for stage in plan for arm in stage.arms]:
        config = compose(*planned.overrides, "runs_dir=/tmp/x")
        assert config.model.weights == "random" and config.data.source == "embedded" and not config.save_model
        assert config.scale.device == ("cpu" if setting.dry else "cuda") and config.checkpoint_every == 0
        assert planned.stage != "table4" or (
            config.deterministic and config.steps == 3 and config.learning_rate == 1e-4
        )


def test_the_plan_is_what_the_check_promises():
    """Full-size OLMoE, four methods on each kernel, 30 timed steps, per-expert, 8-bit, Table 4's pairs, both caps."""
    plan = {stage.name: stage for stage in arms.stages(arms.Setting(), **RUNS_HERE)}
    table1 = [compose(*arm.overrides) for arm in plan["table1"].arms]
    assert {c.method.name for c in table1} == set(arms.METHODS) and {c.backend.name for c in table1} == {"grouped_mm"}
    assert all(c.steps - c.window_start + 1 == 30 for c in table1)
    assert parameter_count(table1[0].model, "paper") == 6_919_161_856
    assert table1[0].model.architecture["num_hidden_layers"] == 16 and table1[0].data.max_length == 256
    for backend in ("scattermoe", "sonicmoe"):
        assert [compose(*arm.overrides).backend.name for arm in plan[backend].arms] == [backend] * 4
    assert {compose(*arm.overrides).memory_cap_gb for arm in plan["caps"].arms} == {46.0, 30.5}
    assert [tuple(compose(*arm.overrides).task.pair) for arm in plan["table4"].arms] == list(arms.PAIRS)
    assert all(stage.workers == 1 for stage in plan.values() if stage.name not in ("caps", "table4"))  # timed in turn


def test_what_cannot_run_leaves_its_reason(tmp_path):
    plan = {s.name: s for s in arms.stages(arms.Setting(), lambda name: f"backend={name}: no", free_disk=10**9)}
    said = []
    session = Session(tmp_path / "runs", Clock(8), say=said.append)
    for name in ("scattermoe", "table4"):
        session.run_stage(plan[name])
    assert {row["status"] for row in session.rows} == {"skipped"} and len(session.rows) == 9
    assert session.rows[0]["why"] == "backend=scattermoe: no" and "GB of disk are free" in session.rows[-1]["why"]
    told = summary.text(session.rows, {"name": "x"})
    assert told.count("backend=scattermoe: no") == 1 and "optimizer_in_backward" in told


def test_the_clock_starts_what_fits_and_keeps_its_reserve(tmp_path):
    now = [0.0]
    clock = Clock(8, reserve_s=75, now=lambda: now[0])
    assert clock.why_skip("table1", 40) is None
    now[0] = 370.0
    assert clock.why_skip("table1", 40) == "time: 35 s left and it takes about 44 s"
    clock.took("quick", 20.0)
    assert clock.why_skip("quick", 40) is None  # what the arm before took is believed
    clock.took("quick", 60.0)
    assert "about 66 s" in clock.why_skip("quick", 40)
    clock.release()
    assert clock.why_skip("table1", 40) is None
    now[0] = 500.0
    session = Session(tmp_path / "runs", clock, say=lambda line: None)
    session.run_stage(arms.stages(arms.Setting(), **RUNS_HERE)[0])
    assert [row["status"] for row in session.rows] == ["skipped"] * 4
    assert all(row["why"].startswith("time: 0 s left") for row in session.rows)


# -- the folder of wheels --------------------------------------------------------------------------------------------


def wheel(folder, name, files):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def test_wheels_are_unpacked_for_this_process_and_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    wheel(tmp_path / "wheels", "only_here-1.0-py3-none-any.whl", {"only_here_package/__init__.py": "value = 7"})
    assert bootstrap.use_wheels(tmp_path / "wheels", tmp_path / "site") == ["only_here-1.0-py3-none-any.whl"]
    code = "import only_here_package; print(only_here_package.value)"
    assert processes.python("-c", code).stdout == "7\n"
    assert os.environ["PYTHONPATH"].endswith("/elsewhere")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "no such folder or no .whl file"),
        (lambda folder: folder.mkdir(), "no such folder or no .whl file"),
        (lambda folder: wheel(folder, "fast-1.0-cp311-cp311-linux_x86_64.whl", {}), "has compiled code"),
    ],
)
def test_a_folder_that_does_not_help_is_one_line(tmp_path, capsys, make, words):
    make(tmp_path / "wheels")
    assert main(["--wheels", str(tmp_path / "wheels"), "--out", str(tmp_path / "x.tar.gz")]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and not (tmp_path / "x.tar.gz").exists()


def test_a_missing_package_and_a_missing_gpu_are_one_line(tmp_path, capsys, monkeypatch):
    assert main(["--out", str(tmp_path / "x.tar.gz")]) == 2
    assert capsys.readouterr().err == (
        "error: no CUDA GPU is visible; --dry runs the same code on a tiny model and the CPU\n"
    )
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None if name == "hydra" else object())
    assert main(["--out", str(tmp_path / "x.tar.gz")]) == 2
    assert "the package hydra is not installed; give a folder of wheels with --wheels DIR" in capsys.readouterr().err


# -- the summary -----------------------------------------------------------------------------------------------------


def record(measured, reserved, status="ok", median=0.1):
    peaks = {"peak_allocated_bytes": measured, "peak_reserved_bytes": reserved}
    return {"status": status, "memory": {"measured": peaks}, "time": {"median_s": median}, "environment": {}}


def rows():
    base = {"overrides": [], "config": None, "forecastable": True, "why": None, "status": "ok"}
    standard = {"stage": "table1", "name": "standard_global_clip", "record": record(50 * 10**9, 52 * 10**9)}
    sonar = {"stage": "table1", "name": "sonar", "record": record(40 * 10**9, 41 * 10**9, median=0.09)}
    plain = {"stage": "table1", "name": "standard_no_expert_clip", "record": record(50 * 10**9, 51 * 10**9)}
    forecasts = [record(50_500_000_000, None), record(39 * 10**9, 42 * 10**9), None]
    return [{**base, **row, "forecast": f} for row, f in zip([standard, sonar, plain], forecasts)]


def test_the_error_is_the_forecast_over_the_measurement():
    found = {(r["name"], r["kind"]): r for r in summary.memory_rows(rows()) if r["phase"] == "measured"}
    assert found["standard_global_clip", "allocated"]["error_percent"] == pytest.approx(1.0)
    assert found["sonar", "allocated"]["error_percent"] == pytest.approx(-2.5)
    assert found["standard_global_clip", "reserved"]["error_percent"] is None  # never 0 for what is not there
    assert ("standard_no_expert_clip", "allocated") not in found
    assert {r["name"]: r["ratio"] for r in summary.time_rows(rows())} == {
        "standard_global_clip": 1.0,
        "sonar": pytest.approx(0.9),
        "standard_no_expert_clip": 1.0,
    }
    told = summary.text(rows(), {"name": "Fake GPU"})
    assert "+1.00%" in told and "-2.50%" in told and "90.0 ms   0.900" in told


def test_caps_of_a_smaller_model_lie_between_and_below_what_it_took():
    assert between(rows()) == [(46.0, "adamw"), (pytest.approx(36.9), "adamw")]
    assert between(rows()[:1]) == []


def test_the_tar_file_holds_records_and_no_weights(tmp_path):
    work = tmp_path / "work"
    arm = work / "runs" / "gpu_check" / "paper" / "arm"
    (arm / "checkpoint").mkdir(parents=True)
    (work / "site").mkdir()
    for name in ("record.json", "log.txt", "weights.safetensors", ".lock", "checkpoint/state.pt", "checkpoint/x.json"):
        (arm / name).write_text("{}")
    (work / "site" / "hydra.py").write_text("")
    summary.write(work, tmp_path / "deep" / "out.tar.gz", rows(), {"name": "x", "nothing": float("nan")})
    with tarfile.open(tmp_path / "deep" / "out.tar.gz") as archive:
        names = sorted(archive.getnames())
    inside = "gpu_check/runs/gpu_check/paper/arm"
    assert names == [f"{inside}/log.txt", f"{inside}/record.json", "gpu_check/summary.json", "gpu_check/summary.txt"]
    data = json.loads((work / "summary.json").read_text(), parse_constant=lambda token: pytest.fail(token))
    assert data["facts"]["nothing"] is None and len(data["arms"]) == 3


def test_the_whole_script_runs_on_a_cpu_without_datasets(tmp_path):
    """Measured arm, its forecast, tables and tar file, in a process where importing ``datasets`` raises."""
    (tmp_path / "datasets.py").write_text("raise ImportError('datasets was imported')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "sonar_repro.gpu_check", "--dry", "--only", "per_expert", "--out", "out.tar.gz"]
    done = processes.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sonar_per_expert: ok" in done.stdout and "kernels against eager" in done.stdout
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    found = {r["arm"]["scale"]: r for _, r in records.iterate(tmp_path / "gpu_check" / "runs")}
    assert set(found) == {"paper", "forecast"} and {r["status"] for r in found.values()} == {"ok"}
    assert found["paper"]["environment"]["parity"]["compared"]
    assert found["paper"]["counts"]["optimizer_calls_per_step"] == 2 * 2 * 8 + 1
    load = [r["memory"]["load"]["peak_allocated_bytes"] for r in found.values()]
    assert load[0] == load[1]  # tracker and forecast count the same weights
