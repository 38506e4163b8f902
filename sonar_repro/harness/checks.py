"""What one field of a config alone cannot know: values, and combinations that no run can honour. Imports no torch.

Each refusal is one line with the dotted key, the value and the way out, before a model is built.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from ..config.schema import FILES_ASIDE, Config, host_file
from ..data.checks import check_data
from ..errors import UserError
from ..methods.schedule import NONFINITE_CHECKS, NONFINITE_MODES


def _bad(key: str, value: Any, allowed: str) -> UserError:
    return UserError(f"{key}={value}: {allowed}")


CHOICES = {
    "schedule": ("cosine", "constant"),
    "autocast": (None, "bfloat16"),
    "outputs": ("dropped", "kept"),
    "accumulation_mode": (None, "standard", "update_each", "fold"),
    "scale.name": ("smoke", "forecast", "paper"),
    "scale.dtype": ("bfloat16", "float32"),
    "scale.device": ("auto", "cpu", "cuda", "fake"),
    "model.weights": ("random", "pretrained"),
    "method.in_backward": ("none", "experts", "all"),
    "method.granularity": ("tensor", "expert"),
    "method.on_nonfinite": NONFINITE_MODES,
    "method.nonfinite_check": NONFINITE_CHECKS,
    "parallel.name": ("none", "ddp", "fsdp2"),
    "parallel.backend": ("auto", "gloo", "nccl"),
}
AT_LEAST = {
    "batch_size": 1,
    "accumulation": 1,
    "steps": 1,
    "warmup_steps": 0,
    "window_start": 1,
    "checkpoint_every": 0,
    "seed": 0,
    "repeat": 1,
    "threads": 1,
    "parallel.processes": 1,
    "learning_rate": 0,
    "final_learning_rate": 0,
}


def _get(config: Config, dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def check(config: Config) -> None:
    """Refuse early, in one line (rule 2): ranges, choices, then the pairs of fields that must agree."""
    for key, allowed in CHOICES.items():
        value = _get(config, key)
        if value not in allowed:
            raise _bad(key, value, "choose one of " + ", ".join("null" if a is None else str(a) for a in allowed))
    for key, low in AT_LEAST.items():
        value = _get(config, key)
        if not low <= value < math.inf:  # nan is in no range
            raise _bad(key, value, f"must be at least {low}")
    if config.seed >= 2**32:
        raise _bad("seed", config.seed, "must be below 2**32")
    if not config.stall_timeout_s > 0:
        raise _bad("stall_timeout_s", config.stall_timeout_s, "must be a positive number of seconds")
    if config.warmup_steps > config.steps:
        raise _bad("warmup_steps", config.warmup_steps, f"longer than the run; use at most steps={config.steps}")
    if config.window_start > config.steps:
        raise _bad("window_start", config.window_start, f"no step would be timed; use at most steps={config.steps}")
    if not 0 < config.method.max_grad_norm < math.inf:
        raise _bad(
            "method.max_grad_norm",
            config.method.max_grad_norm,
            "must be positive; use method.clip=none to clip nothing",
        )
    if config.memory_cap_gb is not None and config.memory_cap_gb <= 0:
        raise _bad("memory_cap_gb", config.memory_cap_gb, "must be positive, in units of 1e9 bytes, or null")
    if config.scale.name == "forecast" and not host_file(config.host).is_file():
        known = ", ".join(sorted(path.stem for path in host_file("").parent.glob("*.json")))
        how = "python -m sonar_repro.forecast.measure_host FILE.json measures this machine"
        raise _bad("host", config.host, f"unknown; choose one of {known}, or give a file ({how})")
    _check_method(config)
    _check_accumulation(config)
    _check_data(config)
    _check_parallel(config)
    _check_card(config)
    _check_task(config)


def _check_method(config: Config) -> None:
    """The knobs go together, and the optimizer is one of the factory's and can do what the method asks of it."""
    from ..methods.schedule import CLIP, Schedule
    from ..optim.factory import REGISTRY

    method, kind = config.method, config.optimizer.kind
    if method.clip not in CLIP:
        raise _bad("method.clip", method.clip, f"choose one of {', '.join(CLIP)}")
    try:
        Schedule(method.in_backward, method.granularity, method.clip)
    except UserError as error:
        raise UserError(f"method={method.name}: {error}") from error
    if kind not in REGISTRY:
        raise _bad("optimizer.kind", kind, f"choose one of {', '.join(REGISTRY)}")
    if method.on_nonfinite != "off" and kind in ("mesh", "mesh_b"):
        raise _bad(
            "method.on_nonfinite",
            method.on_nonfinite,
            f"optimizer={config.optimizer.name} hides its momentum in the gradient, which one NaN destroys; use "
            "mesh_full or mesh_b_full, or method.on_nonfinite=off",
        )
    folds = config.accumulation > 1 and config.accumulation_mode == "fold"
    if folds and kind not in FOLDABLE:
        raise _bad("accumulation_mode", "fold", f"optimizer={config.optimizer.name} cannot fold; use adamw or sgd")


FOLDABLE = ("adamw", "sgd")


