"""One command's arms: what it needs before it starts, what it shows, and how it exits."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from ..config.identity import parameter_count
from ..config.schema import FILES_ASIDE, Config
from ..errors import UserError
from .prerequisites import check_weights, prerequisites
from .progress import ArmProgress, fail
from .runner import Arm, check_writable, make_arm, recorded, run, state

WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}


def preflight(configs: list[Config]) -> None:
    """Refuse what cannot work before anything is built: folder, device, disk. Raises UserError."""
    from ..data.sources import check_available
    from ..machine import cuda_device_count
    from ..models.files import check_available as check_checkpoint
    from .memory_check import check_card

    check_writable(configs[0].runs_dir)
    for config in configs:
        prerequisites(config)
        if config.dry_run:
            continue  # a plan shows what is needed; it refuses nothing
        check_weights(config)
        if config.scale.device == "cuda" and cuda_device_count() == 0:
            raise UserError(
                f"scale={config.scale.name}: needs a CUDA GPU and none is visible; "
                "use scale=smoke (tiny, any machine) or scale=forecast (full-size memory, no GPU)"
            )
        if config.parallel.backend == "nccl" and cuda_device_count() == 0:
            raise UserError("parallel.backend=nccl: needs CUDA GPUs and none is visible; use gloo or auto")
    for key in FILES_ASIDE:
        files = [getattr(config.task, key) for config in configs if getattr(config.task, key)]
        if len(files) > 1:
            raise UserError(f"task.{key}={files[0]}: {len(files)} arms would write one file; choose one arm")
    check_disk([config for config in configs if not config.dry_run])
    for data in {str(c.data): c.data for c in configs if c.data.source != "synthetic" and not c.dry_run}.values():
        check_available(data)
    for model in {str(c.model): c.model for c in configs if c.model.weights == "pretrained" and not c.dry_run}.values():
        check_checkpoint(model)
    check_card(configs)


def check_disk(configs: list[Config]) -> None:
    """Refuse before anything runs when the weights that a sweep keeps would not fit on the disk.

    Kept: every saved model and weight file, those of the arms that others need first included. On top comes the largest
    checkpoint: weights and two moments, twice, as the old one goes only when the new one stands.
    """
    kept: dict[str, int] = {}
    checkpoint = 0
    for config in [side for c in configs for side in (c, *prerequisites(c).values()) if c.scale.device != "fake"]:
        weights = (parameter_count(config.model, config.scale.name) or 0) * WEIGHT_BYTES[config.scale.dtype]
        kept[str(make_arm(config).folder)] = weights * (config.save_model + config.keep_weights)
        checkpoint = max(checkpoint, 6 * weights if config.checkpoint_every else 0)
    need = sum(kept.values()) + checkpoint
    free = shutil.disk_usage(configs[0].runs_dir).free if configs else 0
    if need > free:
        raise UserError(
            f"runs_dir={configs[0].runs_dir}: {free / 1e9:.1f} GB free and the weights need {need / 1e9:.1f} GB; "
            "give another folder with runs_dir=PATH or set checkpoint_every=0 save_model=false"
        )


class Command:
    """The state of one command. There is one a process: Hydra calls us back without a handle of ours."""

    _current: Command | None = None

    def __init__(self) -> None:
        self.arms: list[Arm] = []
        self.results: list[dict[str, Any]] = []
        self.shown: ArmProgress | None = None
        self.mistake: Exception | None = None

    @classmethod
    def begin(cls) -> Command:
        """A fresh state for a new command."""
        cls._current = cls()
        return cls._current

    @classmethod
    def current(cls) -> Command:
        if cls._current is None:
            cls._current = cls()
        return cls._current

    def progress(self) -> ArmProgress:
        self.shown = ArmProgress(len(self.arms))
        return self.shown

    def run(self, arm: Arm) -> dict[str, Any]:
        """Run one arm in this process's sweep and take its outcome."""
        if self.shown:
            self.shown.start(arm.arm_id)
        record = run(arm, self.shown.update) if self.shown else run(arm)
        result = {k: record.get(k) for k in ("arm_id", "status", "error", "outcome", "wall_s")}
        self.add(result)
        return result

    def report_recorded(self) -> set[Arm]:
        """Print the arms that are recorded already; return those that are not."""
        todo = set()
        for arm in self.arms:
            record = None if arm.config.force else recorded(arm)
            if record:
                known = {"arm_id": arm.arm_id, "status": record["status"], "error": record["error"]}
                self.add({**known, "outcome": "recorded", "wall_s": None})
            else:
                todo.add(arm)
        return todo

    def add(self, result: dict[str, Any]) -> None:
        """Take one arm's outcome; print its line when this process shows the sweep."""
        self.results.append(result)
        if self.shown:
            self.shown.finish(result["arm_id"], result["status"], result["outcome"], result["error"], result["wall_s"])

    def collect(self, returns: Any) -> None:
        """Add the outcomes of jobs that ran in another process (joblib, submitit)."""
        known = {r["arm_id"] for r in self.results}
        for job in returns:
            result = job.return_value  # re-raises what the launcher itself could not do
            if result and result["arm_id"] not in known:
                self.add(result)

    def print_plan(self) -> None:
        """``dry_run=true``: the arms, what each needs, and what starting it would do."""

        table = Table(title=f"{len(self.arms)} arms, nothing was run", title_justify="left")
        for name in ("arm", "scale", "steps", "parameters", "data", "device", "backend", "would"):
            table.add_column(name, overflow="fold")
        for arm in self.arms:
            config = arm.config
            count = parameter_count(config.model, config.scale.name)
            parameters = "?" if count is None else f"{count / 1e6:,.1f}M"
            row = (arm.arm_id, config.scale.name, str(config.steps), parameters, config.data.name, config.scale.device)
            table.add_row(*row, config.backend.name, state(arm))
        width = None if sys.stdout.isatty() else 150
        Console(width=width).print(table)

    def exit_code(self) -> int:
        """0: no arm failed (oom, unsupported are results); 1: one did, or none could run; 2: the command was wrong."""
        bad = [r for r in self.results if r["status"] in ("failed", "crashed")]
        mistakes = [r for r in bad if (r["error"] or {}).get("user_error")]
        for message in dict.fromkeys(r["error"]["message"] for r in mistakes):
            fail(message)
        if bad and len(mistakes) == len(bad):
            return 2
        if bad:
            fail(f"{len(bad)} of {len(self.results)} arms failed: " + ", ".join(r["arm_id"] for r in bad))
            return 1
        unsupported = [r for r in self.results if r["status"] == "unsupported"]
        if unsupported and len(unsupported) == len(self.results):
            for message in dict.fromkeys(r["error"]["message"] for r in unsupported):
                fail(message)
            return 1
        return 0
