"""Made-up records of the right shape: for tests and for timing the analysis. Their numbers mean nothing.

``python tests/bench analysis_speed`` times tables, figures and report over 500 of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from analysis import conf
from analysis.conf import SCALES
from analysis.run import write_figures, write_report, write_tables
from analysis.tables import TABLES
from analysis.tables.spec import TableSpec

PARAMETERS = {"olmoe": (6.919e9, 6.442e9, 16), "granite": (3.299e9, 3.020e9, 32), "nanowhale": (1.104e8, 2.458e7, 8)}
KEEPS = ("standard_global_clip", "standard_no_expert_clip", "standard_no_clip")  # methods that hold gradients
STEPS = 40
USUAL = {
    "model": "olmoe",
    "backend": "sonicmoe",
    "method": "sonar",
    "optimizer": "adamw",
    "batch_size": 2,
    "accumulation": 1,
    "accumulation_mode": "standard",
    "checkpointing": False,
    "memory_cap_gb": None,
    "data": "synthetic",
    "parallel": "none",
}
ENVIRONMENT = {
    "package_version": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "python": "3.11.7",
    "git_commit": None,
    "git_dirty": None,
    "device": "cpu",
    "device_name": "synthetic",
    "threads": 2,
}
SPEED = {"standard_global_clip": 1.0, "standard_no_expert_clip": 0.82, "sonar_per_expert": 1.1}
OWNERS = ["weights", "optimizer_state", "expert_gradients", "other_gradients", "activations", "temporaries"]


def record(axes: Mapping[str, Any], scale: str, experiment: str, seed: int = 42, **changes: Any) -> dict[str, Any]:
    """One valid record for these axes; ``changes`` replace whole sections or add keys at the top."""
    axes = dict(axes)
    task = axes.pop("task", "train")
    arm = {**USUAL, "experiment": experiment, "task": task, "scale": scale, **axes, "seed": seed}
    parts = [task if task != "train" else None, *(arm[k] for k in ("model", "backend", "method", "optimizer"))]
    parts += [f"bs{arm['batch_size']}", f"A{arm['accumulation']}", f"gc{int(arm['checkpointing'])}"]
    parts += [f"cap{arm['memory_cap_gb']}", f"s{seed}"]
    name = "-".join(str(part) for part in parts if part)
    made = {
        "schema_version": "1.0",
        "arm_id": name,
        "arm": arm,
        "config": {},
        "fingerprint": hashlib.sha256(json.dumps(arm, sort_keys=True).encode()).hexdigest(),
        "status": "ok",
        "error": None,
        "environment": dict(ENVIRONMENT),
        "data": {"name": "synthetic", "sha256": f"{seed:064d}", "max_length": 64 if scale == "smoke" else 256},
        **_numbers(arm, scale, random.Random(f"{name}{scale}")),
        "notes": [],
    }
    if task == "compare_weights":
        none = {"differing": 0, "total": 1000}
        made["compare"] = {"a": "one", "b": "other", "expert": none, "other": none}
    if task == "downstream":
        score = {"value": 0.5, "stderr": 0.01, "metric": "acc_norm", "n": 100}
        tasks = ("arc_challenge", "hellaswag", "mmlu", "local")
        made["downstream"] = {"tasks": dict.fromkeys(tasks, score)}
    return {**made, **changes}


def _numbers(arm: Mapping[str, Any], scale: str, chance: random.Random) -> dict[str, Any]:
    """The sections that hold numbers, from crude rules: the shape is right, the values mean nothing."""
    total, expert, layers = PARAMETERS.get(arm["model"], PARAMETERS["olmoe"])
    shrink = 0.008 if scale == "smoke" else 1.0
    total, expert = int(total * shrink), int(expert * shrink)
    calls = {"sonar": 2, "sonar_per_expert": 128, "optimizer_in_backward": 10}.get(arm["method"], 0) * layers
    level = 4.0 + 0.02 * chance.random() + 0.01 * len(arm["optimizer"])
    losses = [round(level + 3 * math.exp(-k / 12) + 0.02 * chance.random(), 5) for k in range(STEPS)]
    model = {"name": arm["model"], "parameters": total, "expert_parameters": expert, "other_parameters": total - expert}
    model |= {"layers": layers, "experts": 64, "dtype": "bfloat16"}
    model["weights"] = "pretrained" if scale == "paper" else "random"
    loss = {"train": losses, "heldout": losses[-1], "heldout_tokens": 900, "heldout_token_accuracy": 0.3}
    others = {"changed": 1, "total": total - expert}
    return {
        "model": model,
        "counts": {
            "optimizer_calls_per_step": calls + 1,
            "hook_firings_per_step": calls and 2 * layers,
            "skipped_steps": 0,
            "updates_per_step": arm["accumulation"] if calls else 1,
            "steps": STEPS,
        },
        "memory": _memory(arm, scale, total, expert, layers),
        "time": _time(arm, scale, chance),
        "loss": None if scale == "forecast" else loss,
        "grad_norm": {"scope": "all", "values": []},
        "weights": {"expert": {"changed": expert // 5, "total": expert}, "other": others},
        "timeline": timeline(arm["method"], layers, 2 * expert, 2 * total) if arm["experiment"] == "figure2" else None,
    }


def _memory(arm: Mapping[str, Any], scale: str, total: int, expert: int, layers: int) -> dict[str, Any]:
    kept = 1.0 if arm["method"] in KEEPS else 1 / layers
    states = {"adamw8bit": 2.0, "adamw": 4.0}.get(arm["optimizer"], 3.0)
    activations = 0.05 * total * arm["batch_size"] * (0.5 if arm["checkpointing"] else 1.0)
    peak = int(total * (2 + states) + max(activations, 2 * (expert * kept + total - expert)) + 0.2 * activations)
    reserved = None if scale == "smoke" else int(1.02 * peak)
    phase = {"peak_allocated_bytes": peak, "peak_reserved_bytes": reserved}
    return {
        "source": {"smoke": "tracker", "forecast": "forecast", "paper": "cuda"}[scale],
        **dict.fromkeys(("load", "warmup", "measured"), phase),
        "m_floor_bytes": 2 * expert,
        "m_floor_bound_bytes": 2 * expert // layers,
        "optimizer_state_bytes": int(states * total),
        "hidden_buffer_bytes": 0,
    }


def _time(arm: Mapping[str, Any], scale: str, chance: random.Random) -> dict[str, Any]:
    step = 0.12 * SPEED.get(arm["method"], 0.8) * (0.5 + 0.25 * arm["batch_size"])
    step *= (1 + 0.6 * (arm["accumulation"] - 1)) * (1 + 0.01 * chance.random())
    source = "forecast" if scale == "forecast" else "measured"
    clipping = 200 if arm["method"] == "standard_global_clip" else 15
    parts = {"forward_backward_ms": 550, "clipping_ms": clipping, "optimizer_ms": 180, "idle_ms": 70, "busy_ms": 930}
    return {
        "source": source,
        "step_s": [step] * STEPS,
        "window": [5, STEPS],
        "median_s": step,
        "supervised_tokens_per_s": 110 / step,
        "reason": None,
        "kernel_breakdown": {"source": source, **{k: v * step for k, v in parts.items()}},
        "forecast": {"host_curve": _hosts(step)} if scale == "forecast" else None,
    }


def _hosts(step: float) -> list[dict[str, float]]:
    return [{"host_speed": x, "step_ms": 1e3 * max(0.8 * step, step / x)} for x in (0.5, 1.0, 2.0, 4.0)]


def timeline(method: str, layers: int, expert_bytes: int, weight_bytes: int) -> dict[str, Any]:
    """A step in four events a layer: activations climb in forward, gradients in backward unless hooks free them."""
    each, frees = expert_bytes // layers, method not in KEEPS
    still = [weight_bytes, 2 * weight_bytes]
    rows, marks = [], [{"event": 0, "label": "forward"}]
    for k in range(layers):
        rows += [[*still, 0, 0, (k + 1) * each // 8, t * each // 10] for t in (1, 3, 2, 0)]
    marks.append({"event": len(rows), "label": "backward"})
    for k in range(layers):
        held = each if frees else (k + 1) * each
        kept, live = k * each // 60, (layers - k) * each // 8
        rows += [[*still, 0 if frees and t == 0 else held, kept, live, t * each // 10] for t in (1, 3, 2, 0)]
    marks.append({"event": len(rows), "label": "optimizer"})
    rows += [[*still, 0 if frees else layers * each, 0, 0, 0]] * (layers // 2) + [[*still, 0, 0, 0, 0]]
    return {"owners": OWNERS, "events": list(range(len(rows))), "bytes": rows, "marks": marks, "layers": layers}


def arms() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(experiment, scale, axes) of every expected cell of every table and of Figure 2, each once."""
    seen = set()
    for spec in (t for t in TABLES.values() if isinstance(t, TableSpec)):
        for scale in (s for s in SCALES if s in spec.scales):
            wheres = [c.where for c in spec.columns_at(scale, [])]
            for axes in ({**row, **where} for row in spec.rows(scale) for where in wheres):
                key = (spec.experiment, scale, repr(sorted(axes.items(), key=str)))
                if key not in seen:
                    seen.add(key)
                    yield spec.experiment, scale, axes
    swept = conf.arms("fits", "forecast")
    for model, optimizer in itertools.product(swept["model"][:2], swept["optimizer"][:2]):
        for method in (*swept["method"], "sonar_per_expert"):
            yield "fits", "forecast", {"model": model, "optimizer": optimizer, "method": method}
    for scale in SCALES:
        for method in conf.arms("figure2", scale)["method"]:
            yield "figure2", scale, {"method": method, "backend": conf.arms("figure2", scale)["backend"][0]}


