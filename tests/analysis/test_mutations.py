"""Every kind of damage to a record: nothing crashes, nothing is written outside --out, the other records count."""

import contextlib
import copy
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from analysis_helpers import SONAR, G, arm
from synthetic import put, record

from analysis.__main__ import main
from analysis.records import load

VALUES = [
    None, True, False, 0, -1, 1, 10**18, -(10**18), 0.5, -0.5, 1e99, "", "text", "a/b", "../x", "..", ".", "\n", "\x00",
    "é" * 300, "<b>|&$%", [], [1], [None], [[]], ["a"], {}, {"a": 1}, {"a": {"b": [None]}},
]  # fmt: skip
RAW = ["1" * 5000, "-" + "9" * 5000, "1" + "0" * 400, "1e999", "NaN", "-Infinity", '"\\ud800"', "[" * 3000]
RAW += ["[" * 200 + "]" * 200, '{"a":' * 100 + "1" + "}" * 100]


def kinds() -> list[dict]:
    """Records of each shape: training, forecast with everything, comparison, evaluation, MESH with roles."""
    forecast = arm("forecast", "fits", method=SONAR, gpu="h100")
    forecast["time"]["forecast"] |= {
        "step_ms": 100.0,
        "filled": {"step_ms": 120.0},
        "cards": {"h100": {"step_ms": 90.0}},
    }
    forecast["time"]["forecast"]["sensitivity"] = {"bandwidth": {"low": 90.0, "high": 110.0}}
    mesh = record({"model": "nanowhale", "optimizer": "mesh"}, "smoke", "mesh_table1")
    mesh |= {
        "roles": [{"role": "routed", "rule": "mesh", "tensors": 8, "parameters": 10, "state_bytes": 0, "state": "H"}]
    }
    mesh |= {"hidden_momentum": {"cosine": 1.0, "relative_error": 0.0, "prepare_calls_per_step": 1.0}}
    diagnosis = record({"model": "nanowhale", "optimizer": "direct"}, "smoke", "mesh_diagnosis")
    diagnosis |= {"diagnosis": {"load": {"idle": 0.0}, "gate": {"effective_share_of_tokens": 0.9}}}
    return [
        arm("smoke", method=SONAR),
        arm("paper", "figure2", method=SONAR),
        forecast,
        record({"task": "compare_weights", "method": "sonar_per_expert_vs_sonar"}, "smoke", "table4"),
        record({"task": "downstream", "method": "start"}, "paper", "table2"),
        mesh,
        diagnosis,
        arm("smoke", method=G) | {"status": "failed", "error": {"type": "X", "message": "boom", "phase": "train"}},
    ]


