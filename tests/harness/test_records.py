"""Records: strict JSON, atomic, validated on the way in."""

import json
import math

import pytest

from sonar_repro import records
from sonar_repro.errors import UserError


def a_record(**more):
    base = {"schema_version": records.SCHEMA_VERSION, "arm_id": "a", "arm": {}, "fingerprint": "f", "status": "ok"}
    return {**base, **more}


def test_round_trip_is_exact(tmp_path):
    path = tmp_path / "e" / "smoke" / "a" / "record.json"
    record = a_record(memory={"measured": {"peak_allocated_bytes": 2**60 + 1}}, loss={"train": [0.1, None]}, text="ü")
    records.write(path, record)
    assert records.load(path) == record


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_becomes_null_with_a_reason(tmp_path, bad):
    path = tmp_path / "record.json"
    records.write(path, a_record(loss={"train": [1.0, bad], "deep": ({"x": bad},)}))
    text = path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    loaded = records.load(path)
    assert loaded["loss"] == {"train": [1.0, None], "deep": [{"x": None}]}
    assert "2 values" in loaded["notes"][0]


def test_a_failed_write_leaves_the_old_record_and_no_litter(tmp_path):
    path = tmp_path / "record.json"
    records.write(path, a_record(n=1))
    with pytest.raises(TypeError):
        records.write(path, a_record(n=object()))
    assert records.load(path)["n"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"status": "ok"}',
        json.dumps(a_record())[:-9],
        json.dumps(a_record(x=1)).replace("1}", "NaN}"),
    ],
)
def test_damaged_files_are_named(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(records.DamagedRecord, match=str(path)):
        records.load(path)


def test_unknown_status_is_damage_and_another_major_is_refused(tmp_path):
    path = tmp_path / "record.json"
    records.write(path, a_record(status="fine"))
    with pytest.raises(records.DamagedRecord, match="status=fine"):
        records.load(path)
    records.write(path, a_record(schema_version="2.0"))
    with pytest.raises(UserError, match="schema_version=2.0"):
        records.load(path)


def test_reference_records_never_count_as_recorded(tmp_path):
    for folder in ("reference/card/table1/smoke/a", "table1/smoke/b"):
        records.write(tmp_path / folder / "record.json", a_record(fingerprint="same"))
    found = records.find_by_fingerprint(tmp_path, "same", "smoke")
    assert found is not None and found[0].parent.name == "b"
    (tmp_path / "table1/smoke/b/record.json").unlink()
    assert records.find_by_fingerprint(tmp_path, "same", "smoke") is None
