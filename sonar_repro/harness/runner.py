"""arm -> child process -> record. Skips what is recorded; leaves a row for every arm, whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import records
from ..config.identity import arm_id, axes, drop_guard, drop_titles, fingerprint
from ..config.schema import Config
from ..errors import UserError
from ..records import WEIGHTS_FILE
from ..tasks import missing_library
from . import gpu_locks
from .prerequisites import delivered, prerequisites


@dataclass(frozen=True)
class Arm:
    """One arm with its identity and its place on disk."""

    config: Config
    arm_id: str
    fingerprint: str
    folder: Path
    overrides: tuple[str, ...] = ()  # the command's own; they decide whether the id needs a suffix

    def __hash__(self) -> int:
        return hash((self.folder, self.fingerprint))

    @property
    def record_path(self) -> Path:
        return self.folder / "record.json"


def make_arm(config: Config, overrides: list[str] | None = None) -> Arm:
    """Name an arm: runs/<experiment>/<scale>/<arm-id>."""
    name = arm_id(config, overrides)
    folder = Path(config.runs_dir) / config.experiment_name / config.scale.name / name
    return Arm(config, name, fingerprint(config), folder, tuple(overrides or ()))


def check_writable(runs_dir: str) -> None:
    """Raise UserError, before anything runs, when records could not be written."""
    path = Path(runs_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"runs_dir={runs_dir}: cannot write there ({error.strerror}); give another folder with runs_dir=PATH"
        ) from error


def recorded(arm: Arm) -> dict[str, Any] | None:
    """The arm's final record (ok or oom) of the same fingerprint, or None; a damaged file counts as none."""
    if not arm.record_path.is_file():
        return None
    with contextlib.suppress(records.DamagedRecord, UserError):
        record = records.load(arm.record_path)
        if record["status"] in records.FINAL and record["fingerprint"] == arm.fingerprint:
            return record
    return None


def state(arm: Arm) -> str:
    """What starting this arm would do: run | recorded | referenced (the same computation stands under another name)."""
    if arm.config.force:
        return "run"
    if recorded(arm):
        return "recorded"
    return "referenced" if _twin(arm) else "run"


def _twin(arm: Arm) -> tuple[Path, dict[str, Any]] | None:
    """A record of the same computation under another name that can stand in for this arm, with its path."""
    if arm.config.force or arm.config.save_model or arm.config.keep_weights:
        return None  # asked anew, or for files that another arm's record would not bring
    return records.find_by_fingerprint(Path(arm.config.runs_dir), arm.fingerprint, arm.config.scale.name)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the arm: a second worker that reaches it waits and then finds it recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


Progress = Callable[[str, Any], None]


def run(arm: Arm, progress: Progress = lambda kind, value: None) -> dict[str, Any]:
    """Run one arm to its record, or return the record that is there. Never raises for what happens inside the arm."""
    with _lock(arm.folder):
        existing = None if arm.config.force else recorded(arm)
        if existing:
            return {**existing, "outcome": "recorded"}
        twin = _twin(arm)
        if twin:
            return {**_reference(arm, *twin), "outcome": "referenced"}
        started = time.time()
        missing = _run_first(arm, progress)
        status, error, sections = missing or _run_child(arm, progress)
        record = _assemble(arm, status, error, sections, started)
        records.write(arm.record_path, record)
        return {**record, "outcome": "run"}


def _run_first(arm: Arm, progress: Progress) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
    """Run the arms that this one needs. Returns an outcome for this arm when one of them did not end well."""
    lacking = missing_library(arm.config)
    if lacking:
        return "unsupported", _crash("Unsupported", lacking, "start"), {}
    for role, config in prerequisites(arm.config).items():
        side = make_arm(config, list(arm.overrides))
        if recorded(side) and not delivered(config, side.folder):
            config.force = True
            side = make_arm(config, list(arm.overrides))
        record = run(side, progress)
        if record["status"] != "ok":
            inner = record["error"] or {}
            why = f"needs {side.arm_id}, which ended as {record['status']}: {inner.get('message', '')}"
            told = {
                **_crash("Prerequisite", why, inner.get("phase", role)),
                "user_error": inner.get("user_error", False),
            }
            return record["status"], told, {}
        arm.config.task.inputs[role] = str(side.folder)
    return None


def forget_weights(arms: list[Arm]) -> None:
    """Delete the weight files that were kept only for comparisons, unless the user keeps weights."""
    for arm in arms:
        if not arm.config.keep_weights:
            for config in prerequisites(arm.config).values():
                if config.keep_weights:
                    (make_arm(config, list(arm.overrides)).folder / WEIGHTS_FILE).unlink(missing_ok=True)


