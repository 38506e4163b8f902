"""Forecast branch of the training task: the same model class, schedule and training step, on fake tensors."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from ..config.schema import Config
from ..models.build import DTYPES, architecture
from ..models.experts import find_expert_tensors
from ..training import ranks as distributed
from ..training.build import (
    counts_of,
    describe_model,
    gradient_floor,
    make_optimizer,
    make_scheduler,
    roles_of,
    state_bytes,
)
from ..training.process import environment, prepare_process
from ..training.step import training_step
from . import host_costs, snapshot
from .fake_group import fake_group, stand_in
from .fake_model import FAKE_IMPLEMENTATIONS, fake_environment
from .memory import ForecastMeter
from .recorder import StepRecorder
from .time_table import cards, forecast_time

NOT_RUN = "a forecast has shapes and allocations, no values"


class ForecastOutOfMemory(MemoryError):
    """The forecast run could not have been allocated under its cap."""


def run(config: Config, report: Any) -> ForecastMeter:
    """Peak memory and step time of an arm at full size without a GPU. ``oom`` where the cap would be too small.

    Under data parallel the memory is rank 0's (FSDP2 and DDP run for real on a group without communication), and no
    time is forecast. Returns the meter, which can replay the run under other caps.
    """
    prepare_process(config)
    host_costs.load(config.host)  # a mistake is said before a minute has gone by
    cards()
    report.phase("load")
    cap = None if config.memory_cap_gb is None else int(config.memory_cap_gb * 1e9)
    capability = config.gpu.compute_capability
    recorder = StepRecorder() if config.parallel.name == "none" else None
    meter = ForecastMeter(cap_bytes=cap, compute_capability=capability, recorder=recorder)
    with fake_group(config.parallel.processes), fake_environment() as fake, ExitStack() as metered:
        metered.enter_context(recorder or nullcontext())
        if config.parallel.name != "fsdp2":
            metered.enter_context(meter)
        meter.phase("load")
        model = build(config, fake)
        trained = stand_in(distributed.wrap(model, config))
        if config.parallel.name == "fsdp2":  # whole weights are on the host until they are sharded
            metered.enter_context(meter)
        meter.attach(model, [tensor.parameter for tensor in find_expert_tensors(model)])
        optimizer = make_optimizer(config, trained)
        scheduler = make_scheduler(config, optimizer)
        describe(config, report, model, optimizer)
        report.phase("steps")

        held: list[Any] | None = [] if config.outputs == "kept" else None
        autocast = DTYPES[config.autocast] if config.autocast else None

        def step(micro_batches: Any) -> None:
            training_step(trained, optimizer, scheduler, micro_batches, config.accumulation, autocast, held)

        shape = {"batch_size": config.batch_size, "max_length": config.data.max_length}
        meter.run(fake, step, accumulation=config.accumulation, seed=config.seed, **shape)
    report.phase("replay")
    memory = {**meter.read(), **gradient_floor(model), **state_bytes(optimizer)}
    report.section("memory", memory)
    report.section("roles", roles_of(optimizer))
    report.section("counts", counts_of(optimizer, optimizer.steps, 0, config.accumulation))
    report.section("time", time_section(recorder, config, model, memory))
    report.section("loss", {"train": None, "heldout": None, "heldout_reason": NOT_RUN})
    if config.task.timeline:
        report.section("timeline", meter.timeline())
    if config.task.snapshot:
        snapshot.write(Path(config.task.snapshot), meter.tracker.log)
    if meter.oom:
        where = meter.oom
        report.phase_name = f"{where['phase']}, step {where['step']}, {where['region']}"
        raise ForecastOutOfMemory(f"memory_cap_gb={config.memory_cap_gb:g}: {describe_oom(where)}")
    return meter


def time_section(recorder: StepRecorder | None, config: Config, model: Any, memory: dict[str, Any]) -> dict[str, Any]:
    """The record's ``time``: nothing was timed, and ``forecast`` holds what the step would take."""
    not_timed = {"source": "forecast", "step_s": None, "window": None, "median_s": None}
    if recorder is None:
        why = f"parallel={config.parallel.name}: the forecast of time knows no communication"
        return {**not_timed, "reason": why}
    trained = sum(p.requires_grad for p in model.parameters())
    reserved = memory["measured"]["peak_reserved_bytes"]
    block = forecast_time(recorder, config, trained, reserved)
    return {**not_timed, "reason": "nothing was timed; see time.forecast", "forecast": block}


def build(config: Config, fake: Any) -> Any:
    """The full-size model on fake tensors, checkpointed as the arm says."""
    shape = architecture(config.model, config.scale.name)
    model = fake.build(
        shape, dtype=DTYPES[config.scale.dtype], experts=config.backend.name, attention=config.model.attention
    )
    if config.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def describe(config: Config, report: Any, model: Any, optimizer: Any) -> None:
    """The record's sections that are known before the first step; a footprint that stands in for a kernel says so."""
    report.section("model", describe_model(config, model))
    shape = [config.batch_size, config.data.max_length]
    facts = {"name": config.data.name, "sha256": None, "sha256_reason": NOT_RUN, "max_length": config.data.max_length}
    report.section("data", {**facts, "batch_shape": shape})
    stands_in = FAKE_IMPLEMENTATIONS[config.backend.name] != config.backend.name
    ran = f"{config.backend.name} (footprint)" if stands_in else config.backend.name
    attention = str(getattr(model.config, "_attn_implementation", None))
    report.section("environment", environment(config, "fake", ran, attention, optimizer.describe()[0]))


def describe_oom(where: dict[str, Any]) -> str:
    """The failed request in words."""
    sizes = {k: f"{v / 1e9:.2f} GB" for k, v in where.items() if k.endswith("bytes") and isinstance(v, int)}
    return ", ".join(f"{k.removesuffix('_bytes')} {v}" for k, v in sizes.items()) or str(where)
