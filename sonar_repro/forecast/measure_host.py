"""Measure what operators cost this machine's host: ``python -m sonar_repro.forecast.measure_host FILE.json``.

The real model classes and the real training step run on tensors of a few hundred elements, where Python, dispatcher and
autograd are all that takes time. Each step runs twice: as it is (its time is the truth) and with a dispatch mode that
stamps the end of every operator. What the mode itself costs is the difference, taken off evenly over the operators of
forward, backward and the end of the step. Expert kernels are stand-ins that allocate only; what launching a kernel
costs is not here (it needs a GPU) and is a constant of :mod:`.host`.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import UserError
from ..machine import cpu_name
from ..methods import Schedule, ScheduledOptimizer, ranges
from ..optim.factory import make_factory
from ..training.step import training_step
from . import footprints
from .kernel_model import rule_of
from .recorder import Context

REPEATS = 24
#: The whole set is measured so many times, minutes apart in effect; of each arm the fastest pass counts.
PASSES = 5
#: CPU time of the thread: waiting for a busy neighbour is not the host's cost (backward runs in this thread on a CPU).
clock = time.thread_time_ns
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
METHODS = ("standard_global_clip", "sonar", "sonar_per_expert", "optimizer_in_backward")
#: (model, expert kernels, method, optimizer): between them every operator of the papers' arms runs.
RUNS = [(model, "sonicmoe_footprint", method, "adamw") for model in ("olmoe", "granitemoe") for method in METHODS]
RUNS += [("granitemoe", "scattermoe_footprint", "sonar", "adamw"), ("olmoe", "grouped_mm", "sonar", "adamw")]
RUNS += [("olmoe", "sonicmoe_footprint", m, o) for m in ("standard_global_clip", "sonar") for o in ("sgd", "lion")]
RUNS += [("olmoe", "sonicmoe_footprint", m, "adamw8bit") for m in ("standard_global_clip", "sonar")]
#: bitsandbytes takes its 32-bit kernel for small tensors, behind the same Python; quantising on a CPU is arithmetic.
STANDS_FOR = {"bitsandbytes::optimizer_update_32bit": "bitsandbytes::optimizer_update_8bit_blockwise"}
#: Their time on a CPU is their arithmetic, not the host's.
NOT_HOST = ("aten::_grouped_mm",)
REGIONS = ("head", "forward", "backward", "end")


class _Stamps(TorchDispatchMode):
    """The end of every operator: (ns, name, context, tensors)."""

    def __init__(self, region: list[str]) -> None:
        super().__init__()
        self.region = region
        self.seen: list[tuple[int, str, str, int]] = []
        self._context = Context()
        self._exists: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        exists = self._exists.get(func)
        if exists is None:
            exists = self._exists[func] = rule_of(func) is not None
        if exists:
            name = func._schema.name
            count = len(args[0]) if args and isinstance(args[0], (list, tuple)) else 1
            self.seen.append((clock(), name, self._context(name, self.region[0] == "end"), count))
        return result


class _Step:
    """One arm's training step, with the time of each region's start."""

    def __init__(self, model_type: str, experts: str, method: str, kind: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **SIZES)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=experts)
        self.model.train()
        schedule, factory = Schedule.named(method), make_factory(kind, lr=1e-6)
        self.optimizer = ScheduledOptimizer(self.model, factory, schedule, on_nonfinite="off")  # as arms run
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 1.0)
        ids = torch.ones(2, 8, dtype=torch.long)
        self.batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        self.region = ["head"]
        self.marks: list[int] = []
        self.held: list[Any] = []
        self.model.register_forward_pre_hook(lambda *_: self._mark("forward"))
        self.model.register_forward_hook(lambda *_: self._mark("backward"))
        self.optimizer.register_step_pre_hook(lambda *_: self._mark("end"))
        self.parameters = sum(1 for _ in self.model.parameters())

    def _mark(self, region: str) -> None:
        self.region[0] = region
        self.marks.append(clock())

    def run(self) -> list[int]:
        """One step; returns the ns at the start of each region and at the end."""
        self.marks = []
        self._mark("head")
        training_step(self.model, self.optimizer, self.scheduler, [self.batch], held=self.held)
        self.marks.append(clock())
        return self.marks


@contextmanager
def _quiet() -> Iterator[None]:
    threads, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collects:
            gc.enable()


def measure(model_type: str, experts: str, method: str, kind: str, repeats: int = REPEATS) -> dict[str, Any]:
    """Host time of one arm's operators, in order, and of its whole step.

    Returns:
        ``operators``: (name, context, tensors, us), ``head_us``, ``tail_us``, ``step_us`` (without the mode),
        ``parameters``. Times are lowest deciles over ``repeats``: a busy neighbour only adds.
    """
    with _quiet(), footprints.on_real_tensors():
        step = _Step(model_type, experts, method, kind)
        for _ in range(3):
            step.run()
        bare = [_regions(step.run()) for _ in range(repeats)]
        truth = {region: _decile([one[region] for one in bare]) for region in REGIONS}
        with ranges.watching():
            runs = []
            for _ in range(repeats):
                stamps = _Stamps(step.region)
                with stamps:
                    marks = step.run()
                runs.append((marks, stamps.seen))
    operators, tail = _corrected(runs, truth)
    return {
        "operators": operators,
        "head_us": truth["head"],
        "tail_us": tail,
        "step_us": sum(truth.values()),
        "parameters": step.parameters,
    }


def _regions(marks: list[int]) -> dict[str, float]:
    return {region: (b - a) / 1e3 for region, a, b in zip(REGIONS, marks, marks[1:])}


def _decile(values: list[float]) -> float:
    return statistics.quantiles(values, n=10)[0] if len(values) > 1 else values[0]


def _corrected(runs: list[Any], truth: dict[str, float]) -> tuple[list[tuple[str, str, int, float]], float]:
    """Operators with their time, the mode's own share taken off so that each region adds up to ``truth``."""
    gaps: list[list[float]] = []
    region_of: list[str] = []
    tails: list[float] = []
    for marks, seen in runs:
        at, row, where = marks[1], [], []
        for stamp, _, _, _ in seen:
            region = _region_at(stamp, marks)
            row.append((stamp - at) / 1e3)
            where.append(region)
            at = stamp
        gaps.append(row)
        tails.append((marks[-1] - at) / 1e3)
        region_of = where
    if len({len(row) for row in gaps}) != 1:
        raise RuntimeError("steps that should be the same ran different operators: raise the warm-up")
    typical = [_decile(list(column)) for column in zip(*gaps)]
    tail = _decile(tails)
    truth = {**truth, "end": truth["end"] - tail}
    scaled = list(typical)
    for region in ("forward", "backward", "end"):
        places = [i for i, r in enumerate(region_of) if r == region]
        if places:
            for i, value in zip(places, _take_off([typical[i] for i in places], truth[region])):
                scaled[i] = value
    seen = runs[-1][1]
    return [(name, context, count, us) for (_, name, context, count), us in zip(seen, scaled)], tail


