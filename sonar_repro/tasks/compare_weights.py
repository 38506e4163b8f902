"""``task=compare_weights``: two arms' final weights, element by element (Sonar-MoE Table 4)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .. import records
from ..config.schema import Config
from ..errors import UserError
from ..records import WEIGHTS_FILE


def run(config: Config, report: Any) -> None:
    """Compare the weights in the folders that the runner filled in, and record counts by expert and other."""
    folders = {role: Path(folder) for role, folder in config.task.inputs.items()}
    sides = {role: records.load(folder / "record.json") for role, folder in folders.items()}
    for key in ("sha256", "name"):
        values = {role: (side["data"] or {}).get(key) for role, side in sides.items()}
        if len(set(values.values())) != 1:
            raise UserError(f"task.pair={config.task.pair}: data {key} differs between the two arms ({values})")
    report.phase("compare")
    counts = compare(folders["a"] / WEIGHTS_FILE, folders["b"] / WEIGHTS_FILE)
    report.section("compare", {"a": sides["a"]["arm_id"], "b": sides["b"]["arm_id"], **counts})
    for name in ("environment", "data", "model", "counts", "loss"):
        report.section(name, sides["a"][name])
    report.note("deterministic algorithms: " + ("on" if config.deterministic else "off"))


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Count the elements that differ between two safetensors files, one tensor at a time.

    Bit patterns are compared, so that two NaNs of the same bits are equal and 0.0 differs from -0.0.

    Returns:
        ``{"expert": {"differing", "total"}, "other": {...}}``.

    Raises:
        UserError: the files do not hold the same tensors (names, shapes, dtypes).
    """
    counts = {"expert": {"differing": 0, "total": 0}, "other": {"differing": 0, "total": 0}}
    for name, expert, left, right in _pairs(a, b):
        if left.shape != right.shape or left.dtype != right.dtype:
            raise UserError(
                f"{name}: {tuple(left.shape)} {left.dtype} in {a}, {tuple(right.shape)} {right.dtype} in {b}"
            )
        kind = counts["expert" if expert else "other"]
        kind["differing"] += int((bits(left) != bits(right)).sum())
        kind["total"] += left.numel()
    return counts


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers of its width."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _pairs(a: Path, b: Path) -> Iterator[tuple[str, bool, torch.Tensor, torch.Tensor]]:
    with safe_open(a, "pt") as left, safe_open(b, "pt") as right:
        odd = set(left.keys()) ^ set(right.keys())
        if odd:
            raise UserError(f"{sorted(odd)[0]}: in only one of {a} and {b}")
        experts = set(json.loads(left.metadata()["experts"]))
        for name in left.keys():  # noqa: SIM118 (safe_open has no __iter__)
            yield name, name in experts, left.get_tensor(name), right.get_tensor(name)
