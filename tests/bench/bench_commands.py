"""Wall time of what a user types first: help, a config error, Table 1 small, and its forecast with two workers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time


def _timed(*argv: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "sonar_repro", *argv], capture_output=True, check=False)
    return time.perf_counter() - start


def run() -> list[dict]:
    """Best of three for the instant commands, once for the sweeps."""
    rows = []
    for name, argv, target in (("help", ["--help"], 1.0), ("config error", ["model=olmo"], 1.0)):
        rows.append({"command": name, "wall_s": min(_timed(*argv) for _ in range(3)), "target_s": target})
    with tempfile.TemporaryDirectory() as runs:
        wall = _timed("+experiment=table1", f"runs_dir={runs}")
        rows.append({"command": "table1 smoke, 16 arms", "wall_s": wall, "target_s": 120.0})
        wall = _timed("+experiment=table1", f"runs_dir={runs}")
        rows.append({"command": "table1 smoke again, all recorded", "wall_s": wall, "target_s": None})
        two = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "threads=1"]
        wall = _timed("+experiment=table1", "scale=forecast", *two, f"runs_dir={runs}")
        rows.append({"command": "table1 forecast, 16 arms, two workers", "wall_s": wall, "target_s": 120.0})
    return rows
