"""Made-up records of the right shape: for tests and for timing the analysis. Their numbers mean nothing.

``python -c "from analysis.synthetic import bench; print(bench())"`` times tables, figures and report over 500 of them.
"""

from __future__ import annotations

PARAMETERS = {"olmoe": (6.919e9, 6.442e9, 16), "granite": (3.299e9, 3.020e9, 32), "nanowhale": (1.104e8, 2.458e7, 8)}
KEEPS = ("standard_global_clip", "standard_no_expert_clip", "standard_no_clip")  # methods that hold gradients
STEPS = 40
USUAL = {
    "model": "olmoe",
    "backend": "sonicmoe",
    "method": "sonar",
    "optimizer": "adamw",
    "batch_size": 2,
    "accumulation": 1,
    "accumulation_mode": "standard",
    "checkpointing": False,
    "memory_cap_gb": None,
    "data": "synthetic",
    "parallel": "none",
}
ENVIRONMENT = {
    "package_version": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "python": "3.11.7",
    "git_commit": None,
    "git_dirty": None,
    "device": "cpu",
    "device_name": "synthetic",
    "threads": 2,
}
