"""Data configs for tests, with as many examples as a test needs."""

from sonar_repro.config.schema import DataConfig


def data_config(**fields):
    """The embedded instructions, 512 for training and the 64 behind them held out, but for ``fields``."""
    return DataConfig(**{"train_examples": 512, "heldout_start": None, "heldout_count": 64, **fields})
