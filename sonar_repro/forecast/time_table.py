"""The record's ``time.forecast``: at which batch length, on which cards, with which host."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..config.schema import Config, GpuConfig, conf_dir
from ..data.lengths import batch_lengths
from ..errors import UserError
from . import host_costs
from .recorder import StepRecorder
from .step_time import Constants, StepProfile, host_curve, profile, sensitivity, simulate
from .two_resources import write_trace

FIGURES = ("memory_gb", "context_gb", "bandwidth_gb_s", "bf16_tflops", "fp32_tflops")
#: Steps whose longest sequences are drawn for the representative length: as many as the paper's median is over.
DRAWN_STEPS = 2000


def representative_length(batch_size: int, max_length: int, seed: int, kind: str) -> int:
    """Tokens a sequence of the batch that stands for the run: the median of the drawn batches' longest sequences.

    A batch of instructions is padded to its longest sequence, and the papers report the median step time. A packed text
    fills every position.
    """
    if kind == "text":
        return max_length
    return round(statistics.median(batch_lengths(DRAWN_STEPS, batch_size, seed, max_length)))


def cards() -> list[GpuConfig]:
    """The cards of ``conf/gpu`` whose bandwidth and rate are known, by name."""
    found = []
    for path in sorted((conf_dir() / "gpu").glob("*.yaml")):
        try:
            card = GpuConfig(**(yaml.safe_load(path.read_text(encoding="utf-8")) or {}))
            unlike = [k for k in FIGURES if not isinstance(getattr(card, k), (int, float, type(None)))]
            if unlike or card.name != path.stem:
                raise ValueError(f"{', '.join(unlike)} must be numbers" if unlike else f"name must be {path.stem}")
        except (TypeError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"conf/gpu/{path.name}: {error}; copy another card's file and change its values") from error
        if card.bandwidth_gb_s and card.bf16_tflops:
            found.append(card)
    return found


def forecast_time(
    recorder: StepRecorder, config: Config, parameters: int, peak_reserved_bytes: int | None
) -> dict[str, Any]:
    """The record's ``time.forecast`` block, in milliseconds.

    Args:
        recorder: with the last two recorded steps.
        parameters: tensors that are trained (what the host does once a tensor).
        peak_reserved_bytes: decides ``fits_gpu``; the time is given all the same where it does not fit.
    """
    gpu, host = config.gpu, host_costs.load(config.host)
    reason = _no_forecast(config)
    if reason:
        return {"step_ms": None, "reason": reason}
    step = profile(recorder.steps, host, parameters)
    full, batch = config.data.max_length, config.batch_size
    length = representative_length(batch, full, config.seed, config.data.kind)
    length_is = "packed text" if config.data.kind == "text" else "median of drawn batches' longest sequences"
    if step.lengths[0] == step.lengths[1]:
        length, length_is = full, "the longest: steps of two lengths ran different operators"
    usual, filled = [length] * config.accumulation, [full] * config.accumulation
    times = _times(step, gpu, usual, batch)
    if config.task.trace:
        _trace(Path(config.task.trace), step, gpu, usual)
    fits = None if peak_reserved_bytes is None else peak_reserved_bytes <= (gpu.memory_gb - gpu.context_gb) * 1e9
    return {
        "source": "forecast",
        "gpu": gpu.name,
        "fits_gpu": fits,
        "host": host.name,
        "host_cpu": host.cpu,
        "length": length,
        "length_is": length_is,
        "recorded_lengths": [recorded.lengths for recorded in recorder.steps],
        "tokens": "all positions of the batch",
        **times,
        "filled": _times(step, gpu, filled, batch),
        "cards": {card.name: _on_card(step, card, usual, filled, batch) for card in cards()},
        "host_curve": host_curve(step, gpu, usual),
        "sensitivity": sensitivity(step, gpu, usual),
    }


def _no_forecast(config: Config) -> str | None:
    """Why a step cannot be timed, or None."""
    gpu = config.gpu
    if not (gpu.bandwidth_gb_s and gpu.bf16_tflops):
        return f"gpu={gpu.name} has no bandwidth_gb_s or bf16_tflops (conf/gpu)"
    if config.method.clip == "offloaded":
        return "clip=offloaded copies gradients to the host and back, which the time model does not know"
    return None


def _times(step: StepProfile, gpu: GpuConfig, lengths: Sequence[int], batch: int) -> dict[str, float]:
    times = simulate(step, gpu, lengths)[0]
    tokens = batch * sum(lengths) / (times["step_ms"] / 1e3)
    return {**{name: round(value, 4) for name, value in times.items()}, "tokens_per_s": round(tokens, 2)}


def _on_card(
    step: StepProfile, card: GpuConfig, usual: Sequence[int], filled: Sequence[int], batch: int
) -> dict[str, Any]:
    """What the tables need of each card: the usual step, and the one with every position filled."""
    kept = ("step_ms", "busy_ms", "tokens_per_s")
    a, b = (_times(step, card, lengths, batch) for lengths in (usual, filled))
    return {**{name: a[name] for name in kept}, "filled": {name: b[name] for name in kept}}


def _trace(path: Path, step: StepProfile, gpu: GpuConfig, lengths: Sequence[int]) -> None:
    _, kernels, timeline, index = simulate(step, gpu, lengths, Constants())
    write_trace(path, [step.names[i] for i in index], kernels, timeline, step.at("live", lengths)[index])
