"""Kernels that no operator shows: a stand-in that only allocates says here what the library's kernel would do.

The expert kernels of SonicMoE and ScatterMoE are one such case (``backends/footprints.py``): the dispatcher sees
``new_empty`` and nothing else. Whoever times a step listens; without a listener a declaration costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """One library call.

    Attributes:
        name: of the kernel, for traces.
        nbytes: bytes read and written beside ``expert_bytes``.
        flops: floating-point operations (a multiply-add is two), of matrix products.
        launches: kernels it launches.
        expert_bytes: bytes of the weights that are read, of all experts; only those of experts that have a token count.
        tokens, top_k, experts: routing, from which the share of experts with a token follows.
    """

    name: str
    nbytes: int
    flops: int = 0
    launches: int = 1
    expert_bytes: int = 0
    tokens: int = 0
    top_k: int = 1
    experts: int = 1


_listeners: list[Callable[[Kernel], None]] = []


def kernel(name: str, nbytes: int, **facts: int) -> None:
    """Declare one library call (arguments as in :class:`Kernel`)."""
    if _listeners:
        declared = Kernel(name, nbytes, **facts)
        for listener in _listeners:
            listener(declared)


@contextmanager
def listening(listener: Callable[[Kernel], None]) -> Iterator[None]:
    """Call ``listener`` with every declaration inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def share_hit(tokens: float, top_k: int, experts: int) -> float:
    """Expected share of experts with at least one token: 1 - (1 - k/E)^T, for routing without preference.

    Real routers are uneven, so fewer are hit; at the papers' sizes (T of 200 and more, k/E of 1/8 and 1/5) it is 1.
    """
    if experts <= 1 or top_k >= experts:
        return 1.0
    return 1.0 - (1.0 - top_k / experts) ** tokens
