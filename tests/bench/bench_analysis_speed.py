"""Tables, figures and report from 500 synthetic records (target: under 10 s)."""

from __future__ import annotations


def run() -> list[dict]:
    """Wall seconds of each part and their sum, in this process."""
    from synthetic import bench

    return [{"records": 500, **{f"{k}_s": v for k, v in bench(500).items()}, "target_total_s": 10.0}]
