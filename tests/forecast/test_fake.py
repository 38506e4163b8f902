"""Building any batched-expert model on fake tensors, and the one-line refusals of what cannot run so."""

import processes
import pytest
import torch
from transformers import AutoConfig

from sonar_repro import ScheduledOptimizer, find_expert_tensors, make_factory
from sonar_repro.errors import UserError
from sonar_repro.forecast.fake_model import fake_environment
from sonar_repro.methods import Schedule
from sonar_repro.training.step import training_step

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
FAMILIES = {
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 16},  # biases, transposed weights, no SDPA
    "deepseek_v3": {
        **ROUTED,
        **{"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
    },
    "glm4_moe": {**ROUTED, "first_k_dense_replace": 0},
}


def config(family, **overrides):
    return AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **overrides})


def train_one_step(environment, model, padded=False):
    made = ScheduledOptimizer(model, make_factory("adamw", lr=1e-3), Schedule.named("sonar"))
    training_step(model, made, None, iter([environment.batch(2, 16, padded=padded)]), 1)
    return made


@pytest.mark.parametrize("experts", ["grouped_mm", "sonicmoe", "scattermoe"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_batched_family_trains_a_step_on_fake_tensors(family, experts):
    with fake_environment() as environment:
        model = environment.build(config(family), experts=experts)
        assert all(type(p.data).__name__ == "FakeTensor" and p.device.type == "cpu" for p in model.parameters())
        made = train_one_step(environment, model)
    assert made.hook_firings == len(find_expert_tensors(model)) > 0


def test_a_fake_model_has_the_real_one_s_parameters_and_buffers():
    from transformers import AutoModelForCausalLM

    # DeepSeek keeps some parameters in fp32 inside a bf16 model; Granite ties its embeddings
    for family in ("deepseek_v3", "granitemoe"):
        shape = config(family, num_local_experts=8, tie_word_embeddings=True)
        real = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        with fake_environment() as environment:
            fake = environment.build(shape)
        expected = {name: (p.shape, p.dtype, p.requires_grad) for name, p in real.named_parameters()}
        assert expected == {name: (p.shape, p.dtype, p.requires_grad) for name, p in fake.named_parameters()}
        buffers = {name: (b.shape, b.dtype) for name, b in real.named_buffers()}
        assert buffers == {name: (b.shape, b.dtype) for name, b in fake.named_buffers()}
        assert len({id(p) for p in fake.parameters()}) == len({id(p) for p in real.parameters()})


def test_the_patches_end_with_the_environment():
    import transformers.masking_utils as masking

    before = (masking.is_tracing, masking.find_packed_sequence_indices)
    with fake_environment():
        assert masking.is_tracing is not before[0]
    assert (masking.is_tracing, masking.find_packed_sequence_indices) == before


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_is_built_only_if_something_is_padded(padded):
    seen = []
    with fake_environment() as environment:
        model = environment.build(config("olmoe"))
        model.model.layers[0].register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
        train_one_step(environment, model, padded)
    assert [mask is None for mask in seen] == [not padded]


REFUSED = [
    ("olmoe", {"experts": "eager"}, "backend=eager: loops over the experts.*use backend=grouped_mm"),
    ("olmoe", {"experts": "nope"}, "backend=nope: no forecast for it; choose one of"),
    ("olmoe", {"dtype": torch.float64}, "scale.dtype=float64: a forecast takes bfloat16"),
    ("llama", {}, "model_type=llama: LlamaForCausalLM has no batched expert tensors: it has no experts"),
    ("bert", {}, "BertLMHeadModel has no batched expert tensors"),
    ("llama4_text", {}, "backend=grouped_mm: Llama4ForCausalLM has expert code of its own.*use backend=eager"),
    ("t5", {}, "model_type=t5.*no causal LM class in transformers"),
]


@pytest.mark.parametrize(("family", "options", "message"), REFUSED)
def test_refusals_name_the_way_out(family, options, message):
    extra = {"num_local_experts": 8, "intermediate_size_mlp": 64, "head_dim": 16} if family == "llama4_text" else {}
    with fake_environment() as environment, pytest.raises(UserError, match=message) as caught:
        environment.build(config(family, **extra), **options)
    assert "\n" not in str(caught.value)


def test_a_model_s_own_batched_expert_code_runs_as_eager():
    extra = {"num_local_experts": 8, "intermediate_size_mlp": 64, "head_dim": 16}
    with fake_environment() as environment:
        model = environment.build(config("llama4_text", **extra), experts="eager")
        assert train_one_step(environment, model).hook_firings == 4


def test_code_that_reads_values_ends_in_one_line():
    with pytest.raises(UserError, match="reads tensor values.*use backend=grouped_mm") as caught, fake_environment():
        torch.empty(3).nonzero()
    assert "\n" not in str(caught.value)


BITSANDBYTES = """
import sys
from sonar_repro.forecast.fake_model import fake_environment
with fake_environment():
    assert "bitsandbytes" not in sys.modules
    import bitsandbytes
    made = bitsandbytes.functional.create_dynamic_map(signed=True)
    assert type(made).__name__ == "FakeTensor" and made.shape == (256,)
assert type(bitsandbytes.functional.create_dynamic_map(signed=True)).__name__ == "Tensor"
with fake_environment():
    assert type(bitsandbytes.functional.create_dynamic_map()).__name__ == "FakeTensor"
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("sonar_repro")]
"""


def test_bitsandbytes_is_patched_when_imported_and_not_imported_for_nothing():
    pytest.importorskip("bitsandbytes")
    done = processes.python("-c", BITSANDBYTES)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_mm_has_the_shapes_of_the_real_one_in_every_dtype(dtype):
    """Output and both gradients, against the CPU's own kernel (PyTorch's shape rule alone takes bfloat16 only)."""

    def run():
        x = torch.ones(6, 16, dtype=dtype, requires_grad=True)
        w = torch.ones(3, 24, 16, dtype=dtype, requires_grad=True)
        offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
        out = torch.nn.functional.grouped_mm(x, w.transpose(-2, -1), offs=offsets)
        out.backward(torch.ones_like(out))
        return [(t.shape, t.stride(), t.dtype) for t in (out, x.grad, w.grad)]

    real = run()
    with fake_environment():
        assert run() == real
