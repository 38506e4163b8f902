"""What Fast Sinkhorn multiplies with: S = G∘G of a few matrices in cache, or of row blocks of a large one.

Both classes offer the two products of a round, ``S c²`` and ``Sᵀ r²``, and the update of W, through one small buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Sizes:
    """Elements: a pack of whole matrices, the largest matrix held whole, a row block of a larger one."""

    pack: int
    resident: int
    block: int


CPU = Sizes(pack=1 << 19, resident=1 << 21, block=1 << 19)  # 2 MB of squares stay in a core's share of the cache
GPU = Sizes(pack=1 << 24, resident=1 << 24, block=1 << 24)  # 64 MB: enough matrices a launch to fill a card


@dataclass
class MatrixBatch:
    """Logical matrices of one parameter that are updated alike: views ``[B, m, n]`` of the weight and of its G or H."""

    weight: Tensor
    source: Tensor
    statistic: Tensor | None = None  # MESH-B: V, fp32 [B, blocks], and the axis that its blocks lie on
    axis: str = "rows"

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[-2], self.weight.shape[-1]


@dataclass
class Slice:
    """Matrices ``start:stop`` of a batch; a pack is a list of slices that go through the kernels together."""

    batch: MatrixBatch
    start: int
    stop: int

    def weight(self) -> Tensor:
        return self.batch.weight[self.start : self.stop]

    def source(self) -> Tensor:
        return self.batch.source[self.start : self.stop]

    def statistic(self) -> Tensor:
        return self.batch.statistic[self.start : self.stop]


def make_packs(batches: Sequence[MatrixBatch], limit: int, batched: bool) -> list[list[Slice]]:
    """Slices of at most ``limit`` elements (one matrix at least); with ``batched``, like slices share a pack."""
    packs: list[list[Slice]] = []
    room: dict[tuple, tuple[list[Slice], int]] = {}
    for batch in batches:
        fit = max(1, limit // (batch.shape[0] * batch.shape[1]))
        key = (*batch.shape, batch.axis, batch.weight.dtype, batch.source.dtype, batch.source.device)
        for start in range(0, batch.weight.shape[0], fit):
            part = Slice(batch, start, min(start + fit, batch.weight.shape[0]))
            pack, left = room.get(key, ([], 0)) if batched else ([], 0)
            if left < part.stop - part.start:
                pack, left = [], fit
                packs.append(pack)
            pack.append(part)
            room[key] = (pack, left - (part.stop - part.start))
    return packs


class Workspace:
    """One reusable buffer a step: at most a pack, a whole matrix or a row block of elements."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, numel: int, like: Tensor) -> Tensor:
        dtype = arithmetic_dtype(like.dtype)
        buffer = self._buffer
        if buffer is None or buffer.numel() < numel or buffer.dtype != dtype or buffer.device != like.device:
            self._buffer = None  # free before the larger one is allocated
            self._buffer = buffer = torch.empty(numel, dtype=dtype, device=like.device)
        return buffer[:numel]


def on_host(tensor: Tensor) -> bool:
    """A real CPU tensor: small packs in cache, one kernel a matrix, and reading a value costs nothing.

    Everything else, fake tensors included, is treated as on a GPU: a forecast then counts the real run's workspace.
    """
    return tensor.device.type == "cpu" and type(tensor) in (Tensor, Parameter)


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def power_of_two(largest: Tensor) -> Tensor:
    """The exact power of two that brings ``largest`` (0-d or ``[B]``, >= 0) into [0.5, 1); 1 for 0, inf and NaN."""
    mantissa, _ = torch.frexp(largest)
    return torch.where((largest > 0) & torch.isfinite(largest), mantissa / largest.clamp(min=1e-36), 1.0)


