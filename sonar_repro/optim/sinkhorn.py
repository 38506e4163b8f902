"""Fast Sinkhorn: the normalised direction as two scaling vectors, without a full-size temporary.

K rounds of row and column normalisation only rescale rows and columns, so D = diag(r) G diag(c). With S = G∘G (in fp32,
also for bf16 input) one round is two products with S:

    r ← r / (r √(S c²) + ε),    c ← c / (c √(Sᵀ r²) + ε).

Inside, rows are kept at norm √n and columns at √m (else r and c drift apart by (n/m)^(K/2)); the SAGE form's 1/√m
is multiplied in once at the end. The plain loop is :func:`reference.sinkhorn`, tested against in float64.

Numerical rules, each with its reason:

* a row or column whose squared norm is at most 1e-24 of the largest of its matrix counts as zero, direction 0: its
  squares are lost in fp32, and rounding noise would be blown up to full length;
* a matrix of extreme scale is multiplied by an exact power of two first, and ε with it; a scaled ε above 1e15 is held
  there, so that a matrix far below ε (an expert that has been idle for hundreds of steps) is still normalised;
* NaN is not dead: it propagates.

Sources: MESH (Sinkhorn direction, K, τ, block multiplier); SAGE and SinkGD (the two forms of the scaling).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .squares import (
    CPU,
    GPU,
    MatrixBatch,
    Sizes,
    Slice,
    Squares,
    Workspace,
    arithmetic_dtype,
    make_packs,
    on_host,
    open_squares,
)

DEAD = 1e-24  # squared norm, relative to the largest of the matrix
# Mean squares of a row between which the squares, their dead threshold and r² all stay inside fp32's range.
_SAFE = (1e-8, 1e20)
_MAX_SCALED_EPS = 1e15


@dataclass(frozen=True)
class Normalisation:
    """K rounds, ε and the form of the Sinkhorn direction.

    ``form="sage"``: rows then columns to norm 1 (RMS(D) = 1/√m). ``form="sinkgd"``: to √n and √m (RMS(D) = 1).
    """

    rounds: int = 5
    eps: float = 1e-8
    form: str = "sage"

    def final(self, m: int) -> float:
        """What the internal direction (columns of norm √m) is multiplied by."""
        return 1.0 / math.sqrt(m) if self.form == "sage" else 1.0


@dataclass(frozen=True)
class Descent:
    """W ← (1 − lr·wd) W − lr·τ·D."""

    lr: float
    weight_decay: float
    tau: float

    @property
    def decay(self) -> float:
        return 1.0 - self.lr * self.weight_decay

    @property
    def length(self) -> float:
        return self.lr * self.tau


# MESH-B's q for the blocks of a pack: (pack, mean square of the source over each block) -> factors of the same shape.
Multiplier = Callable[[list[Slice], Tensor], Tensor]


def _load(squares: Squares) -> Tensor | None:
    """S, and the mean squares of the rows in ``row_out``; returns the power-of-two scale ``[B, 1]`` of S, or None.

    On the host the scale is used where one is needed; elsewhere always, since looking would synchronise.
    """
    if on_host(squares.like) or squares.like.dtype == torch.float64:
        squares.load()
        peaks = squares.mean_square_of_rows().amax(1)
        # NaN is left alone; inf (squares overflowed) and 0 (squares or the matrix vanished) are looked into.
        if squares.like.dtype == torch.float64 or all(
            _SAFE[0] <= peak <= _SAFE[1] or math.isnan(peak) for peak in peaks.tolist()
        ):
            return None
    scale = squares.load_scaled()
    squares.mean_square_of_rows()
    return scale


def _dead(sums: Tensor) -> Tensor | None:
    """Which of ``[B, k]`` squared norms count as zero; None if none is known to (never on a device: no sync)."""
    if on_host(sums):
        low, high = torch.aminmax(sums, dim=1)
        if all(a > DEAD * b for a, b in zip(low.tolist(), high.tolist())):
            return None
    return sums <= DEAD * sums.amax(1, keepdim=True)


def _inverse_root(sums: Tensor, eps: float | Tensor, dead: Tensor | None) -> Tensor:
    inverse = sums.sqrt().add_(eps).reciprocal_()
    return inverse if dead is None else inverse.masked_fill_(dead, 0.0)


def scaling_vectors(squares: Squares, how: Normalisation) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(r ``[B, m]``, c ``[B, n]``, scale ``[B, 1]`` or None, mean square ``[B, m]`` of the rows of scale·G).

    The direction is diag(r) (scale·G) diag(c): columns have norm √m; multiply by ``how.final(m)``.
    """
    m, n = squares.m, squares.n
    # ε of a step whose input has rows (columns) of norm √n (√m) instead of 1, and whose sums are means over n (m).
    factors = (math.sqrt(m / n), math.sqrt(n / m)) if how.form == "sage" else (n**-0.5, m**-0.5)
    constants = (how.eps * factors[0], how.eps * factors[1], 0.0)
    row_eps, column_eps, zero = (squares.row_in.new_full((1,), value) for value in constants)
    scale = _load(squares)
    mean_square = squares.row_out.clone()
    first_eps = how.eps if scale is None else (scale * how.eps).clamp(max=_MAX_SCALED_EPS)
    r = _inverse_root(mean_square, first_eps * n**-0.5, _dead(mean_square))
    torch.addcmul(zero, r, r, value=1.0 / m, out=squares.row_in)
    squares.columns()
    sums = squares.column_out
    dead = _dead(sums)
    c = _inverse_root(sums, column_eps, dead)

    def update_rows(block: slice | None) -> None:
        part, sums, squared = r, squares.row_out, squares.row_in
        if block is not None:
            part, sums, squared = part[:, block], sums[:, block], squared[:, block]
        if dead is not None:
            # A row that lives in dead columns only has sum 0 from here on; unmasked it would grow to inf.
            part.mul_(sums > 0)
        part.div_(torch.addcmul(row_eps, part, sums.sqrt_(), out=sums))
        torch.addcmul(zero, part, part, value=1.0 / m, out=squared)

    for _ in range(how.rounds - 1):
        torch.addcmul(zero, c, c, value=1.0 / n, out=squares.column_in)
        squares.sweep(update_rows)
        c.div_(torch.addcmul(column_eps, c, sums.sqrt_(), out=sums))
    return r, c, scale, mean_square


