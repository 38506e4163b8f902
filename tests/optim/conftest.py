"""Fixtures of the optimizer tests."""

import pytest
from tiny_whale import Toy, mesh, run, toy_data


@pytest.fixture
def trained():
    """A toy with three steps of hidden momentum behind it."""
    toy = Toy()
    optimizer = mesh(toy, "mesh")
    run(toy, optimizer, toy_data(3))
    return toy, optimizer, toy_data(6)[3:]
