"""Tiny random configurations of transformers' MoE families, made from one table of small sizes."""

from __future__ import annotations

import torch
from torch import nn

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "max_position_embeddings": 64,
    "sliding_window": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "kv_channels": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# what the table alone does not make small or valid
SPECIAL = {
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
    # multi-head latent attention has as many key as query heads
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    **{name: {"num_key_value_heads": 4} for name in ("deepseek_v3", "glm4_moe_lite", "longcat_flash")},
}
FAMILIES = (
    "afmoe",
    "cohere2_moe",
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoe",
    "granitemoeshared",
    "jetmoe",
    "llama4_text",
    "longcat_flash",
    "minimax",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "solar_open",
)


def family_config(model_type: str):
    """A tiny configuration; fields that the family does not have are left out."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    default = kind()
    values = {k: v for k, v in SIZES.items() if getattr(default, k, None) is not None}
    for layered in ("layer_types", "mlp_layer_types"):
        if getattr(default, layered, None):
            values[layered] = list(getattr(default, layered))[-2:] if layered == "layer_types" else ["sparse"] * 2
    return kind(**{**values, **SPECIAL.get(model_type, {})})


def family_model(model_type: str, backend: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A random causal LM in train mode; parameters that the family leaves uninitialised are filled."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(family_config(model_type), experts_implementation=backend, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1 and not bool(p.any()):
                p.normal_(0, 0.02)
    return model.train()
