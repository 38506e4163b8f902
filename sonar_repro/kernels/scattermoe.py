"""ScatterMoE (Tan et al., arXiv 2403.08245) behind transformers' experts interface: the library's ``parallel_linear``.

The library (github.com/shawntan/scattermoe, Triton kernels) is not on the package index; the extra ``scattermoe`` names
the commit that this adapter was written for. It takes expert weights as ``[E, in, out]`` of any strides: transformers'
``[E, 2I, H]`` and ``[E, H, I]`` go in as transposed views, gate rows before up rows as they are stored, and nothing is
copied.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import json
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError

NAME = "scattermoe"
COMMIT = "47b5e1502e5a10e82c8e5945d761b877849871e7"  # version 0.3.0; pyproject.toml's extra names the same
NEEDED = ("inputs", "expert_weights", "k", "sorted_expert_idxs", "sorted_scattered_idxs", "expert_offsets")
NEEDED += ("expert_biases", "gates", "grouped_in", "grouped_out")


def why_not(device: str) -> str | None:
    """Why the installed library cannot run on ``device``, or None: GPU generation, import, the call it must offer."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        major, minor = torch.cuda.get_device_capability()
        return f"its kernels need bf16 matrix units (compute capability 8.0), this card has {major}.{minor}"
    try:
        from scattermoe import parallel_linear
    except Exception as error:  # Triton raises errors of its own where it finds no driver or compiler
        first = next(iter(str(error).splitlines()), "")[:120]
        return f"the installed scattermoe cannot be imported ({type(error).__name__}: {first})"
    lacking = [name for name in NEEDED if name not in inspect.signature(parallel_linear).parameters]
    if lacking:
        return f"the installed scattermoe has a parallel_linear without {lacking[0]}; install commit {COMMIT[:7]}"
    return None


def register() -> str:
    """Put the adapter into transformers' experts interface; returns the name it has there. Safe to call twice."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    return NAME


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts module's forward pass on ScatterMoE's kernels.

    Args:
        hidden_states: ``[T, H]``.
        top_k_index: int64 ``[T, K]``, the experts of each token.
        top_k_weights: ``[T, K]``, their routing weights.

    Returns:
        ``[T, H]`` in the dtype of ``hidden_states``.

    Raises:
        UserError: experts with a norm behind them, or split over processes: the kernels know neither.
    """
    from scattermoe import parallel_linear

    _check(self)
    routing = sort_by_expert(top_k_index, self.num_experts)
    up = self.gate_up_proj if self.has_gate else self.up_proj
    up_bias = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias) if self.has_bias else None
    rows = parallel_linear(
        hidden_states, _in_out(self, up), top_k_index.shape[1], *routing, expert_biases=up_bias, grouped_out=True
    )  # [S, 2I], in expert order
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    down_bias = self.down_proj_bias if self.has_bias else None
    # The transposed view is taken here, after the gate: autograd then delivers this weight's gradient before it
    # computes the up projection's, and a hook can free it first.
    output = parallel_linear(
        rows,
        _in_out(self, self.down_proj),
        1,
        *routing,
        expert_biases=down_bias,
        gates=top_k_weights.to(rows.dtype),
        grouped_in=True,
    )  # [T, H], summed over each token's experts
    return output.to(hidden_states.dtype)


def sort_by_expert(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(experts of the S = T·K rows in ascending order, the rows in that order, end offset of each expert), all int64.

    The library's own helper does this under ``torch.compile``; here nothing is compiled and nothing waits for a device.
    """
    experts, rows = torch.sort(top_k_index.flatten(), stable=True)
    offsets = torch.searchsorted(experts, torch.arange(num_experts, device=experts.device), right=True)
    return experts, rows, offsets


def versions() -> dict[str, Any]:
    """What the record says about the kernels: library version, the commit it was installed from, Triton's version."""
    found: dict[str, Any] = {}
    for name in (NAME, "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if found[NAME]:
        origin = importlib.metadata.distribution(NAME).read_text("direct_url.json")
        found["scattermoe_commit"] = json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")
    return found


def _in_out(module: nn.Module, weight: Tensor) -> Tensor:
    return weight if module.is_transposed else weight.transpose(1, 2)


def _check(module: nn.Module) -> None:
    if getattr(module, "has_post_expert_norm", False):
        raise UserError(f"backend={NAME}: does not support experts with a norm after them; use backend=grouped_mm")
    if getattr(module, "_is_expert_parallel", False):
        raise UserError(f"backend={NAME}: does not support experts split over processes; use backend=grouped_mm")
