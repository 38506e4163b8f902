"""Fast Sinkhorn against SAGE's plain loop: the whole step D = Sinkhorn(G), W <- (1 - lr wd) W - lr tau D, in fp32.

Gated figure: one-thread process CPU time (a busy neighbour moves wall time more), the median of interleaved paired
ratios. Beside it: two-thread wall time, the ratio to a loop with a sane column norm (most of the plain loop's CPU
time is torch's strided norm), and the time over that of one read of G a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from sonar_repro.optim import reference
from sonar_repro.optim.sinkhorn import Descent, Normalisation, sinkhorn_update_
from sonar_repro.optim.squares import MatrixBatch

# shape -> lowest accepted ratio of one-thread CPU time to the plain loop
TARGETS = {(16, 640, 320): 3.0, (8, 1024, 1024): 10.0, (1, 4096, 4096): 12.0}
LR, WEIGHT_DECAY, TAU, ROUNDS = 2e-3, 0.01, 10.0, 5


def steps(shape: tuple[int, int, int]) -> dict[str, Callable[[], None]]:
    """The contestants: fast, plain loop, loop with a sane column norm, and one read of G a round."""
    generator = torch.Generator().manual_seed(0)
    g, w = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    vector = torch.ones(shape[2])

    def fast() -> None:
        sinkhorn_update_([MatrixBatch(w, g)], Descent(LR, WEIGHT_DECAY, TAU), Normalisation(ROUNDS))

    def loop(sane: bool) -> None:
        for weight, gradient in zip(w, g):
            d = reference.sinkhorn(gradient, ROUNDS, sane_column_norm=sane)
            weight.mul_(1 - LR * WEIGHT_DECAY).add_(d, alpha=-LR * TAU)

    def read() -> None:
        for _ in range(ROUNDS):
            for gradient in g:
                torch.mv(gradient, vector)

    return {"fast": fast, "loop": lambda: loop(False), "sane": lambda: loop(True), "read": read}


def measure(contestants: dict[str, Callable[[], None]], clock: Callable[[], float], repeats: int) -> dict[str, list]:
    """Seconds of each contestant in each round; all run in turn in every round, after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        for name, run in contestants.items():
            start = clock()
            run()
            if repeat:
                seconds[name].append(clock() - start)
    return seconds


def paired(seconds: dict[str, list[float]], over: str, under: str) -> float:
    """Median over rounds of the ratio of two contestants."""
    return statistics.median(a / b for a, b in zip(seconds[over], seconds[under]))


def bench(shape: tuple[int, int, int], repeats: int) -> dict:
    """All figures of one shape."""
    contestants = steps(shape)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    repeats *= 3 if shape[0] * shape[1] * shape[2] < 1 << 22 else 1  # the small shape is quick and noisy
    cpu = measure(contestants, time.process_time, repeats)
    torch.set_num_threads(2)
    wall = measure(contestants, time.perf_counter, repeats)
    torch.set_num_threads(before)
    target = TARGETS[shape]
    ratio = paired(cpu, "loop", "fast")
    return {
        "shape": list(shape),
        "target": target,
        "passed": ratio >= target,
        "loop_over_fast_cpu_1_thread": ratio,
        "loop_over_fast_wall_2_threads": paired(wall, "loop", "fast"),
        "sane_loop_over_fast_cpu_1_thread": paired(cpu, "sane", "fast"),
        "sane_loop_over_fast_wall_2_threads": paired(wall, "sane", "fast"),
        "fast_over_one_read_a_round_cpu_1_thread": paired(cpu, "fast", "read"),
        "cpu_seconds_1_thread": cpu,
        "wall_seconds_2_threads": wall,
    }


def run() -> list[dict]:
    """One row a shape; raw seconds are left out."""
    rows = [bench(shape, 9) for shape in TARGETS]
    for row in rows:
        row["fast_cpu_ms"] = 1e3 * statistics.median(row.pop("cpu_seconds_1_thread")["fast"])
        del row["wall_seconds_2_threads"]
    return rows
