"""Step time: the device is synchronised before both clock reads, raw values are kept, the window is cut afterwards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class StepTimer:
    """Wall seconds of each training step (Sonar-MoE §5.1: "a GPU synchronization at the end of each step").

    Attributes:
        step_s: seconds of every step run so far, in order; steps before ``first_step`` belong to an earlier process.
        tokens: supervised tokens of the same steps.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
        self.step_s: list[float] = []
        self.tokens: list[int] = []

    @contextmanager
    def step(self, supervised_tokens: int) -> Iterator[None]:
        """Time the body; its supervised tokens count towards throughput. Nothing is kept of a body that raises."""
        self.synchronize()
        start = self.clock()
        yield
        self.synchronize()
        self.step_s.append(self.clock() - start)
        self.tokens.append(supervised_tokens)

    def summary(self, window_start: int, first_step: int = 1) -> dict[str, Any]:
        """The record's ``time`` block over steps ``max(window_start, first_step)`` to the last (both 1-based).

        Throughput is tokens in the window over seconds in the window. After a resume the first
        timed step is ``first_step`` plus as many warm-up steps as a fresh run has, so that the window is warm again.
        """
        last = first_step + len(self.step_s) - 1
        first = window_start if first_step == 1 else first_step + window_start - 1
        seconds = self.step_s[first - first_step :]
        tokens = self.tokens[first - first_step :]
        reason = None if seconds else f"{len(self.step_s)} steps ran, none in the window that starts at {first}"
        return {
            "source": "measured",
            "step_s": self.step_s,
            "first_step": first_step,
            "window": [first, last] if seconds else None,
            "median_s": statistics.median(seconds) if seconds else None,
            "supervised_tokens_per_s": sum(tokens) / sum(seconds) if seconds else None,
            "supervised_tokens_per_step": sum(tokens) / len(tokens) if seconds else None,
            "reason": reason,
        }
