"""``task=doctor``: what runs on this machine, and for what does not, why and what to do."""

from __future__ import annotations

import importlib.util

from rich.console import Console
from rich.table import Table

from ..config.schema import Config


def run(config: Config) -> None:
    """Print the machine, then a line for each backend, optimizer and extra."""
    import torch

    from ..training.process import environment

    device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console(soft_wrap=True)
    facts = environment(config, device, "-", None, "-")
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers", "python"))
    console.print(f"{facts['device_name']}  |  {versions}")
    table = Table("part", "name", "runs here", "why not, and the way out", title_justify="left")
    for part, name, reason in checks(device):
        table.add_row(part, name, "[green]yes[/]" if reason is None else "[yellow]no[/]", reason or "")
    console.print(table)


def checks(device: str) -> list[tuple[str, str, str | None]]:
    """(part, name, why it cannot run or None) for everything an arm may choose."""
    from ..kernels import BACKENDS, status

    rows: list[tuple[str, str, str | None]] = [("backend", name, status(name, device)) for name in BACKENDS]
    rows += [("optimizer", name, None) for name in ("adamw", "sgd", "lion")]
    rows.append(("optimizer", "adamw8bit", _package("bitsandbytes", "bnb")))
    rows.append(("task", "downstream", _package("lm_eval", "eval")))
    rows.append(("launcher", "joblib", _package("hydra_plugins.hydra_joblib_launcher", "slurm")))
    rows.append(("launcher", "submitit_slurm", _package("hydra_plugins.hydra_submitit_launcher", "slurm")))
    rows.append(("scale", "smoke", None))
    rows.append(("scale", "forecast", None))
    rows.append(
        (
            "scale",
            "paper",
            None if device == "cuda" else "needs a CUDA GPU; scale=forecast gives its memory without one",
        )
    )
    return rows


def _package(module: str, extra: str) -> str | None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    return None if found else f"not installed; pip install 'sonar_repro[{extra}]'"
