"""One OLMoE forecast arm after imports: wall time, host memory, and how both grow with layers."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import json, resource, sys, tempfile, time
from pathlib import Path
from hydra import compose, initialize_config_dir
from sonar_repro import config as configs
from sonar_repro.child import Reporter
from sonar_repro.tasks import forecast
configs.register()
overrides = ["scale=forecast", "backend=sonicmoe", "threads=1", f"model.architecture.num_hidden_layers={sys.argv[1]}"]
with initialize_config_dir(str(configs.conf_dir()), version_base="1.3"):
    config = configs.resolve(compose("config", overrides=overrides))
import transformers.models.olmoe.modeling_olmoe
start, cpu = time.perf_counter(), time.process_time()
forecast.run(config, Reporter(None, Path(tempfile.mkdtemp())))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
spent = {"wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
print(json.dumps({**spent, "host_peak_gb": peak / 1e9}))
"""


def run() -> list[dict]:
    """Targets: 16 layers under 10 s and under 3 GB of host memory; CPU time linear in layers."""
    import json

    rows = []
    for layers in (4, 8, 16, 32):
        done = subprocess.run([sys.executable, "-c", CODE, str(layers)], capture_output=True, text=True, check=True)
        rows.append({"layers": layers, **json.loads(done.stdout.splitlines()[-1])})
    for row in rows:
        row["cpu_s_per_layer"] = row["cpu_s"] / row["layers"]
    return rows
