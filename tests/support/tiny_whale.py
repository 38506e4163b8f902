"""Tiny models with all five roles, fixed batches, and plain loops for the MESH tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sonar_repro.optim.mesh import MeshOptimizer, build

VOCABULARY = 96
NANOWHALE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "partial_rotary_factor": 1 / 3,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
    "layer_types": ["sliding_attention"] * 2,
    "mlp_layer_types": ["moe"] * 2,
    "sliding_window": 64,
    "max_position_embeddings": 64,
    "swiglu_limit": 1e9,
    "tie_word_embeddings": False,
}
_SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "deepseek_v4": NANOWHALE,
    "olmoe": {**_SHARED, "num_experts": 4},
    "granitemoe": {**_SHARED, "num_local_experts": 4, "tie_word_embeddings": True},
    "granitemoeshared": {**_SHARED, "num_local_experts": 4, "shared_intermediate_size": 24},
    "gpt_oss": {**_SHARED, "num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    "qwen2_moe": {
        **_SHARED, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
    },
}  # fmt: skip


def family(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides) -> nn.Module:
    """A random model in train mode; the same seed gives the same weights bit for bit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **{**FAMILIES[name], **overrides})
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    finally:
        torch.set_default_dtype(before)
    return model.train()


class Expert(nn.Module):
    """Two fused expert tensors behind the experts contract (an int attribute with ``expert`` in its name)."""

    def __init__(self, experts: int = 3, width: int = 8, inner: int = 6) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, width) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, width, inner) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("bd,eid->ebi", x, self.gate_up).chunk(2, -1)
        return torch.einsum("ebi,edi->bd", torch.tanh(gate) * up, self.down)


class Toy(nn.Module):
    """The smallest model with vocabulary, a vector, a dense matrix and routed experts; milliseconds a step."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(16, 8)
        self.mix = nn.Linear(8, 8)
        self.experts = Expert()
        self.head = nn.Linear(8, 16, bias=False)
        if dtype != torch.get_default_dtype():
            self.to(dtype)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(self.embedding(ids))
        logits = self.head(x + self.experts(x))
        return nn.functional.cross_entropy(logits[:-1].float(), ids[1:])


def toy_data(count: int, seed: int = 1, length: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(0, 16, (count, length), generator=generator))


def mesh(model: nn.Module, variant: str, **hyper) -> MeshOptimizer:
    return build(list(model.named_parameters()), model, variant=variant, **hyper)


def run(model: nn.Module, optimizer: MeshOptimizer, data: Sequence[Tensor], accumulation: int = 1) -> list[float]:
    """The plain loop of the docs: zero_grad, prepare, A backward passes of loss/A, step."""
    losses = []
    for start in range(0, len(data), accumulation):
        optimizer.zero_grad()
        optimizer.prepare()
        for ids in data[start : start + accumulation]:
            loss = model(ids)
            (loss / accumulation).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are not equal bit for bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]
