"""What ``test_nonfinite_parallel`` runs on each of two gloo ranks; imported by the spawned processes."""

from __future__ import annotations

import math

import torch
from tiny_moe import batches, build, tiny_model, train, weights

from sonar_repro import data_parallel
from sonar_repro.methods import nonfinite

RUNS = {
    f"{mode} {method} {how}": (mode, method, how)
    for mode in ("ddp", "fsdp2")
    for method in ("sonar", "standard_no_expert_clip", "optimizer_in_backward")
    for how in ("host", "device")
}


def bad_on_rank_1(rank: int) -> dict:
    """Rank 1's gradient is NaN in the third of four steps; what every rank holds before and after it, and at the end.

    ``device``: the verdict is not read on the host, as on a GPU.
    """
    torch.use_deterministic_algorithms(True)
    results = {}
    on_host = nonfinite.on_host
    for name, (mode, method, how) in RUNS.items():
        nonfinite.on_host = on_host if how == "host" else lambda norm: False
        model = tiny_model()
        trained = data_parallel(model, mode, method)
        mine = build(trained, method)
        train(trained, mine, batches(2, seed=1 + rank))
        before = whole(model)
        if rank == 1:
            head = model.model.layers[1].mlp.experts
            handle = head.register_forward_hook(lambda m, i, out: out * 1.0 + spoil(out))
        train(trained, mine, batches(1, seed=5 + rank))
        if rank == 1:
            handle.remove()
        after = whole(model)
        train(trained, mine, batches(1, seed=8 + rank))
        results[name] = {"before": before, "after": after, "end": whole(model), "skipped": mine.skipped_updates}
    return results


class _Zero(torch.autograd.Function):
    """0 forward, NaN backward."""

    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


def spoil(out: torch.Tensor) -> torch.Tensor:
    return _Zero.apply(out)


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: (w.full_tensor() if hasattr(w, "full_tensor") else w).clone() for n, w in weights(model).items()}
