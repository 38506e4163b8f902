"""The end of a process group: a process that trained on gloo ends, whatever its script does with the group.

The destructor of a gloo group joins gloo's threads. Such a thread may be freeing the tensors of a finished collective,
for which it needs the interpreter lock. The group's own Python object lets go of the lock before it runs the
destructor; ``DistributedDataParallel``'s C++ reducer does not, and after ``destroy_process_group()`` the reducer often
has the last reference: the wrapper is freed, the two threads wait for each other, and the process never exits.

:func:`hold_group` keeps the group until the reducer is gone. What lives at the end of the process, a wrapper or a gloo
group that nobody destroyed, is taken down in an ``atexit`` hook, before the interpreter stops to lend its lock.
Destructors run in a thread of their own and are waited for :data:`WAIT_S` at most: after a fault a collective may be
under way that no other rank will answer.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WAIT_S = 10.0


class _Held:
    """A wrapper's process group, until its reducer and the logger (which shares the reducer) are freed."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.group = [wrapper.process_group]
        self._alive = 2
        for part in (wrapper.reducer, wrapper.logger):
            weakref.finalize(part, self._gone).atexit = False

    def _gone(self) -> None:
        self._alive -= 1
        if self._alive == 0 and not _AtExit.reached:  # the hook at exit has references of its own
            _apart(self.group.clear)


class _AtExit:
    registered = False
    reached = False


_HELD: weakref.WeakKeyDictionary[DistributedDataParallel, _Held] = weakref.WeakKeyDictionary()


def hold_group(wrapper: DistributedDataParallel) -> None:
    """Keep ``wrapper``'s process group until its reducer is freed, which then is never the last to hold the group."""
    end_at_exit()
    if wrapper not in _HELD and dist.get_backend(wrapper.process_group) != "fake":
        _HELD[wrapper] = _Held(wrapper)


def end_at_exit() -> None:
    """Take down at the end of this process what is left of reducers and gloo groups. NCCL's groups are left alone."""
    if not _AtExit.registered:
        _AtExit.registered = True
        atexit.register(_end)


def _end() -> None:
    _AtExit.reached = True
    held = [group for kept in _HELD.values() for group in kept.group]
    for wrapper in list(_HELD):
        wrapper.__dict__.pop("reducer", None)
        wrapper.__dict__.pop("logger", None)
    _HELD.clear()
    gloo = dist.is_initialized() and set(_backends()) == {"gloo"}
    if gloo:
        held += dist.distributed_c10d._world.pg_map

    def destroy() -> None:
        if gloo:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        held.clear()  # the last reference to each, as a rule

    if held:
        _apart(destroy)


def _backends() -> list[str]:
    return [dist.get_backend(group) for group in dist.distributed_c10d._world.pg_map]


def _apart(act: Callable[[], Any]) -> None:
    """Run ``act`` in a thread and wait for it, but not for ever.

    A bare thread: this is called by the garbage collector too, where the locks of ``threading`` may be taken.
    """
    done = _thread.allocate_lock()
    done.acquire()

    def body() -> None:
        try:
            act()
        finally:
            done.release()

    try:
        _thread.start_new_thread(body, ())
    except RuntimeError:  # no more threads: what is held stays so
        return
    done.acquire(timeout=WAIT_S)
