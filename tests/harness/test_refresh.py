"""Committed forecasts are run again in place, and what may not be replaced stays."""

import json
import shutil
from pathlib import Path

import pytest

from sonar_repro import records, refresh
from sonar_repro.errors import UserError

REFERENCE = Path(__file__).parents[2] / "runs" / "reference" / "forecast"
SMALL = "mesh_table1/forecast/nanowhale-grouped_mm-standard_no_clip-mesh_b-bs8-s42-A2/record.json"


@pytest.fixture
def copied(tmp_path):
    path = tmp_path / "reference" / SMALL
    path.parent.mkdir(parents=True)
    shutil.copy(REFERENCE / SMALL, path)
    return path


def test_a_stale_number_is_made_anew_and_named(copied, monkeypatch, capsys):
    committed = records.load(copied)
    stale = json.loads(json.dumps(committed))
    stale["time"]["forecast"]["step_ms"] = 1.0
    records.write(copied, stale)
    assert refresh.main([str(copied.parents[2])]) == 0
    assert capsys.readouterr().out == f"{copied.parent.name}: time\n"
    again = records.load(copied)
    for key in ("arm_id", "arm", "config", "memory", "time", "model", "fingerprint"):
        assert again[key] == committed[key], key


def test_an_arm_that_ends_in_another_way_is_left_as_it_was(copied, monkeypatch, capsys):
    before = copied.read_bytes()
    monkeypatch.setattr(refresh, "run", lambda arm: {"status": "failed"})
    assert refresh.main([str(copied.parents[2])]) == 1
    assert "left as it was" in capsys.readouterr().out
    assert copied.read_bytes() == before


def test_no_traceback_is_kept(copied, monkeypatch):
    old = records.load(copied)
    monkeypatch.setattr(
        refresh,
        "run",
        lambda arm: {**old, "error": {"message": "m", "traceback": "File /home/me/x.py"}, "outcome": "run"},
    )
    assert refresh.refresh(copied, str(copied.parents[3])) == ["error"]
    assert "/home/me" not in copied.read_text()


def test_measurements_and_empty_folders_are_refused(copied, tmp_path):
    record = records.load(copied)
    record["config"]["scale"]["name"] = "paper"
    records.write(copied, record)
    with pytest.raises(UserError, match="scale=paper is a measurement"):
        refresh.main([str(copied.parents[2])])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no record.json"):
        refresh.main([str(tmp_path / "empty")])


@pytest.mark.parametrize("part", ["0/2", "3/2", "x", "1", "1/0"])
def test_a_part_that_does_not_exist_is_refused(part, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_code:
        refresh.main([str(tmp_path), "--part", part])
    assert exit_code.value.code == 2 and part in capsys.readouterr().err


def test_parts_cover_every_record_once(tmp_path, monkeypatch):
    for name in "abcde":
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").touch()
    seen = []
    monkeypatch.setattr(refresh, "refresh", lambda path, runs_dir: seen.append(path.parent.name) or [])
    for part in ("1/2", "2/2"):
        refresh.main([str(tmp_path), "--part", part])
    assert sorted(seen) == list("abcde")
