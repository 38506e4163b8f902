"""Loading records: damaged files are named, skipped and never counted; the rest is labelled and ordered."""

import json
from pathlib import Path

import pytest
from analysis_helpers import G, arm
from synthetic import put

from analysis.records import load
from sonar_repro.errors import UserError


def damaged(kind: str) -> bytes:
    good = arm(method=G)
    text = json.dumps(good)
    if kind == "truncated":
        return text[: len(text) // 2].encode()
    if kind == "empty":
        return b""
    if kind in ("NaN", "Infinity", "-Infinity", "1e999"):
        return text.replace('"median_s": ', f'"median_s": {kind}, "was": ', 1).encode()
    if kind == "not UTF-8":
        return text.encode() + b"\xff\xfe"
    if kind == "binary":
        return bytes(range(256))
    if kind == "list":
        return b"[1, 2]"
    if kind == "same key twice":
        return text.replace('{"schema_version"', '{"status": "oom", "schema_version"', 1).encode()
    if kind == "deep":
        return b"[" * 100_000
    if kind.startswith("no "):
        good.pop(kind[3:])
    elif kind == "unknown status":
        good["status"] = "fine"
    elif kind == "section of a wrong type":
        good["memory"] = [1, 2, 3]
    elif kind == "arm without scale":
        good["arm"].pop("scale")
    elif kind == "version is no number":
        good["schema_version"] = "next"
    elif kind == "arm is text":
        good["arm"] = "olmoe"
    else:
        raise AssertionError(kind)
    return json.dumps(good).encode()


KINDS = ["truncated", "empty", "NaN", "Infinity", "-Infinity", "1e999", "not UTF-8", "binary", "list", "deep"]
KINDS += [f"no {k}" for k in ("schema_version", "arm_id", "arm", "fingerprint", "status")]
KINDS += [f"no {k}" for k in ("memory", "time", "loss", "counts", "data")]
KINDS += ["same key twice", "unknown status", "section of a wrong type", "arm without scale", "version is no number"]
KINDS += ["arm is text"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named_and_skipped_and_the_others_count(tmp_path: Path, kind: str):
    put(tmp_path, arm(method=G))
    path = put(tmp_path, arm(method="sonar"))
    path.write_bytes(damaged(kind))
    warnings: list[str] = []
    runs = load(tmp_path, warn=warnings.append)
    assert [r.arm["method"] for r in runs.records] == [G]
    assert [p for p, _ in runs.damaged] == [path]
    assert len(warnings) == 1 and str(path) in warnings[0] and "\n" not in warnings[0]


def test_a_failed_arm_needs_none_of_the_sections_of_an_ok_one(tmp_path: Path):
    made = arm(method=G)
    made |= {"status": "crashed", "error": {"type": "Killed", "message": "signal 9", "phase": "train"}}
    for section in ("memory", "time", "loss", "counts", "data", "environment", "model"):
        made[section] = None
    put(tmp_path, made)
    assert [r.status for r in load(tmp_path).records] == ["crashed"]


def test_another_schema_major_is_kept_by_name_and_not_readable(tmp_path: Path):
    put(tmp_path, arm(method=G) | {"schema_version": "2.0", "status": "splendid"})
    put(tmp_path, arm(method="sonar") | {"schema_version": "1.7"})
    runs = load(tmp_path)
    assert {r.arm["method"]: r.readable for r in runs.records} == {G: False, "sonar": True}
    assert not runs.damaged


def test_own_records_come_first_and_reference_sets_are_labelled(tmp_path: Path):
    put(tmp_path, arm(method=G), label="h200")
    put(tmp_path, arm(method=G), label="forecast")
    put(tmp_path, arm(method="sonar"))
    runs = load(tmp_path)
    assert [r.label for r in runs.records] == [None, "forecast", "h200"]
    assert runs.labels() == ["forecast", "h200"]


def test_a_reference_to_another_record_stands_in_under_its_own_experiment(tmp_path: Path):
    target = put(tmp_path, arm(method="sonar"))
    pointer = tmp_path / "table3/forecast/same/record.json"
    pointer.parent.mkdir(parents=True)
    relative = str(target.relative_to(tmp_path))
    pointer.write_text(json.dumps({"arm": {"experiment": "table3"}, "reference": {"record": relative}}))
    lost = tmp_path / "table5/forecast/lost/record.json"
    lost.parent.mkdir(parents=True)
    lost.write_text(json.dumps({"arm": {"experiment": "table5"}, "reference": {"record": "nowhere/record.json"}}))
    runs = load(tmp_path, warn=lambda line: None)
    assert sorted(r.experiment for r in runs.records) == ["table1", "table3"]
    assert "nowhere/record.json" in runs.damaged[0][1]


def test_no_folder_is_no_record_and_a_file_is_a_mistake(tmp_path: Path):
    assert load(tmp_path / "absent").records == []
    file = tmp_path / "runs"
    file.write_text("")
    with pytest.raises(UserError, match="--runs"):
        load(file)


def test_null_is_no_number(tmp_path: Path):
    made = arm(method=G)
    made["time"]["median_s"] = None
    put(tmp_path, made)
    assert load(tmp_path).records[0].number("time.median_s") is None


@pytest.mark.parametrize("value", ["0.3", True, [1], {}, -1.0])
def test_a_value_of_a_wrong_type_is_named_and_the_record_left_out(tmp_path: Path, value):
    made = arm(method=G)
    made["time"]["median_s"] = value
    put(tmp_path, made)
    runs = load(tmp_path, warn=lambda line: None)
    assert runs.records == [] and "time.median_s is not" in runs.damaged[0][1]
