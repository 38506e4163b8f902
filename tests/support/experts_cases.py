"""Experts modules in miniature and the comparison with ``eager``, for every backend's contract test."""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPES = {
    "olmoe": dict(num_experts=16, num_experts_per_tok=4, num_key_value_heads=4, pad_token_id=0, eos_token_id=1),
    "granitemoe": dict(num_local_experts=10, num_experts_per_tok=4, num_key_value_heads=2),
    "gpt_oss": dict(
        num_local_experts=6, num_experts_per_tok=2, num_key_value_heads=2, head_dim=16
    ),  # biases, [E, in, out]
}
ROUTINGS = ("mixed", "idle_expert", "one_expert", "single_token")


def experts_module(kind: str, dtype: torch.dtype, hidden: int = 64, width: int = 48) -> torch.nn.Module:
    """The first experts module of a tiny model, with values large enough for the gate to bend."""
    sizes = dict(vocab_size=64, hidden_size=hidden, intermediate_size=width, num_hidden_layers=1, num_attention_heads=4)
    config = AutoConfig.for_model(kind, **sizes, **SHAPES[kind])
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    [module] = [m for m in model.modules() if "is_concatenated" in vars(m)]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def routing(kind: str, experts: int, top_k: int, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert indices ``[T, K]``, each token's distinct, and weights that sum to one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 1 if kind == "single_token" else 37
    scores = torch.rand(tokens, experts, generator=generator)
    if kind == "idle_expert":
        scores[:, [0, experts // 2, experts - 1]] = -1.0  # first, middle and last
    if kind == "one_expert":
        top_k, scores[:, 2] = 1, 2.0
    index = scores.topk(top_k).indices
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    return index, weights / weights.sum(-1, keepdim=True)


def run(module, implementation, index, weights, dtype, seed=9):
    """Output and gradients (hidden states, routing weights, parameters) of one implementation, in float64."""
    module = copy.deepcopy(module)
    module.config._experts_implementation = implementation
    generator = torch.Generator().manual_seed(seed)
    width = module.gate_up_proj.shape[1 if module.is_transposed else 2]
    hidden = torch.randn(index.shape[0], width, generator=generator).to(dtype).requires_grad_()
    weights = weights.to(dtype, copy=True).requires_grad_()
    output = module(hidden, index, weights)
    output.backward(torch.randn(output.shape, generator=generator).to(dtype))
    results = {"output": output, "hidden": hidden.grad, "weights": weights.grad}
    results |= {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: value.detach().double() for name, value in results.items()}


def relative_errors(got, wanted):
    return {name: float((got[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-30)) for name in wanted}
