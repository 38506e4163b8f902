"""SAGE: the sign of an interpolated first moment, damped column by column with a one-row second statistic.

s_t = column means of |G| (elementwise for vectors); S ← β2 S + (1−β2) s_t; Ŝ = S/(1−β2^t);
d = min(1, rms(Ŝ)/(Ŝ+ε), rms(s_t)/(s_t+ε)); U = sign(β1 m + (1−β1) G) ⊙ d; W ← (1−lr·wd) W − lr U; m ← β2 m + (1−β2) G.

The authors' code updates m before the sign, their algorithm after it: ``order="code"`` (default) or ``"paper"``.
State: m in the parameter's dtype, one row s in fp32. Plain forms: ``reference.sage_matrix``, ``reference.sage_vector``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .squares import CPU, GPU, Workspace, arithmetic_dtype, on_host


@dataclass(frozen=True)
class Sage:
    """Hyperparameters of one SAGE step; ``step`` counts from 1."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    order: str
    step: int


def _damping(s: Tensor, s_t: Tensor, how: Sage) -> Tensor:
    """Update S in place with s_t (both ``[B, n]``) and return d."""
    beta2 = how.betas[1]
    s.mul_(beta2).add_(s_t, alpha=1 - beta2)
    s_hat = s / (1 - beta2**how.step)

    def relative(x: Tensor) -> Tensor:
        return x.square().mean(-1, keepdim=True).sqrt_() / (x + how.eps)

    return torch.minimum(relative(s_hat), relative(s_t)).clamp_(max=1.0)


def _blocks(matrices: Tensor, limit: int) -> Iterator[tuple[slice, slice]]:
    """(matrices, rows) of ``[B, m, n]`` in pieces of at most ``limit`` elements, or one row."""
    count, m, n = matrices.shape
    fit, height = max(1, limit // (m * n)), min(m, max(1, limit // n))
    for start in range(0, count, fit):
        for row in range(0, m, height):
            yield slice(start, min(start + fit, count)), slice(row, min(row + height, m))


def _move(weight: Tensor, grad: Tensor, m: Tensor, d: Tensor, buffer: Tensor, how: Sage) -> None:
    """m and W of one piece; a low-precision W is rounded once."""
    beta1, beta2 = how.betas
    if how.order == "code":
        m.mul_(beta2).add_(grad, alpha=1 - beta2)
    buffer.copy_(m).mul_(beta1).add_(grad, alpha=1 - beta1).sign_().mul_(d)
    if how.order == "paper":
        m.mul_(beta2).add_(grad, alpha=1 - beta2)
    decay = 1 - how.lr * how.weight_decay
    if weight.dtype == buffer.dtype:
        weight.mul_(decay).add_(buffer, alpha=-how.lr)
    else:
        weight.copy_(buffer.mul_(-how.lr).add_(weight, alpha=decay))


@torch.no_grad()
def sage_matrices_(weight: Tensor, grad: Tensor, m: Tensor, s: Tensor, how: Sage, workspace: Workspace) -> None:
    """SAGE on matrices ``[B, m, n]`` (weight, grad, m; any strides) with s ``[B, n]``, all updated in place.

    Temporaries: one piece of at most 2 MB (64 MB on CUDA) and vectors of n elements.
    """
    limit = (CPU if on_host(weight) else GPU).block
    s_t = torch.zeros_like(s)
    for b, r in _blocks(weight, limit):
        piece = grad[b, r]
        buffer = workspace.take(piece.numel(), weight).view(piece.shape)
        s_t[b].add_(buffer.copy_(piece).abs_().sum(1))
    d = _damping(s, s_t.div_(weight.shape[1]), how).unsqueeze(1)
    for b, r in _blocks(weight, limit):
        piece = weight[b, r]
        _move(piece, grad[b, r], m[b, r], d[b], workspace.take(piece.numel(), weight).view(piece.shape), how)


@torch.no_grad()
def sage_vectors_(weight: Tensor, grad: Tensor, m: Tensor, s: Tensor, how: Sage) -> None:
    """SAGE on vectors ``[..., n]`` with an elementwise s of that shape; each row of a batch is a vector of its own."""
    s_t = grad.to(arithmetic_dtype(grad.dtype), copy=True).abs_()
    d = _damping(s, s_t, how)
    _move(weight, grad, m, d, torch.empty_like(s_t), how)
