"""The expert update's parts that are not Sinkhorn itself: MESH-B's block multiplier and the paper's controls.

Definitions of the controls are ours (the paper names them only); plain forms in :mod:`.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .sinkhorn import Descent
from .squares import CPU, GPU, MatrixBatch, Sizes, Slice, Workspace, make_packs, on_host, open_squares


@dataclass(frozen=True)
class BlockScale:
    """MESH-B: V ← β2 V + (1−β2) R², q = √(mean of V over live blocks / V) clipped, then over its mean.

    ``update=False`` leaves V as it is (it was taken from another tensor, ``stat=G``). Inferred: the EMA and the bounds.
    """

    beta2: float = 0.99
    bounds: tuple[float, float] = (0.25, 4.0)
    update: bool = True

    def __call__(self, pack: list[Slice], mean_square: Tensor) -> Tensor:
        """The :data:`~.sinkhorn.Multiplier`: q ``[B, blocks]`` for a pack, V updated in place."""
        statistics = [part.statistic() for part in pack]
        if self.update:
            new = mean_square.split([part.stop - part.start for part in pack])
            update_statistics_(statistics, list(new), self.beta2)
        return block_multiplier(statistics[0] if len(pack) == 1 else torch.cat(statistics), self.bounds)


def update_statistics_(statistics: list[Tensor], mean_squares: list[Tensor], beta2: float) -> None:
    """V ← β2 V + (1−β2) R², for lists of ``[B, blocks]``."""
    torch._foreach_mul_(statistics, beta2)
    torch._foreach_add_(statistics, mean_squares, alpha=1 - beta2)


def block_multiplier(v: Tensor, bounds: tuple[float, float]) -> Tensor:
    """q ``[B, blocks]`` from V: mean 1 over each matrix's live blocks, 0 on dead ones (V = 0)."""
    live = v > 0
    count = live.sum(-1, keepdim=True).clamp_(min=1)
    mean = v.sum(-1, keepdim=True) / count
    q = (mean / v).sqrt_().clamp_(*bounds).masked_fill_(~live, 0.0)
    return q.div_((q.sum(-1, keepdim=True) / count).clamp_(min=torch.finfo(v.dtype).tiny))


def _sizes(batches: Sequence[MatrixBatch]) -> tuple[Sizes, bool]:
    host = on_host(batches[0].source)
    return (CPU if host else GPU), not host


@torch.no_grad()
def sign_update_(batches: Sequence[MatrixBatch], descent: Descent) -> None:
    """Control "sign-only": W ← (1 − lr·wd) W − lr·τ·sign(source)/√m, the RMS of Sinkhorn's direction."""
    if not batches:
        return
    workspace = Workspace()
    sizes, batched = _sizes(batches)
    for pack in make_packs(batches, sizes.pack, batched):
        for part in pack:
            weight, source = part.weight(), part.source()
            length = descent.length / source.shape[-2] ** 0.5
            for rows in _row_blocks(source, sizes.block):
                piece = source[:, rows]
                buffer = workspace.take(piece.numel(), source).view(piece.shape)
                torch.sign(buffer.copy_(piece), out=buffer)
                target = weight[:, rows]
                if target.dtype == buffer.dtype:
                    target.mul_(descent.decay).add_(buffer, alpha=-length)
                else:
                    target.copy_(buffer.mul_(-length).add_(target, alpha=descent.decay))


def _row_blocks(matrices: Tensor, limit: int) -> list[slice]:
    count, m, n = matrices.shape
    height = max(1, limit // (count * n))
    return [slice(start, min(start + height, m)) for start in range(0, m, height)]


@dataclass(frozen=True)
class Factored:
    """Control "factored-v": Adafactor's row and column EMAs of G² + ε, RMS clipped to 1, at Sinkhorn's RMS 1/√m."""

    beta2: float
    step: int
    eps: float = 1e-30
    clip: float = 1.0


@torch.no_grad()
def factored_update_(
    batches: Sequence[MatrixBatch], rows: Sequence[Tensor], columns: Sequence[Tensor], descent: Descent, how: Factored
) -> None:
    """W ← (1 − lr·wd) W − lr·τ·U/√m, with EMAs ``rows[i] [B, m]`` and ``columns[i] [B, n]`` updated in place.

    U = G/√V̂ is diag·G·diag too, so it runs through the same squares as Sinkhorn, without a full-size temporary.
    """
    workspace = Workspace()
    for batch, row_state, column_state in zip(batches, rows, columns):
        sizes, batched = _sizes([batch])
        for pack in make_packs([batch], sizes.pack, batched):
            part = slice(pack[0].start, pack[0].stop)
            squares = open_squares(pack, workspace, sizes, batched)
            squares.load()
            row, column = row_state[part], column_state[part]
            row.mul_(how.beta2).add_(squares.mean_square_of_rows() + how.eps, alpha=1 - how.beta2)
            column.mul_(how.beta2).add_(squares.mean_square_of_columns() + how.eps, alpha=1 - how.beta2)
            correction = 1 - how.beta2**how.step
            a = (row / correction).rsqrt_()
            b = ((row / correction).mean(1, keepdim=True) * correction / column).sqrt_()
            squares.column_in.copy_(b * b / squares.n)
            squares.rows()
            rms = (squares.row_out * a * a).mean(1, keepdim=True).sqrt_()
            a.mul_(-descent.length / squares.m**0.5).div_(rms.div_(how.clip).clamp_(min=1.0))
            squares.descend(a, b, descent.decay)
