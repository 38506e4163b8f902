"""Tiny checkpoints written by hand in the layout of the papers' hub repositories: shards, index, config, tokenizer."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from sonar_repro.config.schema import ModelConfig
from sonar_repro.data.tokenizer import load_tokenizer

EXPERTS = 12  # more than ten: "experts.10" sorts before "experts.2" as text
SIZES = {
    "olmoe": dict(num_experts=EXPERTS, num_experts_per_tok=2, num_key_value_heads=4, pad_token_id=0, eos_token_id=1),
    "granitemoe": dict(
        num_local_experts=EXPERTS, num_experts_per_tok=2, num_key_value_heads=2, tie_word_embeddings=True
    ),
}


def tiny_model(model_type: str, layers: int = 2, hidden: int = 32, width: int = 16, seed: int = 3):
    sizes = dict(vocab_size=2048, hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers)
    config = AutoConfig.for_model(
        model_type, num_attention_heads=4, max_position_embeddings=128, **sizes, **SIZES[model_type]
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def on_disk(model) -> dict[str, torch.Tensor]:
    """The tensors under their names on the hub: OLMoE one an expert and projection, Granite fused under other names."""
    tensors = {}
    for name, value in model.named_parameters():
        value = value.detach()
        prefix, _, leaf = name.partition(".experts.")
        if model.config.model_type == "olmoe" and leaf == "gate_up_proj":
            for e, both in enumerate(value):
                gate, up = both.chunk(2)  # gate rows first
                tensors[f"{prefix}.experts.{e}.gate_proj.weight"] = gate
                tensors[f"{prefix}.experts.{e}.up_proj.weight"] = up
        elif model.config.model_type == "olmoe" and leaf == "down_proj":
            tensors |= {f"{prefix}.experts.{e}.down_proj.weight": down for e, down in enumerate(value)}
        elif leaf:
            tensors[f"{prefix}.{'input' if leaf == 'gate_up_proj' else 'output'}_linear.weight"] = value
        else:
            tensors[name.replace("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight")] = value
    return tensors


def write(folder: Path, model, tensors: dict[str, torch.Tensor], shards: int = 3) -> ModelConfig:
    """Write a checkpoint folder and return the model group that points at it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    load_tokenizer("instructions").save_pretrained(folder)
    weight_map, names = {}, sorted(tensors)
    for k in range(shards):
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[k::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ModelConfig(name="tiny", model_type=model.config.model_type, weights="pretrained", path=str(folder))
