"""Starting processes in tests: whatever a test starts has ended when it is over, passed, failed or out of time.

A group or session is not enough: torchrun and the runner give each rank and arm a session of its own. Every process
that descends from a start carries a mark in its environment, and all that carry it are killed.

Time limits are nets for a process that hangs, wide enough for a busy machine; no test asserts one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

LIMIT_S = 600.0
ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent
_MARK = "STARTED_BY_TEST"


@contextlib.contextmanager
def started(command: Sequence[str], env: dict[str, str] | None = None, **options: Any) -> Iterator[subprocess.Popen]:
    """``Popen(command)`` in a session of its own; it and all that it started are gone after the block."""
    mark = uuid.uuid4().hex
    environment = {**(os.environ if env is None else env), _MARK: mark}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
    try:
        yield process
    finally:
        _end(process, mark)


def run(
    command: Sequence[str], timeout: float = LIMIT_S, check: bool = False, **options: Any
) -> subprocess.CompletedProcess:
    """As ``subprocess.run`` with captured text, but nothing that ``command`` started outlives the call."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started(command, **{**pipes, **options}) as process:
        out, err = process.communicate(timeout=timeout)
    assert not (check and process.returncode), f"{command}: exit {process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess:
    """:func:`run` of this interpreter."""
    return run([sys.executable, *arguments], **options)


def within_limit(true: Callable[[], Any], timeout_s: float = LIMIT_S) -> bool:
    """Wait until ``true()`` is; False after ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while not true() and time.monotonic() < end:
        time.sleep(0.1)
    return bool(true())


def alive(pid: int) -> bool:
    """Whether the process runs still; one that has ended and was not waited for does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets, for a process started without it."""
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    paths = f"{ROOT}{os.pathsep}{SUPPORT}"
    return {**os.environ, **{k: str(v) for k, v in ours.items()}, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def spawn(work: Callable, args: tuple, count: int = 2, timeout_s: float = LIMIT_S) -> None:
    """``work(rank, *args)`` in ``count`` processes; the first error of one is raised, and all have ended afterwards."""
    import torch.multiprocessing as mp

    end = time.monotonic() + timeout_s
    context = mp.spawn(work, args, nprocs=count, join=False)
    try:
        while not context.join(timeout=end - time.monotonic()):  # returns when one process has ended
            assert time.monotonic() < end, f"a rank hangs after {timeout_s} s"
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def _end(process: subprocess.Popen, mark: str) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    while left := marked(mark):  # what starts while we look is found the next time
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """The living processes that carry ``mark``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is not ours
            if process.environ().get(_MARK) == mark:
                found.append(process.pid)
    return found
