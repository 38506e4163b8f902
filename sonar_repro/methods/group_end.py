"""The end of a process group: a process that trained on gloo ends, whatever its script does with the group.

The destructor of a gloo group joins gloo's threads. Such a thread may be freeing the tensors of a finished collective,
for which it needs the interpreter lock. The group's own Python object lets go of the lock before it runs the
destructor; ``DistributedDataParallel``'s C++ reducer does not, and after ``destroy_process_group()`` the reducer often
has the last reference: the wrapper is freed, the two threads wait for each other, and the process never exits.

:func:`hold_group` keeps the group until the reducer is gone. What lives at the end of the process, a wrapper or a gloo
group that nobody destroyed, is taken down in an ``atexit`` hook, before the interpreter stops to lend its lock.
Destructors run in a thread of their own and are waited for :data:`WAIT_S` at most: after a fault a collective may be
under way that no other rank will answer. A group that somebody else still holds then is never destroyed: while the
interpreter is taken down its destructor would wait for ever, or end the process with SIGABRT, since gloo's thread can
no longer have the lock.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.distributed as dist

# Before a group is made, as a rule: its functions have the group of the moment as the default of an argument.
import torch.distributed.nn.functional as functional
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
_SEEN: weakref.WeakSet[Any] = weakref.WeakSet()  # gloo groups


def hold_group(wrapper: DistributedDataParallel) -> None:
    """Keep ``wrapper``'s process group until its reducer is freed, which then is never the last to hold the group."""
    if wrapper not in _HELD and dist.get_backend(wrapper.process_group) != "fake":
        end_at_exit(wrapper.process_group)
        _HELD[wrapper] = _Held(wrapper)


def end_at_exit(group: Any) -> None:
    """Take down, at the end of this process, what is left of reducers and gloo groups. NCCL's are torch's business."""
    if dist.get_backend(group) == "gloo":
        _SEEN.add(group)
    if not _AtExit.registered:
        _AtExit.registered = True
        atexit.register(_end)


def _end() -> None:
    _AtExit.reached = True
    known = _existing_groups()
    gloo = bool(known) and {dist.get_backend(group) for group in known} == {"gloo"}
    held = [*_SEEN, *(known if gloo else ())]
    watched = [weakref.ref(group) for group in held]
    del known
    for wrapper in list(_HELD):
        wrapper.__dict__.pop("reducer", None)
        wrapper.__dict__.pop("logger", None)
    _HELD.clear()
    _forget_defaults(held)

    def destroy() -> None:
        if gloo:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        held.clear()  # the last reference to each, as a rule

    if held:
        _apart(destroy)
    for group in watched:
        if (left := group()) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))


def _existing_groups() -> list[Any]:
    return list(dist.distributed_c10d._world.pg_map)


def _forget_defaults(groups: list[Any]) -> None:
    """Let go of the groups that functions of torch hold as defaults; None says the same there."""
    for function in vars(functional).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            function.__defaults__ = tuple(
                None if any(default is group for group in groups) else default for default in function.__defaults__
            )


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