def places(value, where: tuple = ()) -> Iterator[tuple]:
    """Paths of every value of a record; of a long list only the first item."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*where, key)
            yield from places(inner, (*where, key))
    elif isinstance(value, list) and value:
        yield (*where, 0)
        yield from places(value[0], (*where, 0))


def changed(made: dict, where: tuple, value) -> dict:
    """A copy with another value at one path."""
    made = copy.deepcopy(made)
    inner = made
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    return made


def run_all(root: Path, out: Path) -> tuple[str, set[int]]:
    """Every command over the records; what was said on stderr, and the exit codes. A crash raises."""
    said, codes = io.StringIO(), set()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        for command in (("tables", "--print"), ("claims",)):
            codes.add(main([*command, "--runs", str(root), "--out", str(out)]))
    return said.getvalue(), codes


def files(root: Path) -> set[Path]:
    return {p.relative_to(root) for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("n", range(len(kinds())))
def test_every_value_of_a_record_may_be_anything(tmp_path: Path, n: int):
    """Many mutants are read at once, each in its own folder: those that fit are counted, the others named; none ends a
    command, and nothing appears outside --out."""
    good, mutants = kinds()[n], []
    for i, where in enumerate(places({k: v for k, v in good.items() if k != "config"})):
        for j, value in enumerate(VALUES):
            if (i + j) % 4 == n % 4:  # a quarter of all pairs for each kind of record: seconds, and every value and key
                mutants.append(changed(good, where, value))
    runs, out = tmp_path / "root/runs", tmp_path / "root/out"
    put(runs, arm("smoke", method=G))
    for i, mutant in enumerate(mutants):
        folder = runs / "mutants" / "smoke" / f"m{i}"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(mutant), encoding="utf-8")
    before = files(tmp_path)
    said, codes = run_all(runs, out)
    assert codes <= {0, 2} and "Traceback" not in said and len(mutants) > 100
    outside = {p for p in files(tmp_path) - before if not p.is_relative_to(Path("root/out"))}
    assert outside == set()
    loaded = load(runs, warn=lambda line: None)
    assert len(loaded.records) + len(loaded.damaged) == len(mutants) + 1 and loaded.damaged
    assert all("\n" not in reason for _, reason in loaded.damaged)


@pytest.mark.parametrize("text", RAW, ids=range(len(RAW)))
@pytest.mark.parametrize("key", ["schema_version", "seed", "peak_allocated_bytes", "median_s", "heldout", "method"])
def test_values_that_json_itself_stumbles_over_are_named(tmp_path: Path, text: str, key: str):
    good = json.dumps(arm("smoke", method=SONAR))
    put(tmp_path / "runs", arm("smoke", method=G))
    path = put(tmp_path / "runs", arm("smoke", method=SONAR))
    start = good.index(f'"{key}": ') + len(key) + 4
    end = min(i for i in (good.find(",", start), good.find("}", start)) if i > 0)
    path.write_text(good[:start] + text + good[end:], encoding="utf-8")
    said, codes = run_all(tmp_path / "runs", tmp_path / "out")
    assert codes == {0} and str(path) in said and "Traceback" not in said
    assert (tmp_path / "out/table1_smoke.csv").is_file()


@pytest.mark.parametrize("version", ["²", "١.0", "1.", "", "1.0.0.0.0", "9" * 30])
def test_a_version_is_plain_digits(tmp_path: Path, version: str):
    put(tmp_path / "runs", arm("smoke", method=SONAR) | {"schema_version": version})
    runs = load(tmp_path / "runs", warn=lambda line: None)
    assert not runs.records and "not a version" in runs.damaged[0][1]


def special(folder: Path, kind: str) -> None:
    """Something in place of record.json that is no file of ours."""
    path = folder / "record.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "link to nothing":
        path.symlink_to(folder / "nowhere")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop of folders":
        (folder / "again").symlink_to(folder.parent)
        path.write_text("{")
    elif kind == "reference to a pipe":
        os.mkfifo(folder / "pipe")
        path.write_text(json.dumps({"arm": {"experiment": "table3"}, "reference": {"record": "pipe"}}))
    elif kind == "reference to a NUL":
        path.write_text(json.dumps({"arm": {"experiment": "table3"}, "reference": {"record": "a\x00b"}}))
    elif kind == "reference as text":
        path.write_text(json.dumps(arm("smoke") | {"reference": "text"}))
    elif kind == "reference that escapes":
        made = {"arm": {"experiment": "../../x"}, "reference": {"record": "../one/record.json"}}
        (folder.parent / "one").mkdir()
        (folder.parent / "one/record.json").write_text(json.dumps(arm("smoke", method=SONAR)))
        path.write_text(json.dumps(made))


SPECIAL = ["pipe", "folder", "link to itself", "link to nothing", "device", "loop of folders", "reference to a pipe"]
SPECIAL += ["reference to a NUL", "reference as text", "reference that escapes"]


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_neither_hangs_nor_crashes(tmp_path: Path, kind: str):
    put(tmp_path / "runs", arm("smoke", method=G))
    folder = tmp_path / "runs/table1/smoke/odd"
    folder.mkdir()
    special(folder, kind)
    said, codes = run_all(tmp_path / "runs", tmp_path / "out")
    assert codes == {0} and "skipped damaged record" in said and "Traceback" not in said
    assert (tmp_path / "out/table1_smoke.csv").is_file() and not (tmp_path / "x_smoke.csv").exists()
