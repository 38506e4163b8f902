"""Tiny in-process arms: the training task without a child process."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from sonar_repro import config as configs
from sonar_repro.child import Reporter

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


def composed(*overrides):
    GlobalHydra.instance().clear()
    configs.register()
    with initialize_config_dir(str(configs.conf_dir()), version_base="1.3"):
        return configs.resolve(compose("config", overrides=list(overrides)))


def tiny_config(*overrides):
    return composed(*TINY, *overrides)


@pytest.fixture
def tiny():
    return tiny_config


@pytest.fixture
def compose_config():
    return composed


@pytest.fixture
def reporter(tmp_path):
    return lambda name="arm": Reporter(None, _made(tmp_path / name))


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
