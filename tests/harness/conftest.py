"""A fake driver and a fake ``torch.cuda`` for the tests of what needs a GPU."""

import fake_cuda
import pytest

from sonar_repro import machine


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.Cuda().install(monkeypatch)


@pytest.fixture
def driver(monkeypatch):
    """Install a fake CUDA driver; everything cached about the machine is forgotten before and after."""

    def forget():
        for function in (machine._driver, machine.cuda_device_count, machine.first_card):
            function.cache_clear()

    def install(fake):
        forget()
        monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: fake)
        return fake

    yield install
    monkeypatch.undo()
    forget()