def _block_mean_square(squares: Squares, axis: str, rows: Tensor, scale: Tensor | None) -> Tensor:
    """Mean of source² over each row (``[B, m]``) or column (``[B, n]``), in the source's own scale."""
    mean = rows if axis == "rows" else squares.mean_square_of_columns()
    return mean if scale is None else mean.div_(scale).div_(scale)


@torch.no_grad()
def sinkhorn_update_(
    batches: Sequence[MatrixBatch],
    descent: Descent,
    how: Normalisation,
    *,
    multiplier: Multiplier | None = None,
    batched: bool | None = None,
    sizes: Sizes | None = None,
) -> None:
    """W ← (1 − lr·wd) W − lr·τ·(q ⊙) Sinkhorn(source) for each logical matrix; the sources are unchanged.

    Args:
        batches: weights and sources ``[B, m, n]``, any strides, fp32, bf16 or fp64 (arithmetic in fp32, fp64 for fp64).
        multiplier: gives MESH-B's q, from the mean squares of the source.
        batched: same-shaped matrices of several parameters share launches; default away from the CPU.
        sizes: elements held at a time; the only temporaries are one such buffer and vectors of m and n elements.
    """
    if not batches:
        return
    host = on_host(batches[0].source)
    batched = not host if batched is None else batched
    sizes = sizes or (CPU if host else GPU)
    workspace = Workspace()
    for pack in make_packs(batches, sizes.pack, batched):
        squares = open_squares(pack, workspace, sizes, batched)
        r, c, scale, mean_square = scaling_vectors(squares, how)
        if scale is not None:
            r.mul_(scale)
        if multiplier is not None:
            axis = pack[0].batch.axis
            (r if axis == "rows" else c).mul_(multiplier(pack, _block_mean_square(squares, axis, mean_square, scale)))
        r.mul_(-descent.length * how.final(squares.m))
        squares.descend(r, c, descent.decay)


@torch.no_grad()
def block_mean_square(batch: MatrixBatch, sizes: Sizes | None = None) -> Tensor:
    """Mean of ``batch.source²`` over each block (rows or columns of ``[B, m, n]``), ``[B, blocks]`` in fp32.

    For block statistics taken from another tensor than the one that is normalised (``stat=G`` beside H).
    """
    host = on_host(batch.source)
    sizes = sizes or (CPU if host else GPU)
    workspace, found = Workspace(), []
    for pack in make_packs([batch], sizes.pack, not host):
        squares = open_squares(pack, workspace, sizes, not host)
        scale = _load(squares)
        found.append(_block_mean_square(squares, batch.axis, squares.row_out, scale).clone())
    return torch.cat(found)


def sinkhorn(source: Tensor, how: Normalisation | None = None, **options) -> Tensor:
    """The direction itself, ``[..., m, n]`` in the arithmetic dtype (for tests and diagnostics; allocates it)."""
    matrices = source.reshape(-1, *source.shape[-2:])
    out = torch.zeros_like(matrices, dtype=arithmetic_dtype(source.dtype))
    sinkhorn_update_([MatrixBatch(out, matrices)], Descent(1.0, 0.0, -1.0), how or Normalisation(), **options)
    return out.view(source.shape)