def _reference(arm: Arm, path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write a record that repeats another experiment's record of the same fingerprint and says so."""
    source = str(path.parent.relative_to(arm.config.runs_dir))
    record = {**record, "arm_id": arm.arm_id, "arm": axes(arm.config), "referenced_from": source}
    records.write(arm.record_path, record)
    return record


def _assemble(arm: Arm, status: str, error: Any, sections: dict[str, Any], started: float) -> dict[str, Any]:
    record: dict[str, Any] = {
        "schema_version": records.SCHEMA_VERSION,
        "arm_id": arm.arm_id,
        "arm": axes(arm.config),
        "config": _portable(arm.config),
        "fingerprint": arm.fingerprint,
        "status": status,
        "error": error,
        "started_unix": round(started, 3),
        "wall_s": round(time.time() - started, 3),
    }
    for name in records.SECTIONS:
        record[name] = sections.pop(name, None)
    record["notes"] = sections.pop("notes", [])
    return {**record, **sections}


def _portable(config: Config) -> dict[str, Any]:
    """The resolved config without where its records lie: a record means the same on another machine."""
    data = dataclasses.asdict(config)
    drop_titles(data)
    drop_guard(data)
    del data["runs_dir"]
    data["task"]["trace"] = None
    del data["task"]["snapshot"]
    data["host"] = Path(config.host).stem if config.host.endswith(".json") else config.host
    data["task"]["inputs"] = {role: Path(folder).name for role, folder in data["task"]["inputs"].items()}
    return data


def _cuda_cards(config: Config) -> int:
    """How many CUDA devices this arm could use; 0 for one that runs on the CPU or on fake tensors."""
    from ..machine import cuda_device_count

    return cuda_device_count() if config.scale.device in ("cuda", "auto") else 0


def _context(config: Config) -> Any:
    """A fork server that has imported torch (CPU, forecast), or a fresh interpreter (CUDA)."""
    if config.scale.device == "cuda" or _cuda_cards(config):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sonar_repro.harness.preload"])
    return context


def _run_child(arm: Arm, progress: Progress) -> tuple[str, Any, dict[str, Any]]:
    """Run the arm's child, on as many cards of its own as it has processes; on a machine without cards, as it is."""
    environment = {k: v for k, v in os.environ.items() if k.startswith(("HF_", "CUDA_", "HYDRA_", "TRITON_"))}
    found = _cuda_cards(arm.config)
    if not found:
        return _watch_child(arm, progress, environment)
    with gpu_locks.taken(arm.config.parallel.processes, gpu_locks.visible(found)) as names:
        return _watch_child(arm, progress, {**environment, "CUDA_VISIBLE_DEVICES": ",".join(names)})


def _watch_child(arm: Arm, progress: Progress, environment: dict[str, str]) -> tuple[str, Any, dict[str, Any]]:
    """Start the child, pass its messages on, and judge how it ended."""
    from .worker import main

    context = _context(arm.config)
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        # In joblib's workers the default is "loky", a name that our child would be told and does not know.
        multiprocessing.set_start_method(context.get_start_method(), force=True)
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, dataclasses.asdict(arm.config), str(arm.folder), environment)
    child = context.Process(target=main, args=arguments, daemon=False)
    child.start()
    sender.close()
    phase = "start"
    try:
        while True:
            if not receiver.poll(arm.config.stall_timeout_s):
                why = f"no progress for {arm.config.stall_timeout_s:g} s; killed (stall_timeout_s)"
                return "crashed", _crash("Stalled", why, phase), {}
            try:
                kind, value = receiver.recv()
            except EOFError:
                child.join()
                return "crashed", _crash("ProcessDied", _death(child.exitcode, arm), phase), {}
            if kind == "result":
                return value
            phase = value if kind == "phase" else f"step {value[0]}"
            progress(kind, value)
    finally:
        _end(child)
        receiver.close()


def _crash(kind: str, message: str, phase: str) -> dict[str, Any]:
    return {"type": kind, "message": message, "phase": phase, "user_error": False, "traceback": None}


def _death(exitcode: int | None, arm: Arm) -> str:
    log = arm.folder / "log.txt"
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return f"the arm's process was ended by {name}{hint}; see {log}"
    return f"the arm's process ended with exit code {exitcode} and no result; see {log}"


def _end(child: Any) -> None:
    """The child has delivered, died, or must go: leave no process behind, torchrun workers in its group included."""
    child.join(timeout=5)
    if child.is_alive():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.join()
