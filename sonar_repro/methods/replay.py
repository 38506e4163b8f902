"""Run the same forward pass twice: random-number states, and the buffers that a forward pass changes."""

from __future__ import annotations

import random

import torch
from torch import nn


class Replay:
    """The state that a forward pass reads besides parameters and inputs, captured now and restored later.

    Random generators of torch (host, and each device that holds a parameter) and of Python; and copies of the module's
    buffers (running statistics). Version counters do not tell which buffers changed: batch_norm does not bump them.
    """

    def __init__(self, model: nn.Module) -> None:
        devices = {p.device for p in model.parameters() if p.device.type != "cpu"}
        self._host = torch.get_rng_state()
        self._devices = {d: torch.get_device_module(d).get_rng_state(d) for d in devices if d.type != "meta"}
        self._python = random.getstate()
        self._buffers = [(b, b.detach().clone()) for b in model.buffers()]

    def restore(self) -> None:
        """Put everything back."""
        torch.set_rng_state(self._host)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self._python)
        with torch.no_grad():
            for buffer, saved in self._buffers:
                buffer.copy_(saved)
