"""Device buffers that CUDA's operators allocate inside, out of the dispatcher's sight, for forecasts on fake tensors.

Everything here is read off PyTorch's sources (named at each rule); nothing is fitted to a measurement. Left out because
they stay under 1 MiB at the sizes of the papers: cub's temporary storage in ``sort`` and ``topk``, the semaphores and
staging buffers of split reductions, generator states, the accumulators of a split flash-attention forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..instruments.tracker import AllocationTracker

aten = torch.ops.aten

#: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: ``:4096:2:16:8`` KiB by default ...
CUBLAS_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
#: ... and 32 MiB from Hopper on (Blackwell since pytorch/pytorch#175344, February 2026: torch 2.12 and 2.13).
CUBLAS_WORKSPACE_LARGE = 4096 * 8 * 1024


def cublas_workspace_bytes(compute_capability: int) -> int:
    """Default size of one cuBLAS workspace on a card of this major compute capability (9 Hopper; 10, 12 Blackwell)."""
    return CUBLAS_WORKSPACE_LARGE if compute_capability in (9, 10, 12) else CUBLAS_WORKSPACE


_MATMULS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten._grouped_mm.default}
_FOREACH_NORM = aten._foreach_norm.Scalar
_EMBEDDING_BACKWARD = aten.embedding_dense_backward.default
_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_CHUNK = 65536  # kChunkSize, aten/src/ATen/native/cuda/MultiTensorApply.cuh


class CudaModel:
    """Hidden device buffers by operator; one instance a run, because workspaces are allocated once.

    Args:
        cublas_workspace: bytes of one cuBLAS workspace (:func:`cublas_workspace_bytes`).
    """

    def __init__(self, cublas_workspace: int) -> None:
        self.cublas_workspace = cublas_workspace
        self._threads: set[bool] = set()
        self._rules = {
            _FOREACH_NORM: self._foreach_norm,
            _EMBEDDING_BACKWARD: self._embedding_backward,
            _ATTENTION_BACKWARD: self._attention_backward,
        }

    def __call__(self, tracker: AllocationTracker, func: Any, args: tuple, result: Any, region: int) -> Iterable[int]:
        """Sizes in bytes of what ``func`` allocates and frees inside; lasting workspaces go to ``tracker.reserve``."""
        if func in _MATMULS:
            # cuBLAS handles are per thread, and so are their workspaces, kept for good. On CUDA, backward (recomputed
            # blocks and hooks included) runs in the device's own autograd thread.
            in_backward = torch._C._current_graph_task_id() != -1
            if in_backward not in self._threads:
                self._threads.add(in_backward)
                tracker.reserve(self.cublas_workspace)
            return ()
        rule = self._rules.get(func)
        return rule(args, result) if rule is not None else ()

    @staticmethod
    def _foreach_norm(args: tuple, result: Any) -> Iterable[int]:
        """ForeachReduceOp.cu: one fp32 partial norm for each chunk of the largest tensor, for every tensor."""
        tensors = args[0]
        chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
        return (len(tensors) * chunks * 4,)

    @staticmethod
    def _embedding_backward(args: tuple, result: torch.Tensor) -> Iterable[int]:
        """Embedding.cu and EmbeddingBackwardKernel.cu: up to 3,072 indices one kernel writes the gradient directly;
        more are sorted (int64 keys and positions) and summed by segments through an fp32 buffer of
        (N / 10 + min(N, V)) rows, each padded to a multiple of 32."""
        indices, vocabulary = args[1].numel(), args[2]
        if indices <= 3072:
            return ()
        rows = indices // 10 + min(indices, vocabulary)
        width = -(-result.shape[-1] // 32) * 32
        return (indices * 8, indices * 8, rows * width * 4)

    @staticmethod
    def _attention_backward(args: tuple, result: Any) -> Iterable[int]:
        """flash_attn/flash_api.cpp mha_bwd: fp32 dQ accumulator ``[B, T128, H, D32]`` and softmax term ``[B, H, T128]``
        (T rounded up to 128, D to 32), and with grouped queries dK and dV at the query's head count. The
        memory-efficient kernel, which CUDA takes for a padded batch, keeps the same accumulator and a delta a row."""
        query, key = args[1], args[2]
        batch, heads, length, width = query.shape
        rows, columns = -(-length // 128) * 128, -(-width // 32) * 32
        sizes = [batch * rows * heads * columns * 4, batch * heads * rows * 4]
        if key.shape[1] != heads:
            sizes += [batch * key.shape[2] * heads * width * query.element_size()] * 2
        return sizes
