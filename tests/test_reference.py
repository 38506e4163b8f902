"""Committed forecasts are what this code says: one arm a model is run again and its bytes are compared."""

import json
from pathlib import Path

import pytest

from sonar_repro import records
from sonar_repro.config.schema import from_dict
from sonar_repro.forecast import task as forecast
from sonar_repro.harness.worker import Reporter

REFERENCE = Path(__file__).parents[1] / "runs" / "reference" / "forecast"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["olmoe", "granite"])
def test_a_committed_forecast_reproduces_to_the_byte(model, tmp_path):
    found = list(REFERENCE.glob(f"table1/forecast/{model}-sonicmoe-sonar-*/record.json"))
    assert len(found) == 1
    committed = records.load(found[0])
    config = from_dict(committed["config"])
    config.threads = 1
    report = Reporter(None, tmp_path)
    forecast.run(config, report)
    for phase in ("load", "warmup", "measured"):
        assert report.sections["memory"][phase] == committed["memory"][phase]
    assert report.sections["model"] == committed["model"]
    assert json.loads(json.dumps(report.sections["time"])) == committed["time"]


def test_committed_records_are_readable_and_name_no_machine():
    found = list(REFERENCE.parent.glob("**/record.json"))
    assert len(found) >= 16
    for path in found:
        record = records.load(path)
        assert record["status"] in records.FINAL, path
        assert "runs_dir" not in record["config"], path
        assert "Traceback" not in path.read_text(encoding="utf-8"), path  # it would name this machine's folders
