"""Tables, figures and report from 500 synthetic records (target: under 10 s)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run() -> list[dict]:
    """Wall time of each command over the same records."""
    from analysis.synthetic import fill

    with tempfile.TemporaryDirectory() as folder:
        count = fill(Path(folder) / "runs", 500)
        rows, total = [], 0.0
        for command in ("tables", "figures", "report"):
            start = time.perf_counter()
            argv = [sys.executable, "-m", "analysis", command, "--runs", f"{folder}/runs", "--out", f"{folder}/out"]
            subprocess.run(argv, capture_output=True, check=True)
            wall = time.perf_counter() - start
            total += wall
            rows.append({"command": command, "records": count, "wall_s": wall})
    return [*rows, {"command": "all three", "records": count, "wall_s": total, "target_s": 10.0}]
