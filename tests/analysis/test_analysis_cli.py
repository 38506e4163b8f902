"""The commands as users run them: exit codes, one-line errors, and what is never imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest
from analysis_helpers import FOUR, SONAR, G, arm
from synthetic import put

from analysis.__main__ import main
from analysis.conf import cards, smallest
from analysis.metrics import METRICS, metric
from sonar_repro.errors import UserError


def run(*arguments: str, **kwargs) -> subprocess.CompletedProcess:
    return processes.python("-m", "analysis", *arguments, **kwargs)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for m in FOUR:
        put(tmp_path / "runs", arm("smoke", method=m))
    return tmp_path / "runs"


def test_analysis_imports_neither_torch_nor_hydra(runs: Path, tmp_path: Path):
    code = (
        "import sys; from analysis.__main__ import main\n"
        f"where = ['--runs', {str(runs)!r}, '--out', {str(tmp_path / 'o')!r}]\n"
        "for c in ('tables', 'figures', 'claims', 'report'): main([c, *where])\n"
        "print('LOADED', sorted(m for m in ('torch', 'hydra', 'transformers', 'datasets') if m in sys.modules))"
    )
    done = processes.python("-c", code, check=True)
    assert done.stdout.strip().endswith("LOADED []"), done.stdout[-300:]


def test_tables_writes_three_files_and_prints_on_demand(runs: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"
    assert (
        main(["tables", "--runs", str(runs), "--out", str(out), "--table", "table1", "--scale", "smoke", "--print"])
        == 0
    )
    assert sorted(p.name for p in out.iterdir()) == ["table1_smoke.csv", "table1_smoke.md", "table1_smoke.tex"]
    assert "Sonar-MoE" in capsys.readouterr().out


def test_a_refused_comparison_ends_with_2_and_one_line_and_the_other_tables_are_written(
    runs: Path, tmp_path: Path, capsys
):
    other = arm("smoke", "table8", method=SONAR)
    other["data"]["sha256"] = "f" * 64
    put(runs, other), put(runs, arm("smoke", "table8", method=G))
    assert main(["tables", "--runs", str(runs), "--out", str(tmp_path / "out")]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: Table 8") and "saw different data" in errors[0]
    assert "Sonar-MoE" in (tmp_path / "out/table1_smoke.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tables", "--table", "tabel1"), "--table tabel1: unknown; choose table1"),
        (("tables", "--scale", "huge"), "--scale huge: unknown; choose smoke, forecast, paper"),
        (("figures", "--figure", "figure9"), "--figure figure9: unknown"),
    ],
)
def test_a_mistake_ends_with_2_and_one_line(runs: Path, tmp_path: Path, capsys, arguments, said: str):
    assert main([*arguments, "--runs", str(runs), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and "Traceback" not in error


def test_an_output_that_cannot_be_written_is_named(runs: Path, tmp_path: Path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["tables", "--runs", str(runs), "--out", str(tmp_path / "file/out")]) == 2
    assert "--out" in capsys.readouterr().err


def test_no_records_is_no_failure_and_says_what_to_run(tmp_path: Path):
    done = run("tables", "--runs", str(tmp_path / "none"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0 and "+experiment=table1" in done.stderr


def test_a_damaged_record_is_named_on_stderr_and_nothing_fails(runs: Path, tmp_path: Path):
    path = put(runs, arm("smoke", "table3", method=SONAR))
    path.write_text("{")
    done = run("tables", "--runs", str(runs), "--out", str(tmp_path / "out"))
    assert done.returncode == 0 and str(path) in done.stderr and "Traceback" not in done.stderr


def test_claims_are_written_for_people_and_for_tools(runs: Path, tmp_path: Path, capsys):
    assert main(["claims", "--runs", str(runs), "--out", str(tmp_path / "out"), "--paper", "sonar"]) == 0
    rows = json.loads((tmp_path / "out/claims.json").read_text(encoding="utf-8"))
    assert {r["paper"] for r in rows} == {"sonar"} and {r["verdict"] for r in rows} <= {
        "holds",
        "holds (forecast)",
        "forecast disagrees",
        "fails",
        "not measured",
    }
    assert "not measured" in capsys.readouterr().out and (tmp_path / "out/claims.md").exists()


def test_a_closed_pipe_is_no_traceback(runs: Path, tmp_path: Path):
    command = f"{sys.executable} -m analysis tables --print --runs {runs} --out {tmp_path / 'out'} | head -c 10"
    done = processes.run(["bash", "-c", command])
    assert "Traceback" not in done.stderr


def test_an_unknown_metric_names_near_ones():
    with pytest.raises(UserError, match="peak_allocated_gb"):
        metric("peak_alocated_gb")
    assert all(m.unit in ("GB", "ms", "%", "") and m.direction in ("lower", "higher", "none") for m in METRICS.values())


def test_the_smallest_card_holds_the_peak_with_its_context():
    for card in cards():
        found = smallest(card.usable_gb)
        assert found.usable_gb == card.usable_gb
        assert smallest(card.usable_gb + 1e-6) is None or smallest(card.usable_gb + 1e-6).usable_gb > card.usable_gb
    assert smallest(10_000) is None and len(cards()) >= 1


# -- hostile environments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
@pytest.mark.parametrize("command", [("tables", "--print"), ("claims",), ("figures", "--figure", "figure4")])
def test_no_stdout_encoding_loses_a_table_or_a_minus(runs: Path, tmp_path: Path, encoding: str, command):
    where = ("--runs", str(runs), "--out", str(tmp_path / "out"))
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-m", "analysis", *command, *where], capture_output=True, env=environment)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr[-500:]
    if command[0] == "tables":
        text = done.stdout.decode(encoding)
        assert "-21.6%" in text if encoding != "utf-8" else "\u221221.6%" in text  # the paper's change


@pytest.mark.parametrize(
    "backend", ["module://matplotlib_inline.backend_inline", "TkAgg", "nosuch", "module://nowhere.at_all", ""]
)
def test_a_notebooks_or_a_broken_backend_does_not_stop_a_figure(tmp_path: Path, backend: str):
    for size in (2, 4):
        for method in FOUR:
            put(tmp_path / "runs", arm("smoke", "figure4", method=method, batch_size=size))
    where = ("--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"))
    environment = {**os.environ, "MPLBACKEND": backend}
    done = subprocess.run(
        [sys.executable, "-m", "analysis", "figures", "--figure", "figure4", *where],
        capture_output=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert (tmp_path / "out/figure4_smoke.png").stat().st_size > 1000


def test_a_closed_pipe_loses_no_table(runs: Path, tmp_path: Path):
    """All files are there although nobody read what was printed, and nothing is said about the pipe."""
    where = f"--runs {runs} --out {tmp_path / 'out'}"
    command = f"{sys.executable} -m analysis tables --print {where} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert {"table1_smoke.md", "table1_smoke.tex", "table1_smoke.csv"} <= {p.name for p in (tmp_path / "out").iterdir()}
