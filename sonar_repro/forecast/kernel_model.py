"""What one operator does on a GPU: bytes moved, floating-point operations, kernels launched. From shapes alone.

``time = max(bytes / bandwidth, operations / rate, launches x shortest kernel)``, see :mod:`.schedule`. Bytes are those
of distinct operands and results: every kernel reads its inputs from memory and writes its outputs to it (caches are not
modelled; what fits in a cache is shorter than the shortest kernel anyway). Operators that only make views or
allocate launch nothing. Launch counts are read off PyTorch's CUDA sources, named at each rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten

# aten/src/ATen/native/cuda/MultiTensorApply.cuh: elements a block works on, blocks a launch, and tensors a launch by
# how many lists are walked together.
CHUNK = 65536
MAX_BLOCKS = 320
MAX_TENSORS = (110, 64, 48, 36, 30)


@dataclass(frozen=True, slots=True)
class Work:
    """What an operator does on the device; ``launches=0``: nothing.

    ``nbytes`` and ``flops`` are without what depends on which experts have tokens: ``expert_bytes`` are the weights of
    all experts, of which :func:`.declared.share_hit` counts (``tokens``, ``top_k``, ``experts``).
    ``tensor_core``: whether ``flops`` run in a 16-bit type. ``grouped``: a ``_grouped_mm``, whose launches depend on
    the card. ``syncs``: the host waits for the result.
    """

    nbytes: float = 0
    flops: float = 0
    launches: int = 1
    expert_bytes: float = 0
    tokens: float = 0
    top_k: int = 1
    experts: int = 1
    tensor_core: bool = True
    grouped: bool = False
    syncs: bool = False
    tensors: int = 1  # how many parameters a multi-tensor operator walks: its host time grows with them


NOTHING = Work(launches=0)

#: Artefacts of tracing, which a real step does not run at all.
NOT_RUN = ("prim::device", "profiler::")

ALLOCATIONS = (
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh",
    "_reshape_alias", "alias", "detach", "set_", "resize_", "is_same_size", "record_stream",
)  # fmt: skip
#: Written, not read.
FILLS = (
    "zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",
    "zero_", "fill_", "scalar_tensor", "eye", "linspace", "uniform_", "normal_", "bernoulli_", "rand", "randn",
)  # fmt: skip
#: Reads as much of its first operand as it returns, at the positions that the indices name.
LOOKUPS = ("embedding", "index", "index_select", "gather", "take", "take_along_dim")
#: Kernels of operators that launch more than one (aten/src/ATen/native/cuda: a fill and then the kernel, or a
#: multi-pass sort).
LAUNCHES = {
    "slice_backward": 2, "select_backward": 2, "constant_pad_nd": 2, "nll_loss_backward": 2, "scatter": 2,
    "scatter_add": 2, "index_add": 2, "topk": 2, "sort": 4, "argsort": 4, "histc": 2, "bincount": 3, "multinomial": 3,
}  # fmt: skip
SYNCS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal")


def nbytes(value: Any) -> int:
    """Bytes of a tensor, or of the tensors in a list: elements that exist (an expanded tensor's are those stored)."""
    if isinstance(value, Tensor):
        size = value.numel() * value.element_size()
        return min(size, value.untyped_storage().nbytes()) if size else 0
    if isinstance(value, (list, tuple)):
        return sum(nbytes(v) for v in value)
    return 0


def multi_tensor_launches(sizes: Iterable[int], lists: int) -> int:
    """Launches of a multi-tensor (foreach or fused) operator over tensors of these sizes in elements.

    ``multi_tensor_apply`` fills a launch with chunks of 65,536 elements, up to 320, from at most so many tensors
    (36 for fused AdamW, which walks four lists); it launches when either is full.

    Args:
        sizes: elements of each tensor of one list.
        lists: tensor lists walked together (1 for a norm, 4 for fused AdamW).
    """
    limit = MAX_TENSORS[min(lists, len(MAX_TENSORS)) - 1]
    launches = blocks = tensors = 0
    for size in sizes:
        chunks = -(-size // CHUNK)
        if not chunks:
            continue
        tensors += 1
        full, blocks = divmod(blocks + chunks, MAX_BLOCKS)
        launches += full
        if full:
            tensors = 1 if blocks else 0
        if tensors == limit and blocks:
            launches, blocks, tensors = launches + 1, 0, 0
    return launches + (1 if blocks else 0)


class KernelModel:
    """Work of an operator from its arguments and result; ``work(func, args, kwargs, result)``."""

    def __init__(self) -> None:
        self._rules: dict[Any, Callable[..., Work] | None] = {}

    def work(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Work | None:
        """The operator's :class:`Work`, or None for what a real step does not run."""
        try:
            rule = self._rules[func]
        except KeyError:
            rule = self._rules[func] = rule_of(func)
        return None if rule is None else rule(func, args, kwargs, result)


def rule_of(func: Any) -> Callable[..., Work] | None:
    """Which rule counts an operator; None where it does not exist in a real step."""
    name = func._schema.name
    if name.startswith(NOT_RUN):
        return None
    short = name.split("::")[1]
    if getattr(func, "is_view", False) or short in ALLOCATIONS:
        return _nothing
    if short in _BY_NAME:
        return _BY_NAME[short]
    if short in FILLS:
        return _fill
    if short in LOOKUPS:
        return _lookup
    if short.startswith("_foreach_"):
        return _foreach
    if short.startswith("_fused_"):
        return _fused
    if func.overloadpacket in flop_registry:
        return _flops
    return _elementwise


def _nothing(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    return NOTHING


def _short(func: Any) -> str:
    return func._schema.name.split("::")[1]


def _operands(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    return sum(nbytes(a) for a in args) + sum(nbytes(v) for k, v in kwargs.items() if k != "out")


def _elementwise(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Everything that reads its operands once and writes its results once; in-place operators do both to one."""
    name = _short(func)
    written = nbytes(result)
    if result is None:
        written = sum(nbytes(a) for a, s in zip(args, func._schema.arguments) if s.alias_info and s.alias_info.is_write)
    return Work(_operands(args, kwargs) + written, launches=LAUNCHES.get(name, 1), syncs=name in SYNCS)


def _copy(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    return Work(nbytes(args[1]) + nbytes(args[0]))


def _fill(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    return Work(nbytes(result))


def _lookup(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    return Work(sum(nbytes(a) for a in args[1:]) + 2 * nbytes(result))


def _update_rows(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """``index_put_`` and its kin: reads values and indices, writes (reads too, if it accumulates) the rows named."""
    values = nbytes(args[2]) if len(args) > 2 else 0
    return Work(sum(nbytes(a) for a in args[1:2]) + 3 * values)


def _embedding_backward(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Embedding.cu: the whole gradient is filled with zeros and the rows of the tokens are added; above 3,072 tokens
    by a sort and a sum over segments."""
    gradient, indices = args[0], args[1]
    return Work(
        nbytes(result) + 3 * nbytes(gradient) + 2 * nbytes(indices), launches=2 if indices.numel() <= 3072 else 8
    )


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Matrix products: operations by torch's own registered formulas."""
    operations = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
    return Work(_operands(args, kwargs) + nbytes(result), operations, tensor_core=_narrow(args))


def _narrow(args: Sequence[Any]) -> bool:
    return any(isinstance(a, Tensor) and a.dtype in (torch.bfloat16, torch.float16) for a in args)


def _attention(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    query, key, value = args[:3]
    operations = sdpa_flop_count(query.shape, key.shape, value.shape)
    return Work(_operands(args[:3], {}) + nbytes(result[:2]), operations, tensor_core=_narrow(args))


def _attention_backward(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """flash_bwd_launch_template.h: row sums of dO x O, the main kernel, conversion of the fp32 dQ accumulator."""
    grad, query, key, value = args[:4]
    operations = sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    accumulator = 4 * query.numel() * 2
    moved = _operands(args[:6], {}) + nbytes(result) + accumulator
    return Work(moved, operations, launches=3, tensor_core=_narrow(args))


def _grouped_mm(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Rows grouped by expert times the experts' weights (2-D x 3-D), or the weights' gradient (2-D x 2-D)."""
    a, b = args[0], args[1]
    offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
    groups = offsets.numel() if offsets is not None else b.shape[0]
    if a.dim() == 2 and b.dim() == 2:
        operations = 2 * a.shape[0] * a.shape[1] * b.shape[1]
        moved, weights, rows = nbytes(a) + nbytes(b) + nbytes(result), 0, a.shape[1]
    else:
        rows = a.shape[0] if a.dim() == 2 else a.shape[0] * a.shape[1]
        operations = 2 * rows * a.shape[-1] * b.shape[-1]
        moved, weights = nbytes(a) + nbytes(result), nbytes(b)
    # Rows stand in for tokens at top-1: (1 - 1/E)^(T k) is within a few percent of (1 - k/E)^T.
    routing = {"expert_bytes": weights, "tokens": rows, "experts": groups}
    return Work(moved, operations, launches=2, grouped=True, tensor_core=_narrow(args), **routing)


def _foreach(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Reads every list; writes the result, or the first list in place."""
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
    sizes = [t.numel() for t in lists[0]]
    norm = _short(func) == "_foreach_norm"
    written = 0 if norm else nbytes(lists[0] if result is None else result)
    walked = len(lists) + (0 if result is None or norm else 1)
    return Work(
        _operands(args, kwargs) + written,
        launches=multi_tensor_launches(sizes, walked) + norm,  # a norm's partial sums take one kernel more
        tensors=len(sizes),
    )


def _fused(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Fused AdamW and SGD: parameters and states are read and written, gradients are read."""
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
    big = [each for each in lists if each[0].numel() == lists[0][0].numel()] if lists[0][0].numel() > 1 else lists[:4]
    moved = 2 * sum(nbytes(each) for each in big) - nbytes(lists[1])
    return Work(moved, launches=multi_tensor_launches([t.numel() for t in lists[0]], len(big)), tensors=len(lists[0]))


def _eight_bit(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """bitsandbytes' blockwise 8-bit update: gradient read; parameter, states and block maxima read and written."""
    named = {a.name: v for a, v in zip(func._schema.arguments, args)} | kwargs
    both = ("p", "state1", "state2", "absmax1", "absmax2")
    return Work(nbytes(named.get("g")) + 2 * sum(nbytes(named.get(n)) for n in both))


def foreach_group(sizes: Sequence[int], element_bytes: Sequence[int], *, writes: bool) -> Work:
    """One multi-tensor operator in place of one operator a tensor.

    On CUDA ``clip_grad_norm_`` takes all norms, and scales all gradients, by ``_foreach_norm`` and ``_foreach_mul_``;
    fake tensors fall back to one operator a tensor. ``writes``: scaling, else a norm.
    """
    moved = sum(n * b for n, b in zip(sizes, element_bytes)) * (2 if writes else 1)
    return Work(moved, launches=multi_tensor_launches(sizes, 1) + (not writes), tensors=len(sizes))


_BY_NAME: dict[str, Callable[..., Work]] = {
    "copy_": _copy,
    "index_put_": _update_rows,
    "index_put": _update_rows,
    "embedding_dense_backward": _embedding_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_grouped_mm": _grouped_mm,
    "optimizer_update_8bit_blockwise": _eight_bit,
}
