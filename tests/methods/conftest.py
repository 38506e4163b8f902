"""Every test of the methods runs under deterministic algorithms, and on one thread unless it says otherwise."""

import pytest
import torch


@pytest.fixture(autouse=True)
def deterministic():
    """fp32 grouped_mm on two threads is not repeatable without; tiny models gain nothing from more threads."""
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads)
