"""Before full-size arms are loaded: does the card hold them, by their own memory forecast, and is it ours alone?

Runs in the command's process without torch: the forecasts are ordinary forecast arms in processes of their own, and the
card is asked through the driver and nvidia-smi.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

from omegaconf import OmegaConf

from .. import machine
from ..config.schema import Config, DataConfig, GpuConfig, ScaleConfig, TaskConfig, conf_dir
from ..errors import UserError
from .prerequisites import prerequisites
from .progress import note, warn
from .runner import make_arm, run, state

#: Beside PyTorch's allocator: the CUDA context and the libraries' code (the allowance of conf/gpu).
CONTEXT_BYTES = 1_000_000_000


def check_card(configs: list[Config]) -> None:
    """Warn of a shared card; refuse arms that a forecast says will not fit, unless ``force_memory=true``.

    Raises:
        UserError: the arms that do not fit, the forecast and the card's memory, and the way out.
    """
    planned = [config for config in configs if config.scale.device in ("cuda", "auto") and not config.dry_run]
    card = machine.first_card() if planned else None
    if card is None:
        return
    wanted = [config for config in planned if config.scale.device == "cuda" and config.scale.name != "smoke"]
    facts = machine.gpu_facts(card.uuid)
    shared = machine.shared_card(facts)
    if shared:
        warn(shared)
    used = (facts.get("used_before_mib") or 0.0) * 1024**2
    usable = int(card.total_bytes - (used if shared else 0))
    every = [arm for config in wanted for arm in (*prerequisites(config).values(), config)]
    arms = [arm for arm in every if arm.task.name == "train" and state(make_arm(arm)) == "run"]
    too_large = _too_large(arms, usable, card.capability[0])
    if not too_large:
        return
    told = "; ".join(f"{name} needs {need / 1e9:.1f} GB" for name, need in too_large.items())
    message = (
        f"{card.name}: {usable / 1e9:.1f} GB of {card.total_bytes / 1e9:.1f} are free, and by the memory forecast "
        f"(reserved, and {CONTEXT_BYTES / 1e9:.1f} GB for the CUDA context) {told}"
    )
    if not any(config.force_memory for config in wanted):
        raise UserError(f"{message}; run the others, or say force_memory=true to run them all the same")
    warn(message)


def _too_large(arms: list[Config], usable: int, capability: int) -> dict[str, int]:
    """Arm name -> bytes needed, of the arms whose forecast exceeds ``usable``.

    A standard schedule keeps every gradient that an in-backward one frees: where it fits, its kin fit, unasked.
    """
    fits: set[str] = set()
    too_large: dict[str, int] = {}
    for arm in sorted(arms, key=lambda arm: arm.method.in_backward != "none"):
        name, kin = make_arm(arm).arm_id, _kin(arm)
        if name in too_large or kin in fits:
            continue
        peak = forecast_peak(arm, capability)
        if isinstance(peak, str):
            warn(f"no memory forecast for {name}: {peak}")
        elif peak + CONTEXT_BYTES > usable:
            too_large[name] = peak + CONTEXT_BYTES
        else:
            note(f"{name} fits: {(peak + CONTEXT_BYTES) / 1e9:.1f} GB by forecast, {usable / 1e9:.1f} GB free")
            fits |= {kin} if arm.method.in_backward == "none" else set()
    return too_large


def _kin(arm: Config) -> str:
    """What arms share that differ in their update schedule only."""
    same = copy.deepcopy(arm)
    same.method.in_backward, same.method.granularity, same.method.clip, same.method.name = "", "", "", ""
    same.accumulation_mode, same.seed, same.repeat, same.memory_cap_gb = None, 0, 1, None
    return make_arm(same).fingerprint


def forecast_config(arm: Config, capability: int) -> Config:
    """The forecast arm of a full-size arm: same model, schedule, optimizer and shapes, on fake tensors, uncapped."""
    forecast = copy.deepcopy(arm)
    scale = OmegaConf.load(conf_dir() / "scale" / "forecast.yaml")
    forecast.scale = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ScaleConfig), scale))
    forecast.scale.dtype = arm.scale.dtype
    length = arm.data.max_length
    forecast.data = DataConfig(name="synthetic_shapes", kind=arm.data.kind, source="synthetic", max_length=length)
    forecast.task, forecast.gpu = TaskConfig(), GpuConfig(compute_capability=capability)
    forecast.steps, forecast.warmup_steps, forecast.window_start = 2, 1, 2
    forecast.checkpoint_every, forecast.save_model, forecast.keep_weights = 0, False, False
    forecast.memory_cap_gb = None
    if arm.model.path and not arm.model.architecture:
        forecast.model.config = arm.model.path
    return forecast


def forecast_peak(arm: Config, capability: int) -> int | str:
    """Largest reserved bytes over the phases of the arm's forecast (of one rank), or why there is none."""
    forecast = forecast_config(arm, capability)
    with tempfile.TemporaryDirectory() as folder:
        forecast.runs_dir = folder
        record: dict[str, Any] = run(make_arm(forecast))
    if record["status"] != "ok":
        return str((record["error"] or {}).get("message"))
    phases = (record["memory"][name] for name in ("load", "warmup", "measured"))
    return max(phase["peak_reserved_bytes"] or 0 for phase in phases)
