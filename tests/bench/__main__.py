"""``make bench``: speed as ratios within one run, and wall times of the commands, printed and written as JSON.

    python tests/bench [NAME ...] [--out FILE]

Absolute times belong to the machine they were taken on; the ratios are paired and interleaved.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
BENCHES = ("commands", "step_overhead", "forecast", "analysis_speed", "hooks", "sinkhorn")


def main() -> int:
    """Run the named benches (default: all); exit 2 for an unknown name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--out", default="analysis/output/bench.json")
    arguments = parser.parse_args()
    unknown = [n for n in arguments.names if n not in BENCHES]
    if unknown:
        print(f"error: {unknown[0]}: no such bench; choose one of {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    results = {"machine": {"platform": platform.platform(), "cores": os.cpu_count(), "unix_time": int(time.time())}}
    for name in arguments.names or BENCHES:
        print(f"== {name}", flush=True)
        rows = importlib.import_module(f"bench_{name}").run()
        results[name] = rows
        for row in rows:
            print(
                "  " + "  ".join(f"{k}: {v:.4g}" if isinstance(v, float) else f"{k}: {v}" for k, v in row.items()),
                flush=True,
            )
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
