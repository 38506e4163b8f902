"""One OLMoE forecast arm after imports: wall time, host memory, how both grow with layers, and what its time costs."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable

CODE = """
import json, resource, sys, tempfile, time
from pathlib import Path
from sonar_repro.harness.compose import compose
from sonar_repro.harness.worker import Reporter
from sonar_repro.forecast import task as forecast
overrides = ["scale=forecast", "backend=sonicmoe", "threads=1", f"model.architecture.num_hidden_layers={sys.argv[1]}"]
config = compose(*overrides)
import transformers.models.olmoe.modeling_olmoe
if sys.argv[2:] == ["memory_only"]:
    class Nothing:
        step = micro_batch = end = __call__ = __exit__ = lambda self, *a, **k: None
        __enter__ = lambda self: self
    forecast.StepRecorder, forecast.time_section = Nothing, lambda *a: None
start, cpu = time.perf_counter(), time.process_time()
forecast.run(config, Reporter(None, Path(tempfile.mkdtemp())))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
spent = {"wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
print(json.dumps({**spent, "host_peak_gb": peak / 1e9}))
"""


def run() -> list[dict]:
    """Targets: 16 layers under 10 s and under 3 GB of host memory; CPU time linear in layers."""
    import json

    def measure(*arguments: str) -> dict:
        done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    rows = [{"layers": layers, **measure(str(layers))} for layers in (4, 8, 16, 32)]
    for row in rows:
        row["cpu_s_per_layer"] = row["cpu_s"] / row["layers"]
    return [*rows, time_share(measure)]


def time_share(measure: Callable[..., dict], repeats: int = 3) -> dict:
    """CPU time that the step-time forecast adds to a memory forecast of 16 layers; target: under a fifth.

    The median of paired ratios, each pair one behind the other.
    """
    ratios = [measure("16")["cpu_s"] / measure("16", "memory_only")["cpu_s"] - 1 for _ in range(repeats)]
    return {"layers": 16, "time_forecast_adds": statistics.median(ratios), "pairs": ratios}
