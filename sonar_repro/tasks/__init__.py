"""Tasks beside training: comparing weights, downstream accuracy, the doctor, fetching."""

from __future__ import annotations

import importlib.util

from ..config.schema import Config


def missing_library(config: Config) -> str | None:
    """Why this arm cannot run here whatever runs before it; known before an hour of training. None if it can."""
    if config.task.name != "downstream":
        return None
    missing = [name for name in ("lm_eval", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        return f"task=downstream: {' and '.join(missing)} not installed; pip install 'sonar_repro[eval]'"
    return None