def _check_card(config: Config) -> None:
    """A card's figures are positive numbers, or null where they are not known."""
    for key in ("memory_gb", "bandwidth_gb_s", "bf16_tflops", "fp32_tflops"):
        value = getattr(config.gpu, key)
        if value is not None and not (0 < value < math.inf or (key == "memory_gb" and value == 0)):
            raise _bad(f"gpu.{key}", value, "must be a positive number (conf/gpu)")


def _check_task(config: Config) -> None:
    """What is asked of the task can be had at this scale."""
    task, fake = config.task, config.scale.device == "fake"
    for key in FILES_ASIDE:
        file = getattr(task, key)
        if not file:
            continue
        folder = Path(file).absolute().parent
        if not fake or config.parallel.name != "none":
            raise _bad(f"task.{key}", file, "is of a forecast in one process; use scale=forecast without parallel")
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise _bad(f"task.{key}", file, "its folder is not there or not writable")
    if task.options.get("diagnosis") and (fake or config.parallel.name != "none"):
        what = (
            "a forecast has no values" if fake else f"under parallel={config.parallel.name} a rank sees its own tokens"
        )
        raise _bad("task.options.diagnosis", True, f"{what}; run it in one process at scale=smoke or paper")


def _check_accumulation(config: Config) -> None:
    """Accumulation that a method cannot honour is refused before a model is built, unless the command declares it."""
    from ..methods.schedule import CLIP

    mode, method = config.accumulation_mode, config.method
    if method.accumulation_mode and mode != method.accumulation_mode:
        raise _bad("accumulation_mode", mode, f"method={method.name} is {method.accumulation_mode}; use another method")
    if method.in_backward == "none":
        if mode not in (None, "standard"):
            raise _bad("accumulation_mode", mode, f"method={method.name} keeps its gradients; use standard")
    elif mode == "standard" and mode not in CLIP[method.clip].modes:
        raise _bad(
            "accumulation_mode", mode, f"method={method.name} frees gradients in backward; use update_each or fold"
        )
    elif method.in_backward == "all" and config.accumulation > 1 and mode is None:
        raise _bad(
            "accumulation",
            config.accumulation,
            f"method={method.name} cannot accumulate: it updates at every micro-batch; "
            "say accumulation_mode=update_each or use a standard method",
        )
    able = CLIP[method.clip].modes
    if method.in_backward != "none" and config.accumulation > 1 and (mode or "update_each") not in able:
        way = f"accumulation_mode={' or '.join(able)}" if able else "accumulation=1"
        raise _bad("accumulation", config.accumulation, f"method={method.name} frees its gradients; use {way}")


def _check_data(config: Config) -> None:
    data = config.data
    check_data(data)
    if data.source != "synthetic" and data.train_examples is not None and data.train_examples < config.batch_size:
        too_few = f"fewer than one batch of batch_size={config.batch_size}"
        raise _bad("data.train_examples", data.train_examples, too_few)


def _check_parallel(config: Config) -> None:
    name, processes = config.parallel.name, config.parallel.processes
    if name == "none" and processes != 1:
        raise _bad("parallel.processes", processes, "choose parallel=ddp or parallel=fsdp2 with it")
    if name == "none":
        return
    if processes == 1:
        raise _bad("parallel.processes", processes, f"parallel={name} needs at least 2; leave parallel out")
    if config.task.profile and (name == "fsdp2" or config.method.in_backward != "none"):
        raise _bad("task.profile", True, f"rank 0 alone is profiled, and parallel={name} trains on all; leave one out")
    if config.task.timeline and config.scale.device != "fake":
        raise _bad("task.timeline", True, f"rank 0 alone is traced, and parallel={name} trains on all; leave one out")
    if name == "fsdp2":
        _check_sharded(config)


def _check_sharded(config: Config) -> None:
    """What parallel=fsdp2 cannot honour: whole matrices, single experts or blocks of a sharded tensor, checkpoints."""
    from ..methods.schedule import SHARDED_CLIPS
    from ..optim.factory import MESH_NAMES

    method, kind = config.method, config.optimizer.kind
    refused = [
        (
            method.granularity == "expert",
            "method.granularity",
            method.granularity,
            "experts are spread over the ranks, so their hooks fire per tensor; use method=sonar, or parallel=ddp",
        ),
        (
            method.clip not in SHARDED_CLIPS,
            "method.clip",
            method.clip,
            f"needs whole gradients in their hooks; choose {', '.join(SHARDED_CLIPS)}, or parallel=ddp",
        ),
        (
            config.accumulation_mode == "fold" and config.accumulation > 1,
            "accumulation_mode",
            "fold",
            "not for sharded parameters; use update_each, or parallel=ddp",
        ),
        (
            kind == "adamw8bit" or kind in MESH_NAMES,
            "optimizer",
            config.optimizer.name,
            "needs whole tensors, and parallel=fsdp2 shards them; use adamw, sgd or lion, or parallel=ddp",
        ),
        (
            config.checkpoint_every > 0,
            "checkpoint_every",
            config.checkpoint_every,
            "sharded checkpoints are not built; use checkpoint_every=0, or parallel=ddp",
        ),
    ]
    for wrong, key, value, way in refused:
        if wrong:
            raise _bad(key, value, f"with parallel=fsdp2: {way}")
