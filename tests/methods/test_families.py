"""Any batched-expert MoE of transformers: expert tensors found without names, and sonar bitwise the standard update."""

import pytest
import torch
from families import FAMILIES, family_config, family_model
from tiny_moe import batches, build, differing, train, weights

from sonar_repro.errors import UserError
from sonar_repro.models.experts import decorated_expert_modules, find_expert_tensors, module_list_experts

# Families that do not honour ExpertsInterface: their own loop is the only implementation.
UNDECORATED = {"dbrx", "jetmoe", "llama4_text", "longcat_flash"}
# Expert tensors in two layers, where it is not gate_up_proj and down_proj of each.
TENSORS = {"dbrx": 6, "gpt_oss": 8, "jetmoe": 8}


def run(family, backend, dtype, method, steps=3):
    model = family_model(family, backend, dtype)
    start = weights(model)
    optimizer = build(model, method)
    train(model, optimizer, batches(steps))
    return start, weights(model), optimizer


@pytest.mark.parametrize("family", FAMILIES)
def test_sonar_is_the_standard_update_in_every_family(family):
    for backend in ("eager",) if family in UNDECORATED else ("eager", "grouped_mm"):
        for dtype in (torch.float32, torch.bfloat16):
            start, baseline, _ = run(family, backend, dtype, "standard_no_expert_clip")
            _, sonar, optimizer = run(family, backend, dtype, "sonar")
            assert differing(baseline, sonar) == [], (backend, dtype)
            moved = set(differing(start, sonar))
            experts = {e.name for e in find_expert_tensors(family_model(family, backend, dtype))}
            assert experts and experts <= moved
            assert optimizer.hook_firings == 3 * len(experts)


@pytest.mark.parametrize("family", FAMILIES)
def test_expert_tensors_are_all_and_only_the_experts(family):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family_config(family))
    found = find_expert_tensors(model)
    # some families keep their first layer dense
    assert len(found) in ((TENSORS[family],) if family in TENSORS else (2, 4))
    assert {e.layer for e in found} == set(range(len({e.module_name for e in found})))
    assert all(e.parameter.shape[0] % e.num_experts == 0 for e in found)
    named = {name for name, _ in model.named_parameters() if ".experts." in name and "shared" not in name}
    if family not in ("jetmoe",):  # whose expert modules are not called experts
        assert named == {e.name for e in found}
    assert bool(decorated_expert_modules(model)) is (family not in UNDECORATED)
    assert module_list_experts(model) == []


def test_at_least_twenty_families():
    assert len(set(FAMILIES)) >= 20


@pytest.mark.parametrize("family", ["switch_transformers", "nllb-moe"])
def test_module_list_families_are_detected_with_a_message(family):
    from transformers import AutoModelForSeq2SeqLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {"vocab_size": 64, "d_model": 16, "num_experts": 4}
    if family == "switch_transformers":
        sizes |= {"d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}
        sizes |= {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2}
    else:
        sizes |= {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _NLLB.items()}
    model = AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[family](**sizes))
    assert find_expert_tensors(model) == []
    lists = module_list_experts(model)
    assert len(lists) == 4 and all("experts" in path for path in lists)
    with pytest.raises(UserError, match=rf"module lists \({lists[0]} and 3 more\).*optimizer_in_backward") as error:
        build(model, "sonar")
    assert "\n" not in str(error.value)


_NLLB = {"layers": 2, "attention_heads": 2, "ffn_dim": 16, "sparse_step": 1}
