"""Runs the stages with the harness's own runner, keeps what came of each arm, and forecasts the same arms."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..config.schema import Config
from ..harness.compose import compose
from ..harness.memory_check import forecast_config
from ..harness.runner import forget_weights, make_arm, run
from .arms import Planned, Stage
from .clock import Clock


class Session:
    """The state of one check.

    Attributes:
        rows: one dict an arm: stage, name, status, record (or None), seconds, and why it was skipped or failed.
    """

    def __init__(self, runs_dir: Path, clock: Clock, say: Callable[[str], None] = print) -> None:
        self.runs_dir, self.clock, self.say = runs_dir, clock, say
        self.rows: list[dict[str, Any]] = []

    def run_stage(self, stage: Stage) -> None:
        """Run what fits into the time that is left; the rest leaves a row with the reason."""
        self.say(f"\n{stage.title}  ({self.clock.spent():.0f} s)")
        with ThreadPoolExecutor(stage.workers) as pool:
            rows = list(pool.map(lambda planned: self.run_arm(planned, stage), stage.arms))
        self.rows += rows
        arms = [make_arm(row["config"], row["overrides"]) for row in rows if row["config"] is not None]
        forget_weights(arms)

    def run_arm(self, planned: Planned, stage: Stage) -> dict[str, Any]:
        """One arm to its record."""
        row: dict[str, Any] = {"stage": planned.stage, "name": planned.name, "config": None, "record": None}
        row |= {"overrides": [*planned.overrides, f"runs_dir={self.runs_dir}"], "forecast": None}
        row["forecastable"] = stage.forecast
        why = planned.why_not or self.clock.why_skip(stage.name, stage.expected_s)
        if why:
            self.say(f"  {planned.name}: skipped, {why}")
            return {**row, "status": "skipped", "why": why}
        started = time.monotonic()
        config = compose(*row["overrides"])
        record = run(make_arm(config, row["overrides"]))
        seconds = time.monotonic() - started
        self.clock.took(stage.name, seconds)
        error = record["error"] or {}
        why = (
            f"{error.get('type')} in {error.get('phase')}: {str(error.get('message')).splitlines()[0]}" if error else ""
        )
        self.say(f"  {planned.name}: {record['status']} in {seconds:.1f} s  {why[:160]}")
        return {**row, "status": record["status"], "why": why or None, "config": config, "record": record}

    def forecast_all(self, workers: int, capability: int) -> None:
        """Forecast every arm that was measured, a cap included; arms of one fingerprint once."""
        wanted = [row for row in self.rows if row["config"] is not None and row["forecastable"]]
        self.say(f"\nforecasts of {len(wanted)} arms  ({self.clock.spent():.0f} s)")
        with ThreadPoolExecutor(workers) as pool:
            for row, record in zip(wanted, pool.map(lambda row: self._forecast(row["config"], capability), wanted)):
                row["forecast"] = record

    def _forecast(self, config: Config, capability: int) -> dict[str, Any]:
        forecast = forecast_config(config, capability)
        forecast.memory_cap_gb, forecast.runs_dir = config.memory_cap_gb, str(self.runs_dir)
        return run(make_arm(forecast))
