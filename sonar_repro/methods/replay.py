"""Run the same forward pass twice: random-number states, and the buffers that a forward pass changes."""

from __future__ import annotations

import random

import torch
from torch import nn


class Replay:
    """The state that a forward pass reads besides parameters and inputs, captured now and restored later.

    Random generators of torch (host, and each device that holds a parameter) and of Python; and the module's buffers
    (running statistics), copied here and put back where the first pass changed them.
    """

    def __init__(self, model: nn.Module) -> None:
        devices = {p.device for p in model.parameters() if p.device.type != "cpu"}
        self._host = torch.get_rng_state()
        self._devices = {d: torch.get_device_module(d).get_rng_state(d) for d in devices if d.type != "meta"}
        self._python = random.getstate()
        self._buffers = [(b, b.detach().clone(), b._version) for b in model.buffers()]

    def restore(self) -> None:
        """Put everything back."""
        torch.set_rng_state(self._host)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self._python)
        with torch.no_grad():
            for buffer, saved, version in self._buffers:
                if buffer._version != version:
                    buffer.copy_(saved)
