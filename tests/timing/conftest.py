"""The tiny arms of tests/tasks, here too, and the tiny models of tests/instruments."""

import importlib.util
from pathlib import Path

_path = Path(__file__).parents[1] / "tasks" / "conftest.py"
_spec = importlib.util.spec_from_file_location("tiny_arms", _path)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
tiny, reporter = _module.tiny, _module.reporter
compose_config = _module.compose_config