def put(root: Path, made: dict[str, Any], label: str | None = None) -> Path:
    """Write one record where a run would; ``label`` puts it into a reference set."""
    arm = made["arm"]
    folder = root / (f"reference/{label}" if label else "") / arm["experiment"] / arm["scale"] / made["arm_id"]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "record.json"
    path.write_text(json.dumps(made, allow_nan=False), encoding="utf-8")
    return path


def fill(root: Path, count: int | None = None, seeds: tuple[int, ...] = (42,)) -> int:
    """Write records of every expected arm for each seed; with ``count``, of more seeds until there are that many."""
    written, wanted = 0, list(arms())
    seeds = seeds if count is None else tuple(range(42, 42 + 1 + count // len(wanted)))
    for seed in seeds:
        for experiment, scale, axes in wanted:
            own = axes.get("seed")
            if own is not None and seed != seeds[0]:
                continue  # the table names its seeds itself
            bare = {k: v for k, v in axes.items() if k != "seed"}
            for each in own if isinstance(own, tuple) else (own if own is not None else seed,):
                put(root, record(bare, scale, experiment, each))
                written += 1
                if count is not None and written >= count:
                    return written
    return written


def bench(count: int = 500) -> dict[str, float]:
    """Seconds for tables, figures and report over ``count`` synthetic records, and their sum (goal: under 10 s).

    ``cpu`` is the processor time of all processes together, which a busy neighbour does not change.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        root, out = Path(folder) / "runs", Path(folder) / "out"
        fill(root, count)
        times: dict[str, float] = {}
        cpu = _cpu_seconds()
        for name, work in (
            ("tables", lambda: write_tables(root, out, name=None, scale=None, show=False)),
            ("figures", lambda: write_figures(root, out, name=None, scale=None)),
            ("report", lambda: write_report(root, out)),
        ):
            start = time.perf_counter()
            work()
            times[name] = time.perf_counter() - start
        cpu = _cpu_seconds() - cpu
    return {**times, "total": sum(times.values()), "cpu": cpu}


def _cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
