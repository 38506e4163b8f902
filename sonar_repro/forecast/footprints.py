"""Stand-ins for expert kernels that need a GPU: they allocate, keep and free like the libraries and compute nothing.

Registered in transformers' ``ALL_EXPERTS_FUNCTIONS`` as ``sonicmoe_footprint`` and ``scattermoe_footprint``. They run
on fake tensors only (:mod:`sonar_repro.forecast.fake_model`): a real run under such a name would train on rubbish, so
it is refused.

Notation: T tokens, K experts a token, S = T·K rows, E experts, D hidden size, I expert width; G = 2I for gated
experts, else I. Written from the libraries' papers and public sources; no code of theirs is copied.

SonicMoE (arXiv 2512.14080, §3; as transformers calls it: ``moe_general_routing_inputs``)
    forward, up:    A ``[S, I]`` and pre-activation H ``[S, G]`` in one kernel that gathers rows of X itself.
    forward, down:  Y ``[S, D]``, then O ``[T, D]``. A and Y are not kept.
    kept:           X ``[T, D]`` (the layer's input, no gathered copy), H, routing scores in fp32 ``[S]``, and int32
                    routing indices: three ``[S]``, one ``[E+1]``, one ``[T+1]``. That is 2TD + 2SG bytes in bf16.
    backward, down: dW2, dH ``[S, G]``, A' ``[S, I]`` (recomputed from H and scaled by the scores), dS.
    backward, up:   dX by row ``[S, D]``, dW1, then dX ``[T, D]``.
    The two halves are two autograd nodes, and both weights enter through a ``permute``. Autograd runs the node with the
    higher sequence number first, so after the down half comes the up half, and only then dW2 reaches its parameter:
    dW1 and dW2 of a layer are alive together.

ScatterMoE (arXiv 2403.08245, §3; ``parallel_linear``)
    up:    output ``[S, G]`` in expert order; keeps X ``[T, D]`` and int64 indices: two ``[S]`` and one ``[E]``.
    gate:  plain PyTorch on ``[S, G]``: activation and product keep ``[S, G]`` and ``[S, I]``.
    down:  keeps its input ``[S, I]``, the scores ``[T, K]``, and the output by row ``[S, D]`` (for their gradient).
    backward, down: dScores; the kept output's buffer is reused for the grouped gradient; dW2; dInput ``[S, I]``.
    backward, up:   a gathered copy of X ``[S, D]``, whose buffer is then reused for dX by row; dW1; dX ``[T, D]``.
    The transpose of the down weight is taken after the gate, so its gradient reaches the parameter before dW1 exists: a
    hook frees it first, and one weight's gradient less is alive at the peak than with SonicMoE. (Checked byte for byte
    against the library, which runs on a CPU under Triton's interpreter: tests/backends/test_footprints.py.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from ..errors import Unsupported, UserError
from .declared_work import kernel

NAMES = ("sonicmoe_footprint", "scattermoe_footprint")

#: Columns of one output tile of SonicMoE's backward kernel on compute capability 12.0; its row sums are fp32 partials.
_TILE_COLUMNS = 128


_real_tensors_allowed = False


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Let footprints run on real tensors inside the block: to time the host, never to train."""
    global _real_tensors_allowed
    before, _real_tensors_allowed = _real_tensors_allowed, True
    try:
        yield
    finally:
        _real_tensors_allowed = before


