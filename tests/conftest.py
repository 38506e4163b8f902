"""Shared by every room's tests: tiny arms in this process, without a child."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if threading.current_thread() is threading.main_thread():  # as Ctrl-C: children are ended too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent / "support"))

TINY = [
    "model.smoke.num_hidden_layers=2",
    "model.smoke.hidden_size=64",
    "model.smoke.intermediate_size=32",
    "data.train_examples=16",
    "data.heldout_count=4",
    "steps=6",
    "warmup_steps=2",
    "window_start=3",
    "threads=1",
]


@pytest.fixture
def compose_config():
    from sonar_repro.harness.compose import compose

    return compose


@pytest.fixture
def tiny(compose_config):
    return lambda *overrides: compose_config(*TINY, *overrides)


@pytest.fixture
def reporter(tmp_path):
    from sonar_repro.harness.worker import Reporter

    def make(name="arm"):
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        return Reporter(None, folder)

    return make
