"""Plain reference implementations, in any floating dtype: the definitions that the fast versions are tested against.

One function an equation, whole tensors, one matrix at a time, nothing in place. Sources: MESH (momentum, block
multiplier, controls); SAGE's unscaled Sinkhorn and its vocabulary update; SinkGD's scaled form; Adafactor's factored V.
What the papers do not print is marked "inferred" with its reason.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sinkhorn(
    g: Tensor, rounds: int = 5, eps: float = 1e-8, form: str = "sage", sane_column_norm: bool = False
) -> Tensor:
    """SAGE's loop on one matrix ``[m, n]``: rows first, columns last, so columns of the result have norm 1.

    ``form="sinkgd"`` multiplies by √n and √m (RMS 1). ``sane_column_norm`` computes the column norm as √(Σ x²), the
    same number without torch's slow strided ``norm`` (for benchmarks). Inferred: K = 5, ε = 1e-8 are SAGE's defaults.
    """
    m, n = g.shape
    to_row, to_column = (math.sqrt(n), math.sqrt(m)) if form == "sinkgd" else (1.0, 1.0)
    x = g
    for _ in range(rounds):
        x = x / (x.norm(dim=1, keepdim=True) + eps)
        if form == "sinkgd":
            x = x * to_row
        columns = x.square().sum(0, keepdim=True).sqrt() if sane_column_norm else x.norm(dim=0, keepdim=True)
        x = x / (columns + eps)
        if form == "sinkgd":
            x = x * to_column
    return x


def descend(w: Tensor, direction: Tensor, lr: float, weight_decay: float, tau: float) -> Tensor:
    """W ← (1 − lr·wd) W − lr·τ·D."""
    return (1 - lr * weight_decay) * w - lr * tau * direction


def momentum(h: Tensor, g: Tensor, beta1: float = 0.9) -> Tensor:
    """MESH: H ← β1 H + G (unnormalised, no bias correction)."""
    return beta1 * h + g


def block_statistic(v: Tensor, source: Tensor, axis: str, beta2: float = 0.99) -> Tensor:
    """MESH-B: V ← β2 V + (1−β2) R², R² the mean square over each row (``axis="rows"``) or column of ``[m, n]``.

    Inferred: the EMA (the text stores block statistics and names β2).
    """
    return beta2 * v + (1 - beta2) * source.square().mean(1 if axis == "rows" else 0)


def block_multiplier(v: Tensor, bounds: tuple[float, float] = (0.25, 4.0)) -> Tensor:
    """MESH-B: q = √(mean of V over live blocks / V), clipped, then divided by its mean; dead blocks (V = 0) get 0.

    Relative before the clip, or scale invariance fails; by the RMS and not by mean(1/R), or nearly dead blocks drag the
    live ones down. Inferred: the bounds (not printed).
    """
    live = v > 0
    q = torch.zeros_like(v)
    if live.any():
        q[live] = (v[live].mean() / v[live]).sqrt().clamp(*bounds)
        q[live] = q[live] / q[live].mean()
    return q


def sage_matrix(w, g, m, s, step, lr, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8, order="code"):
    """SAGE on a matrix ``[rows, n]`` with column state s ``[n]``: returns (W, m, s).

    s_t = column means of |G|; U = sign(β1 m + (1−β1) G) ⊙ d. ``order="code"`` updates m before the sign (the authors'
    code), ``"paper"`` after (their algorithm).
    """
    return _sage(w, g, m, s, g.abs().mean(0), step, lr, weight_decay, betas, eps, order)


def sage_vector(w, g, m, s, step, lr, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8, order="code"):
    """SAGE on a vector ``[n]``: s_t = |G| elementwise. Returns (W, m, s)."""
    return _sage(w, g, m, s, g.abs(), step, lr, weight_decay, betas, eps, order)


def _sage(w, g, m, s, s_t, step, lr, weight_decay, betas, eps, order):
    beta1, beta2 = betas
    s = beta2 * s + (1 - beta2) * s_t
    s_hat = s / (1 - beta2**step)

    def rms(x: Tensor) -> Tensor:
        return x.square().mean().sqrt()

    d = torch.minimum(rms(s_hat) / (s_hat + eps), rms(s_t) / (s_t + eps)).clamp(max=1.0)
    new_m = beta2 * m + (1 - beta2) * g
    seen = new_m if order == "code" else m
    update = torch.sign(beta1 * seen + (1 - beta1) * g) * d
    return (1 - lr * weight_decay) * w - lr * update, new_m, s


def sign_direction(source: Tensor) -> Tensor:
    """Control "sign-only" (definition ours): sign at Sinkhorn's RMS 1/√m."""
    return torch.sign(source) / math.sqrt(source.shape[-2])


def factored_direction(g, row, column, step, beta2=0.99, eps=1e-30, clip=1.0):
    """Control "factored-v" (definition ours): Adafactor's factored second moment, no first moment, at RMS ≤ 1/√m.

    row ``[m]`` and column ``[n]`` are EMAs of the row and column means of G² + ε, bias-corrected;
    V̂ = row·columnᵀ / mean(row); U = G/√V̂ divided by max(1, RMS(U)/clip) (Adafactor, Algorithm 4). Returns (direction,
    row, column).
    """
    squares = g.square() + eps
    row = beta2 * row + (1 - beta2) * squares.mean(1)
    column = beta2 * column + (1 - beta2) * squares.mean(0)
    correction = 1 - beta2**step
    r, c = row / correction, column / correction
    u = g / torch.sqrt(torch.outer(r, c) / r.mean())
    u = u / torch.clamp(u.square().mean().sqrt() / clip, min=1.0)
    return u / math.sqrt(g.shape[0]), row, column


def adamw(w, g, m, v, step, lr, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8):
    """AdamW (Loshchilov & Hutter, Algorithm 2 with decoupled decay as in torch). Returns (W, m, v)."""
    beta1, beta2 = betas
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    denominator = v.sqrt() / math.sqrt(1 - beta2**step) + eps
    return w * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m / denominator, m, v