def register() -> None:
    """Put both footprints into transformers' experts interface; safe to call twice."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("sonicmoe_footprint", sonicmoe_footprint)
    ALL_EXPERTS_FUNCTIONS.register("scattermoe_footprint", scattermoe_footprint)


def sonicmoe_footprint(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """SonicMoE's allocations for an experts module; shapes as in transformers' experts interface.

    Args:
        hidden_states: ``[T, D]``.
        top_k_index: int64 ``[T, K]``.
        top_k_weights: ``[T, K]``.

    Returns:
        ``[T, D]`` in the dtype of ``hidden_states``, contents undefined.
    """
    _check(self, hidden_states, "sonicmoe")
    if not self.has_gate:
        raise UserError("backend=sonicmoe: its kernels are for gated experts only; use backend=grouped_mm")
    tokens, top_k = top_k_index.shape
    rows = tokens * top_k
    integers = {"dtype": torch.int32, "device": hidden_states.device}
    token_index = torch.empty(rows, **integers)
    scores = top_k_weights.reshape(-1).to(hidden_states.dtype)
    expert_index = top_k_index.reshape(-1).int()
    order = (2, 1, 0) if self.is_transposed else (1, 2, 0)
    up, down = self.gate_up_proj.permute(*order), self.down_proj.permute(*order)
    biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else (None, None)
    scores = scores.float()
    routing = tuple(torch.empty(n, **integers) for n in (rows, rows, rows, self.num_experts + 1, tokens + 1))
    counts = torch.empty(self.num_experts, **integers)
    kernel("sonicmoe: routing", 2 * _bytes(expert_index, token_index, *routing), launches=4)
    activated, pre_activation = _SonicUp.apply(hidden_states, up, biases[0], *routing)
    output = _SonicDown.apply(activated, pre_activation, down, biases[1], scores, tokens, *routing)
    del token_index, expert_index, counts
    return output


class _SonicUp(Function):
    """X ``[T, D]``, W1 ``[G, D, E]`` -> A ``[S, I]``, H ``[S, G]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *routing: Tensor) -> tuple[Tensor, Tensor]:
        rows, gate_up = routing[0].numel(), weight.shape[0]
        activated = x.new_empty(rows, gate_up // 2)
        pre_activation = x.new_empty(rows, gate_up)
        kernel(
            "sonicmoe: up, SwiGLU",
            _bytes(x, activated, pre_activation),
            **_products(x, weight, rows, experts_last=True),
        )
        ctx.save_for_backward(x, weight, bias, *routing)
        ctx.mark_non_differentiable(activated)
        ctx.set_materialize_grads(False)
        return activated, pre_activation

    @staticmethod
    def backward(ctx: Any, _: None, d_pre_activation: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *routing = ctx.saved_tensors
        dx_rows = x.new_empty(routing[0].numel(), x.shape[1])
        d_weight = torch.empty_like(weight)
        d_bias = None if bias is None else torch.empty_like(bias)
        dx = torch.empty_like(x)
        product = _products(x, weight, dx_rows.shape[0], experts_last=True)
        kernel("sonicmoe: dX by row", _bytes(d_pre_activation, dx_rows), **product)
        kernel("sonicmoe: dW1", _bytes(x, d_pre_activation, d_weight), **{**product, "expert_bytes": 0})
        kernel("sonicmoe: dX", _bytes(dx_rows, dx))
        del dx_rows
        return dx, d_weight, d_bias, *[None] * len(routing)


class _SonicDown(Function):
    """A ``[S, I]``, H ``[S, G]``, W2 ``[D, I, E]``, scores ``[S]`` -> O ``[T, D]``."""

    @staticmethod
    def forward(
        ctx: Any,
        activated: Tensor,
        pre_activation: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scores: Tensor,
        tokens: int,
        *routing: Tensor,
    ) -> Tensor:
        expert_rows = activated.new_empty(activated.shape[0], weight.shape[0])
        output = activated.new_empty(tokens, weight.shape[0])
        product = _products(output, weight, activated.shape[0], experts_last=True)
        kernel("sonicmoe: down", _bytes(activated, expert_rows), **product)
        kernel("sonicmoe: sum over experts", _bytes(expert_rows, scores, output))
        ctx.save_for_backward(pre_activation, weight, bias, scores, *routing[:4])
        del expert_rows
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        pre_activation, weight, bias, scores, *_ = ctx.saved_tensors
        rows, width = pre_activation.shape[0], weight.shape[1]
        d_weight = torch.empty_like(weight)
        d_bias = None if bias is None else torch.empty_like(bias)
        d_pre_activation = torch.empty_like(pre_activation)
        scaled = pre_activation.new_empty(rows, width)
        d_scores = torch.empty_like(scores)
        grouped_scores = torch.empty_like(scores)
        partial_sums = scores.new_empty(rows, -(-width // _TILE_COLUMNS))
        product = _products(d_output, weight, rows, experts_last=True)
        moved = _bytes(d_output, pre_activation, d_pre_activation, scaled, partial_sums)
        kernel("sonicmoe: dH, dSwiGLU", moved, **product)
        kernel("sonicmoe: dW2", _bytes(d_output, scaled, d_weight), **{**product, "expert_bytes": 0})
        kernel("sonicmoe: dS", _bytes(partial_sums, d_scores))
        del scaled, grouped_scores, partial_sums
        return None, d_pre_activation, d_weight, d_bias, d_scores, *[None] * 6


def scattermoe_footprint(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """ScatterMoE's allocations for an experts module; arguments and result as in :func:`sonicmoe_footprint`."""
    _check(self, hidden_states, "scattermoe")
    top_k = top_k_index.shape[1]
    integers = {"dtype": torch.int64, "device": hidden_states.device}
    sorted_experts = torch.empty(top_k_index.numel(), **integers)
    sorted_rows = torch.empty(top_k_index.numel(), **integers)
    counts = torch.empty(self.num_experts, **integers)
    offsets = torch.empty(self.num_experts, **integers)
    del counts
    routing = (sorted_experts, sorted_rows, offsets)
    kernel("scattermoe: sort by expert", 2 * _bytes(top_k_index, *routing), launches=6)
    up = self.gate_up_proj if self.has_gate else self.up_proj
    up_bias = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias) if self.has_bias else None
    # A weight is used as [E, in, out]: a transposed view of transformers' usual [E, out, in].
    rows = _ScatterLinear.apply(hidden_states, _in_out(self, up), up_bias, None, top_k, *routing)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    down_bias = self.down_proj_bias if self.has_bias else None
    scores = top_k_weights.to(hidden_states.dtype)
    return _ScatterLinear.apply(rows, _in_out(self, self.down_proj), down_bias, scores, 1, *routing)


def _in_out(module: nn.Module, weight: Tensor) -> Tensor:
    return weight if module.is_transposed else weight.transpose(2, 1)


class _ScatterLinear(Function):
    """One grouped product. Up: X ``[T, D]`` -> ``[S, G]``; down, with scores: ``[S, I]`` -> O ``[T, D]``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scores: Tensor | None, fan_out: int, *routing: Tensor
    ) -> Tensor:
        output = x.new_empty(routing[0].numel(), weight.shape[2])
        kernel("scattermoe: scatter2scatter", _bytes(x, output), **_products(x, weight, output.shape[0], fan_out))
        expanded = None
        if scores is not None:
            expanded = output.view(*scores.shape, output.shape[-1])
            output = (scores.unsqueeze(1) @ expanded).squeeze(1)
        ctx.save_for_backward(x, weight, bias, *routing, scores, expanded)
        ctx.fan_out = fan_out
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, sorted_experts, _, _, scores, expanded = ctx.saved_tensors
        experts, size_in, size_out = weight.shape
        d_scores = None
        if scores is not None:
            d_scores = (expanded @ d_output.unsqueeze(-1)).squeeze(-1)
            d_rows = None  # the gradient by row overwrites ``expanded``
        else:
            d_rows = x.new_empty(sorted_experts.numel(), size_in)  # gathered X, overwritten by dX by row
        d_weight = x.new_zeros(experts, size_out, size_in).permute(0, 2, 1)
        d_bias = None if bias is None else torch.zeros_like(bias)
        if d_rows is None:
            d_rows = x.new_empty(sorted_experts.numel(), size_in)
        product = _products(x, weight, sorted_experts.numel(), ctx.fan_out)
        grouped = sorted_experts.numel() * x.element_size()  # bytes of a column of rows in expert order
        if scores is not None:
            kernel("scattermoe: group dO", _bytes(d_output) + grouped * size_out)
        else:
            kernel("scattermoe: group X", _bytes(x) + grouped * size_in)
        kernel("scattermoe: dW", grouped * (size_in + size_out) + _bytes(d_weight), **{**product, "expert_bytes": 0})
        kernel("scattermoe: scatter2scatter", grouped * (size_in + size_out), **product)
        dx = d_rows if ctx.fan_out == 1 else d_rows.view(x.shape[0], ctx.fan_out, size_in).sum(-2)
        return dx, d_weight, d_bias, d_scores, *[None] * 4


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _products(x: Tensor, weight: Tensor, rows: int, fan_out: int = 0, experts_last: bool = False) -> dict[str, int]:
    """What a grouped product over ``rows`` rows does beside its rows: 2·rows·(in·out) operations, the weights it reads.

    ``weight`` holds one matrix an expert, experts in the first or the last dimension; ``x`` has a row a token (or, at
    ``fan_out=1``, a row already for each of a token's experts).
    """
    experts = weight.shape[-1] if experts_last else weight.shape[0]
    tokens = rows if fan_out == 1 else x.shape[0]
    return {
        "flops": 2 * rows * (weight.numel() // experts),
        "expert_bytes": _bytes(weight),
        "tokens": tokens,
        "top_k": max(1, rows // tokens),
        "experts": experts,
    }


def _check(module: nn.Module, hidden_states: Tensor, backend: str) -> None:
    if not (isinstance(hidden_states, FakeTensor) or _real_tensors_allowed):
        raise Unsupported(
            f"backend={backend}_footprint: allocates memory and computes nothing; use backend={backend} on a CUDA GPU,"
            " or scale=forecast"
        )
    if hidden_states.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UserError(f"scale.dtype={hidden_states.dtype}: backend={backend} takes bfloat16, float16 or float32")
    if getattr(module, "has_post_expert_norm", False):
        raise UserError(f"backend={backend}: does not support experts with a norm after them; use backend=grouped_mm")