def _padded(rows: int, length: int, like: Tensor) -> Tensor:
    """``[rows, length]``, each row on a 64-byte boundary: a kernel's result then does not depend on the packing."""
    return torch.empty(rows, -(-length // 16) * 16, dtype=arithmetic_dtype(like.dtype), device=like.device)[:, :length]


class _Vectors:
    """The inputs and outputs of both products: u = r²/m and Sᵀu for columns, c²/n and S c²/n for rows."""

    def __init__(self, count: int, m: int, n: int, like: Tensor) -> None:
        self.count, self.m, self.n, self.like = count, m, n, like
        self.row_in, self.row_out = _padded(count, m, like), _padded(count, m, like)
        self.column_in, self.column_out = _padded(count, n, like), _padded(count, n, like)

    def mean_square_of_rows(self) -> Tensor:
        """Mean square of each row of scale·G, ``[B, m]`` (in ``row_out``)."""
        self.column_in.fill_(1.0 / self.n)
        self.rows()
        return self.row_out

    def mean_square_of_columns(self) -> Tensor:
        """Mean square of each column of scale·G, ``[B, n]`` (in ``column_out``)."""
        self.row_in.fill_(1.0 / self.m)
        self.columns()
        return self.column_out


class ResidentSquares(_Vectors):
    """S of a pack of same-shaped matrices, held in the workspace ``[B, m, n]``."""

    def __init__(self, pack: list[Slice], workspace: Workspace, batched: bool) -> None:
        super().__init__(sum(s.stop - s.start for s in pack), *pack[0].batch.shape, pack[0].batch.source)
        self.pack, self.batched = pack, batched
        stride = -(-self.m * self.n // 16) * 16
        flat = workspace.take(self.count * stride, self.like)
        self.squares = flat.view(self.count, stride)[:, : self.m * self.n].unflatten(1, (self.m, self.n))
        if not batched:
            each = self.squares.unbind(0)
            self._row_products = list(zip(each, self.column_in.unbind(0), self.row_out.unbind(0)))
            transposed = [matrix.t() for matrix in each]
            self._column_products = list(zip(transposed, self.row_in.unbind(0), self.column_out.unbind(0)))

    def gather(self) -> Tensor:
        """The sources themselves, into the workspace (S is lost)."""
        if len(self.pack) == 1:
            return self.squares.copy_(self.pack[0].source())
        parts = self.squares.split([s.stop - s.start for s in self.pack])
        torch._foreach_copy_(list(parts), [s.source() for s in self.pack])
        return self.squares

    def load(self) -> None:
        """S of G. Low precision is converted before it is squared."""
        if len(self.pack) == 1 and self.like.dtype == self.squares.dtype:
            source = self.pack[0].source()
            torch.mul(source, source, out=self.squares)
        else:
            self.gather()
            self.squares.mul_(self.squares)

    def load_scaled(self) -> Tensor:
        """S of ``scale · G``; returns the powers of two ``scale [B, 1]`` that bring max |G| of each matrix near 1."""
        values = self.gather()
        scale = power_of_two(torch.linalg.vector_norm(values, torch.inf, dim=(1, 2))).unsqueeze(1)
        values.mul_(scale.unsqueeze(-1))
        values.mul_(values)
        return scale

    def rows(self) -> None:
        """row_out ← S column_in. A loop of ``mv``: ``bmm`` with one column is up to 15 times slower on a CPU."""
        if self.batched:
            self.row_out.copy_(torch.bmm(self.squares, self.column_in.unsqueeze(-1)).squeeze(-1))
            return
        for matrix, vector, out in self._row_products:
            torch.mv(matrix, vector, out=out)

    def columns(self) -> None:
        """column_out ← Sᵀ row_in."""
        if self.batched:
            self.column_out.copy_(torch.bmm(self.row_in.unsqueeze(1), self.squares).squeeze(1))
            return
        for matrix, vector, out in self._column_products:
            torch.mv(matrix, vector, out=out)

    def sweep(self, update: Callable[[slice | None], None]) -> None:
        """One round's two products, with ``update`` (row_out → row_in; ``None``: of all rows) between them."""
        self.rows()
        update(None)
        self.columns()

    def descend(self, row: Tensor, column: Tensor, decay: float) -> None:
        """W ← decay·W + diag(row) G diag(column), with ``row [B, m]`` and ``column [B, n]``; overwrites S."""
        column, row = column.unsqueeze(1), row.unsqueeze(2)
        if len(self.pack) == 1:
            _descend(self.pack[0].weight(), self.pack[0].source(), row, column, decay, self.squares)
            return
        values = self.gather().mul_(column).mul_(row)
        parts = list(values.split([s.stop - s.start for s in self.pack]))
        weights = [s.weight() for s in self.pack]
        torch._foreach_add_(parts, weights, alpha=decay)
        torch._foreach_copy_(weights, parts)


class BlockedSquares(_Vectors):
    """S of one matrix that is too large to stay in cache, recomputed by row blocks: one pass over G a round."""

    def __init__(self, part: Slice, workspace: Workspace, block: int) -> None:
        super().__init__(1, *part.batch.shape, part.batch.source)
        self.weight, self.source = part.weight()[0], part.source()[0]
        self.workspace, self.scale = workspace, None
        height = max(1, block // self.n)
        self.blocks = [slice(i, min(i + height, self.m)) for i in range(0, self.m, height)]

    def load(self) -> None:
        """From here on S is that of G."""
        self.scale = None

    def load_scaled(self) -> Tensor:
        """From here on S is that of ``scale · G``; returns ``scale [1, 1]``, which brings max |G| near 1."""
        dtype = arithmetic_dtype(self.like.dtype)
        norms = [torch.linalg.vector_norm(self.source[b], torch.inf, dtype=dtype) for b in self.blocks]
        self.scale = power_of_two(torch.stack(norms).amax()).view(1, 1)
        return self.scale

    def _buffer(self, block: slice) -> Tensor:
        return self.workspace.take((block.stop - block.start) * self.n, self.like).view(-1, self.n)

    def _squares(self, block: slice) -> Tensor:
        values, out = self.source[block], self._buffer(block)
        if self.scale is None and values.dtype == out.dtype:
            return torch.mul(values, values, out=out)
        out.copy_(values)
        if self.scale is not None:
            out.mul_(self.scale)
        return out.mul_(out)

    def rows(self) -> None:
        """row_out ← S column_in."""
        for block in self.blocks:
            torch.mv(self._squares(block), self.column_in[0], out=self.row_out[0, block])

    def columns(self) -> None:
        """column_out ← Sᵀ row_in."""
        self.column_out.zero_()
        for block in self.blocks:
            self.column_out[0].addmv_(self._squares(block).t(), self.row_in[0, block])

    def sweep(self, update: Callable[[slice | None], None]) -> None:
        """One round, both products in one pass: the update of a block's rows comes before its share of the columns."""
        self.column_out.zero_()
        for block in self.blocks:
            squares = self._squares(block)
            torch.mv(squares, self.column_in[0], out=self.row_out[0, block])
            update(block)
            self.column_out[0].addmv_(squares.t(), self.row_in[0, block])

    def descend(self, row: Tensor, column: Tensor, decay: float) -> None:
        """W ← decay·W + diag(row) G diag(column), with ``row [1, m]`` and ``column [1, n]``."""
        for b in self.blocks:
            _descend(self.weight[b], self.source[b], row[0, b].unsqueeze(1), column[0], decay, self._buffer(b))


Squares = ResidentSquares | BlockedSquares


def open_squares(pack: list[Slice], workspace: Workspace, sizes: Sizes, batched: bool) -> Squares:
    """S of a pack: resident, or by row blocks for a matrix that is too large."""
    m, n = pack[0].batch.shape
    if m * n > sizes.resident:
        return BlockedSquares(pack[0], workspace, sizes.block)
    return ResidentSquares(pack, workspace, batched)


def _descend(weight: Tensor, source: Tensor, row: Tensor, column: Tensor, decay: float, buffer: Tensor) -> None:
    """W ← decay·W + row·G·column through a chunk-sized buffer; a low-precision W is rounded once."""
    if source.dtype == buffer.dtype:
        torch.mul(source, column, out=buffer)
    else:
        buffer.copy_(source).mul_(column)
    if weight.dtype == buffer.dtype:
        if decay != 1.0:
            weight.mul_(decay)
        weight.addcmul_(buffer, row)
    else:
        weight.copy_(buffer.mul_(row).add_(weight, alpha=decay))
