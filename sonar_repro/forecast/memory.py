"""The forecast's memory meter: a recorded run on fake tensors, replayed through CUDA's allocator model.

Use inside :func:`sonar_repro.forecast.fake_model.fake_environment`::

    with fake_environment() as environment, ForecastMeter(cap_bytes=None) as meter:
        meter.phase("load")
        model = environment.build(config, experts="sonicmoe")
        meter.attach(model, expert_parameters)
        optimizer = ...
        meter.run(environment, step, batch_size=2, max_length=256)   # step(micro_batches): the shared training step
        meter.read()

Three steps are recorded: the first (it creates the optimizer state), one at half length, one with every position of the
batch filled. The last two are steady; between them every block's size is a line in the batch length, and the replay
goes on over a stated sequence of lengths (:mod:`sonar_repro.forecast.step_template`), because the allocator's
fragmentation, and with it reserved memory, depends on the lengths that came before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..data.lengths import batch_lengths
from ..errors import UserError
from ..instruments.memory import PHASES, TrackerMeter
from ..instruments.timeline import step_timeline
from ..instruments.tracker import AllocationTracker
from .allocator import AllocatorReport, replay
from .breakdown import Breakdown, breakdown
from .cuda_buffers import CudaModel, cublas_workspace_bytes
from .step_template import NoTemplate, StepTemplate

#: Steps of drawn lengths that are replayed behind the recorded ones.
REPLAYED_STEPS = 64


class ForecastMeter(TrackerMeter):
    """Peaks of a run on fake tensors, as ``torch.cuda`` would report them for the same run on a GPU.

    ``peak_allocated_bytes`` sums allocator *blocks* (``max_memory_allocated``: 512-byte rounding plus what was not
    split off a block), ``peak_reserved_bytes`` its segments, ``peak_requested_bytes`` exact storage bytes.

    Args:
        cap_bytes: the allocator's cap (``memory_cap_gb`` × 1e9), or ``None``.
        compute_capability: major version of the card, which decides cuBLAS's workspace.
        observers: passed to the tracker: called after every operator (time models).
        recorder: a further observer that is told where steps and micro-batches start
            (:class:`sonar_repro.forecast.recorder.StepRecorder`).
    """

    source = "forecast"

    def __init__(
        self,
        *,
        cap_bytes: int | None = None,
        compute_capability: int = 12,
        observers: Sequence[Callable[..., None]] = (),
        recorder: Any = None,
    ) -> None:
        self.recorder = recorder
        observers = (*observers, recorder) if recorder is not None else tuple(observers)
        self.cap_bytes = cap_bytes
        self.workspace = cublas_workspace_bytes(compute_capability)
        model = CudaModel(self.workspace)
        super().__init__(AllocationTracker(events=True, device_model=model, observers=observers))
        if recorder is not None:
            recorder.live = lambda: self.tracker.live_allocated
        self.sequence: dict[str, Any] = {}
        self._recorded: list[list[int]] = []
        self._steps: list[list[int]] = []
        self._template: StepTemplate | None = None
        self._report: AllocatorReport | None = None

    def run(
        self,
        environment: Any,
        step: Callable[[Iterator[dict[str, torch.Tensor]]], Any],
        *,
        batch_size: int,
        max_length: int,
        accumulation: int = 1,
        seed: int = 42,
        replayed_steps: int = REPLAYED_STEPS,
        padded: bool = False,
    ) -> None:
        """Record the first step and two steady ones, and draw the lengths that the replay goes on with.

        Args:
            environment: the :class:`~sonar_repro.forecast.fake_model.FakeEnvironment`.
            step: runs one training step over an iterator of micro-batches, as every scale does.
            batch_size: sequences a micro-batch.
            max_length: tokens of the longest sequence.
            accumulation: micro-batches a step.
            seed: of the drawn lengths (:func:`sonar_repro.data.lengths.batch_lengths`).
            replayed_steps: drawn steps behind the recorded ones; 0 replays the recorded ones only.
            padded: whether batches have padding, which makes a mask tensor of the causal flag.
        """
        if max_length < 2:
            raise UserError(f"data.max_length={max_length}: a forecast needs at least 2 tokens a sequence")
        drawn = self._draw(batch_size, max_length, accumulation, seed, replayed_steps)
        self._recorded, self._template, reason = [], None, None
        self._report = None

        def record(length: int | Sequence[int]) -> None:
            lengths = list(length) if isinstance(length, Sequence) else [length] * accumulation
            self._record(lengths, lambda: step(self._micro_batches(environment, batch_size, lengths, padded)))

        self.phase("warmup")
        record(drawn[0])
        self.phase("measured")
        # A kernel that changes its algorithm between the two lengths leaves no template: then closer ones are tried.
        for shorter in (max_length // 2, max_length - max(1, max_length // 8)):
            record(shorter)
            record(max_length)
            self.tracker.step("end")
            try:
                self._template, reason = StepTemplate(self.tracker.log, (shorter, max_length)), None
                break
            except NoTemplate as error:
                reason = str(error)
        self._steps = drawn[1:] if self._template is not None else []
        self.sequence = {
            "lengths": "alpaca-like, the longest of each micro-batch",
            "seed": seed,
            "recorded": self._recorded,
            "replayed_steps": len(self._steps),
            "padded": padded,
            "reason": reason,
        }

    def run_steps(self, step: Callable[[], Any], steady: int = 2) -> None:
        """Record the first step and ``steady`` more of the same shape; nothing is drawn behind them."""
        self._template, self._steps, self._report = None, [], None
        self._recorded = []
        for index in range(1 + steady):
            self.phase("warmup" if index == 0 else "measured")
            self._record([1], step)
        self.tracker.step("end")

    def _record(self, lengths: list[int], step: Callable[[], Any]) -> None:
        """One step, told to the tracker and, behind the first, to the recorder of its operators."""
        self._recorded.append(lengths)
        self.tracker.step(len(self._recorded))
        if self.recorder is not None and len(self._recorded) > 1:
            self.recorder.step(lengths)
        step()
        if self.recorder is not None:
            self.recorder.end()

    def report(self) -> AllocatorReport:
        """The replay, made once; without a template (``sequence["reason"]`` says why) of the recorded steps only."""
        if self._report is None:
            self._report = replay(self.tracker.log, self.cap_bytes, self._continuation())
        return self._report

    def under(self, cap_bytes: int, compute_capability: int | None = None) -> AllocatorReport:
        """The same run replayed under another cap and, if asked, with another card's cuBLAS workspaces."""
        log = self.tracker.log
        assert log is not None
        if compute_capability is not None:
            sizes = log.sizes[:]
            for block in log.workspaces:
                sizes[block] = cublas_workspace_bytes(compute_capability)
            log = replace(log, sizes=sizes)
        return replay(log, cap_bytes, self._continuation())

    def breakdown(self, layers: int) -> Breakdown:
        """Bytes by part at the allocated peak (:mod:`sonar_repro.forecast.breakdown`)."""
        log = self.tracker.log
        assert log is not None
        found = breakdown(log, layers)
        if sum(found.parts.values()) < self.report().phases["measured"].peak_allocated:
            found = breakdown(log, layers, self._continuation())  # the peak lies in a replayed step
        return found

    def _continuation(self) -> Any:
        return self._template.over(self._steps, len(self._recorded) + 1) if self._template else None

    @property
    def oom(self) -> dict[str, Any] | None:
        """Where the cap was too small (phase, step, region, sizes in bytes), or ``None``."""
        return self.report().oom

    def read(self) -> dict[str, Any]:
        """The record's ``memory`` block. With ``oom``, peaks are those up to the request that failed."""
        report = self.report()
        block: dict[str, Any] = {"source": self.source}
        for name in PHASES:
            peak = report.phases.get(name)
            block[name] = {
                "peak_allocated_bytes": peak.peak_allocated if peak else None,
                "peak_reserved_bytes": peak.peak_reserved if peak else None,
                "peak_requested_bytes": peak.peak_requested if peak else None,
            }
            if peak is None:
                block[name]["reason"] = "the run ended before this phase" if report.oom else "phase did not run"
        block["allocator"] = {
            "cap_bytes": self.cap_bytes,
            "oom": report.oom,
            "retries": report.retries,
            "segments": report.segments,
            "cublas_workspace_bytes": self.workspace,
            "sequence": self.sequence,
        }
        return block

    def timeline(self, points: int = 240) -> dict[str, Any]:
        """Bytes by owner over the full-length steady step."""
        return step_timeline(self.tracker.log, len(self._recorded), points)

    @staticmethod
    def _draw(batch_size: int, max_length: int, accumulation: int, seed: int, steps: int) -> list[list[int]]:
        count = (steps + 1) * accumulation
        longest = batch_lengths(count, batch_size, seed, max_length)
        return [longest[first : first + accumulation] for first in range(0, count, accumulation)]

    def _micro_batches(
        self, environment: Any, batch_size: int, lengths: Sequence[int], padded: bool
    ) -> Iterator[dict[str, torch.Tensor]]:
        for index, length in enumerate(lengths):
            self.tracker.micro_batch(index)
            if self.recorder is not None:
                self.recorder.micro_batch(index)
            yield environment.batch(batch_size, length, padded=padded)
