"""What runs inside an arm's process: set-up, the task, and one message back to the runner, whatever happens."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from ..errors import Unsupported, UserError

# name -> "module:function"; a function takes (Config, Reporter) and returns the record's sections.
TASKS = {
    "train": "sonar_repro.training.train:run",
    "compare_weights": "sonar_repro.tasks.compare_weights:run",
    "downstream": "sonar_repro.tasks.downstream:run",
}
FORECAST = "sonar_repro.forecast.task:run"  # of task=train on fake tensors

# What CUDA and its libraries say when memory outside PyTorch's allocator (context, handles, workspaces) runs out.
OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class Reporter:
    """The arm's line to the runner: phase, progress, and the sections of the record that are already known."""

    def __init__(self, connection: Any, arm_dir: Path) -> None:
        self.connection = connection
        self.arm_dir = arm_dir
        self.phase_name = "start"
        self.sections: dict[str, Any] = {"notes": []}
        self._last_sent = 0.0

    def phase(self, name: str) -> None:
        """Name what is going on; an error is reported with the phase in which it happened."""
        self.phase_name = name
        self._send(("phase", name))

    def step(self, step: int, total: int, **shown: float | None) -> None:
        """One finished step. At most twenty messages a second: progress must cost nothing measurable."""
        self.phase_name = f"step {step}"
        now = time.monotonic()
        if now - self._last_sent > 0.05 or step == total:
            self._last_sent = now
            self._send(("step", (step, total, shown)))

    def section(self, name: str, value: Any) -> None:
        """Hand over one section of the record; kept even when the arm ends badly later."""
        self.sections[name] = value

    def note(self, text: str) -> None:
        """A sentence for the record's ``notes``."""
        self.sections["notes"].append(text)

    def forward(self, kind: str, value: Any) -> None:
        """Pass on a message of another process of this arm."""
        if kind == "phase":
            self.phase(value)
        else:
            step, total, shown = value
            self.step(step, total, **shown)

    def _send(self, message: Any) -> None:
        if self.connection is not None:
            self.connection.send(message)


def resolve_task(name: str, fake: bool = False) -> Any:
    """Import a task's function: a name in TASKS, or ``module:function`` for a task of your own. UserError otherwise."""
    import importlib

    if name not in TASKS and ":" not in name:
        raise UserError(f"task.name={name}: runs no arm; choose one of {', '.join(TASKS)} or give module:function")
    place = FORECAST if fake and name == "train" else TASKS.get(name, name)
    module, function = place.split(":")
    return getattr(importlib.import_module(module), function)


def classify(error: BaseException) -> str:
    """Status of an arm that raised: oom | unsupported | failed."""
    if isinstance(error, Unsupported):
        return "unsupported"
    names = {t.__name__ for t in type(error).__mro__}
    told = isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in OUT_OF_MEMORY)
    return "oom" if told or names & {"OutOfMemoryError", "MemoryError", "ForecastOutOfMemory"} else "failed"


def execute(config: Any, reporter: Reporter) -> tuple[str, dict[str, Any] | None, dict[str, Any]]:
    """Run the arm, in this process or in a group of workers."""
    if config.parallel.processes == 1 or config.scale.device == "fake":  # a forecast is rank 0's, in one process
        return execute_here(config, reporter)
    from ..training.ranks import launch

    return launch(config, reporter, f"{__name__}:execute_rank")


def execute_rank(config: Any, connection: Any, folder: Path) -> tuple[str, dict[str, Any] | None, dict[str, Any]]:
    """One rank of an arm: as alone, with a connection on rank 0 only."""
    return execute_here(config, Reporter(connection, folder))


def execute_here(config: Any, reporter: Reporter) -> tuple[str, dict[str, Any] | None, dict[str, Any]]:
    """Run the task. Returns (status, error, sections) and never raises what an arm may raise.

    The exception is dropped before anything else is done: its traceback would keep every tensor of the arm alive
    (pytorch#27600).
    """
    try:
        resolve_task(config.task.name, config.scale.device == "fake")(config, reporter)
        return "ok", None, reporter.sections
    except Exception as error:
        status = classify(error)
        message = str(error).strip() or type(error).__name__
        described = {"type": type(error).__name__, "message": message, "phase": reporter.phase_name}
        described["user_error"] = isinstance(error, UserError)
        known = isinstance(error, (UserError, Unsupported)) or type(error).__name__ == "ForecastOutOfMemory"
        described["traceback"] = None if known else traceback.format_exc()
    return status, described, reporter.sections


def _die_with_parent() -> None:
    """End this process when the runner ends, by whatever signal: an orphan would hold the GPU."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL) if sys.platform == "linux" else None
    parent = parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True, name="die-with-parent").start()


def _private_progress_lock() -> None:
    """tqdm's default lock is a named semaphore: the hard exit would leave it behind, and the user would read of it."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def main(connection: Any, config_data: dict[str, Any], arm_dir: str, environment: dict[str, str]) -> None:
    """Entry of the child process: everything it prints goes to ``log.txt`` in the arm's folder."""
    os.environ.update(environment)
    os.setpgrp()
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's to handle
    log = os.open(Path(arm_dir) / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _private_progress_lock()
    from ..config.schema import from_dict

    config = from_dict(config_data)
    reporter = Reporter(connection, Path(arm_dir))
    outcome = execute(config, reporter)
    if outcome[1] and outcome[1].get("traceback"):
        print(outcome[1]["traceback"], file=sys.stderr, flush=True)
    connection.send(("result", outcome))
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing that a library registered at exit may turn a finished arm into a crashed one