def _region_at(stamp: int, marks: list[int]) -> str:
    for region, start in reversed(list(zip(REGIONS, marks))):
        if stamp >= start:
            return region
    return "head"


def _take_off(gaps: list[float], total: float) -> list[float]:
    """Take the same time off each gap, none below 0, so that the sum is ``total``."""
    if sum(gaps) <= total:
        return gaps
    low, high = 0.0, max(gaps)
    for _ in range(50):
        middle = (low + high) / 2
        if sum(max(0.0, gap - middle) for gap in gaps) > total:
            low = middle
        else:
            high = middle
    return [max(0.0, gap - high) for gap in gaps]


def summarise(measured: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """A host file from measured arms: means by context and operator."""
    calls: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    tensors: dict[str, dict[str, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
    for one in measured:
        for operator, context, count, us in one["operators"]:
            if operator in NOT_HOST:
                continue
            operator = STANDS_FOR.get(operator, operator)
            if count > 1 and ("_foreach" in operator or "_fused" in operator):
                tensors[context][operator].append((us, count))
            else:
                calls[context][operator].append(us)
    mean = {c: {k: round(statistics.fmean(v), 3) for k, v in sorted(by.items())} for c, by in calls.items()}
    parameters = sum(one["parameters"] for one in measured)
    return {
        "name": name,
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "measured_by": "python -m sonar_repro.forecast.measure_host",
        "unit": "microseconds of CPU time, lowest decile of repeats, best of 5 passes; kernel launches not included",
        "operators": mean,
        "tensors": {
            c: {k: round(sum(u for u, _ in v) / sum(n for _, n in v), 3) for k, v in sorted(by.items())}
            for c, by in tensors.items()
        },
        "default": {c: round(statistics.fmean([u for v in by.values() for u in v]), 3) for c, by in calls.items()},
        "head_us": round(sum(one["head_us"] for one in measured) / parameters, 4),
        "tail_us": round(sum(one["tail_us"] for one in measured) / parameters, 4),
    }


def main(arguments: list[str]) -> int:
    """Write a host file. Exit code 2 for a mistake in the command."""
    if len(arguments) != 1 or not arguments[0].endswith(".json"):
        raise UserError("python -m sonar_repro.forecast.measure_host FILE.json: give one file to write")
    path = Path(arguments[0])
    if path.exists() or not (path.absolute().parent.is_dir() and os.access(path.absolute().parent, os.W_OK)):
        raise UserError(f"{path}: is there already, or its folder is not there or not writable; give another file")
    footprints.register()
    print(f"{len(RUNS)} tiny arms, {PASSES} passes: some five minutes on a quiet machine, and only a quiet one counts")
    best: dict[tuple, dict[str, Any]] = {}
    for number in range(PASSES):
        for run in RUNS:
            try:
                one = measure(*run)
            except UserError as error:  # an optimizer whose package is not installed
                print(f"{' '.join(run)}: left out ({error})")
                continue
            if run not in best or one["step_us"] < best[run]["step_us"]:
                best[run] = one
        print(
            f"pass {number + 1} of {PASSES}: {sum(b['step_us'] for b in best.values()) / 1e3:.1f} ms in all arms' steps"
        )
    steps = {"-".join(run): round(one["step_us"], 1) for run, one in best.items()}
    data = {**summarise(list(best.values()), path.stem), "steps_us": steps}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}: use it with host={path}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
