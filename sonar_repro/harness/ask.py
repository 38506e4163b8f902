"""``from sonar_repro import forecast``: the answer of ``sonar-repro fit`` in a program, and for a module of yours."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..config.schema import GpuConfig
    from ..forecast.fit import Fit


def forecast(
    model: str | Path | Any,
    *,
    method: str = "standard_global_clip",
    optimizer: str = "adamw",
    backend: str = "grouped_mm",
    batch: int = 1,
    length: int = 2048,
    checkpointing: bool = False,
    gpu: str | None = None,
    settings: Sequence[str] = (),
    loss: Callable[[nn.Module], Tensor] | None = None,
    hyper: Mapping[str, Any] | None = None,
) -> Fit:
    """Peak memory, its parts, and step time per card of a training set-up, on fake tensors.

    Args:
        model: a name of ``conf/model``, a config.json or its folder, a transformers config; or with ``loss`` an
            ``nn.Module`` of your own (its weights are not read and it is not changed).
        method, optimizer, backend, batch, length, checkpointing: as the options of ``sonar-repro fit``.
        gpu: cards with commas between them; None: all of ``conf/gpu``.
        settings: further settings of the arm as the command line takes them (``accumulation=4``).
        loss: for a model of your own: runs forward on fake tensors and returns a 0-d loss. It makes its inputs itself
            (``torch.empty(4, 128, 64)``), at the sizes that are asked about.
        hyper: for a model of your own: the optimizer's hyperparameters.

    Returns:
        :class:`sonar_repro.forecast.fit.Fit`: bytes, milliseconds and tokens per second. For a model of your own
        nothing is known of tokens (None).

    Raises:
        UserError: what cannot be asked or cannot run on fake tensors; the message names it and the way out.
    """
    from ..forecast import fit

    cards = fit.cards_named(gpu)
    if loss is not None:
        return _own(model, loss, method, optimizer, dict(hyper or {}), cards)
    from . import fit_command

    wanted = [f"method={method}", f"optimizer={optimizer}", f"backend={backend}", f"batch_size={batch}"]
    wanted += [f"data.max_length={length}", f"checkpointing={str(checkpointing).lower()}", *settings]
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(model, "to_json_string"):  # a transformers config
            file = Path(folder) / str(model.model_type) / "config.json"
            file.parent.mkdir()
            file.write_text(json.dumps(json.loads(model.to_json_string(use_diff=False))), encoding="utf-8")
            model = file
        arm = fit_command.Question.composed([*wanted, fit_command.model_override(str(model))])
        return fit.forecast_arm(arm, cards)


def _own(
    module: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    method: str,
    optimizer: str,
    hyper: dict[str, Any],
    cards: Sequence[GpuConfig],
) -> Fit:
    """A module and a loss of the user's: three recorded steps of one shape, so nothing is drawn or interpolated."""
    from ..forecast import fit, host_costs
    from ..forecast.memory import ForecastMeter
    from ..forecast.recorder import StepRecorder
    from ..forecast.step_time import profile, simulate

    if not hasattr(module, "parameters"):
        raise UserError(f"forecast: loss= goes with an nn.Module, not with {type(module).__name__}")
    meter = ForecastMeter(recorder=StepRecorder())
    model = _run_own(meter, _on_meta(module), loss, method, optimizer, hyper)
    memory = meter.read()["measured"]
    peaks = (memory["peak_allocated_bytes"], memory["peak_reserved_bytes"])
    peak = meter.breakdown(len({place.layer for place in _experts(model)}))
    recorded = profile(
        meter.recorder.steps, host_costs.load("amd_epyc"), sum(p.requires_grad for p in model.parameters())
    )
    judged = []
    for card in cards:
        timed = card.bandwidth_gb_s and card.bf16_tflops
        filled = {"step_ms": round(simulate(recorded, card, [1])[0]["step_ms"], 4)} if timed else {}
        judged.append(fit.on_card(card, meter, *peaks, {"filled": filled}))
    name = type(module).__name__
    return fit.Fit(
        arm_id=f"{name}-{method}-{optimizer}",
        arm={"model": name, "method": method, "optimizer": optimizer},
        batch=0,
        length=0,
        peak_allocated_bytes=peaks[0],
        peak_reserved_bytes=peaks[1],
        breakdown=peak.with_fragmentation(peaks[1]),
        peak_when=peak.when,
        parameters=sum(p.numel() for p in model.parameters()),
        cards=judged,
    )


def _run_own(
    meter: Any,
    shapes: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    method: str,
    optimizer: str,
    hyper: dict[str, Any],
) -> nn.Module:
    """Train ``shapes`` (on the meta device) under the meter, on fake tensors; returns the fake model."""
    from ..forecast.fake_model import fake_environment
    from ..methods import ScheduledOptimizer
    from ..optim.factory import make_factory

    with fake_environment() as fake, meter.recorder, meter:
        meter.phase("load")
        model = fake.adopt(shapes).train()
        meter.attach(model, [tensor.parameter for tensor in _experts(model)])
        schedule = ScheduledOptimizer(model, make_factory(optimizer, **{"lr": 1e-5, **hyper}), method)

        def step() -> None:
            schedule.zero_grad(set_to_none=True)
            schedule.prepare()
            for _ in schedule.backward_passes():
                loss(model).backward()
            schedule.step()

        meter.run_steps(step)
    return model


def _experts(model: nn.Module) -> list[Any]:
    from ..models.experts import find_expert_tensors

    return find_expert_tensors(model)


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy of the module whose parameters and buffers are on the meta device: no byte of it is copied."""
    import torch
    from torch import nn

    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        new: torch.Tensor = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    return copy.deepcopy(module, memo)
