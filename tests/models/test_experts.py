"""Rules A to D: expert tensors are found by module contract, on hand-made modules and on real architectures."""

import pytest
import torch
from torch import nn

from sonar_repro.models.experts import decorated_expert_modules, find_expert_tensors, module_list_experts


class Decorated(nn.Module):
    """Rule A: the flags of ExpertsInterface; weights and biases yes, a norm inside the module no."""

    def __init__(self, experts=4):
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed, self.is_concatenated = True, True, False, True
        self.up = nn.Parameter(torch.zeros(experts, 8, 6))
        self.up_bias = nn.Parameter(torch.zeros(experts, 8))
        self.norm = nn.Parameter(torch.zeros(6))
        self.table = nn.Parameter(torch.zeros(9, 6))


class Counted(nn.Module):
    """Rule B: an int attribute with ``expert`` in its name."""

    def __init__(self):
        super().__init__()
        self.n_routed_experts = 4
        self.kernel = nn.Parameter(torch.zeros(4, 2, 3))
        self.deep = nn.Parameter(torch.zeros(4, 2, 3, 5))
        self.router = nn.Parameter(torch.zeros(4, 3))
        self.conv = nn.Parameter(torch.zeros(5, 2, 3))


class Flat(nn.Module):
    """Rule C (dbrx): [E*k, D] with k another int attribute."""

    def __init__(self):
        super().__init__()
        self.moe_num_experts, self.ffn_hidden_size = 4, 6
        self.w1 = nn.Parameter(torch.zeros(24, 5))
        self.other = nn.Parameter(torch.zeros(23, 5))


class Listed(nn.Module):
    """Rule D: one module an expert."""

    def __init__(self):
        super().__init__()
        self.num_experts = 3
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.odd = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(2, 2)])
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
        self.mixed = nn.ModuleDict(
            {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2), "d": nn.Dropout()}
        )


def names(model, **kwargs):
    return [e.name for e in find_expert_tensors(model, **kwargs)]


def test_rule_a_takes_weights_and_biases_only():
    assert names(Decorated()) == ["up", "up_bias"]


def test_rule_b_takes_three_dimensions_or_more():
    assert names(Counted()) == ["kernel", "deep"]


def test_rule_c_takes_rows_of_expert_blocks():
    (found,) = find_expert_tensors(Flat())
    assert (found.name, found.num_experts) == ("w1", 4)


def test_rule_c_leaves_a_router_whose_length_is_an_expert_count():
    module = Flat()
    module.num_experts_total = 24
    assert names(module) == []


def test_rule_d_reports_module_lists_and_no_tensor():
    assert names(Listed()) == []
    assert module_list_experts(Listed()) == ["experts", "mixed"]
    assert module_list_experts(Counted()) == []


def test_plain_modules_have_no_experts():
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(4, 4), nn.MultiheadAttention(4, 2))
    assert names(model) == module_list_experts(model) == decorated_expert_modules(model) == []


def test_layers_are_counted_over_modules_that_have_experts():
    model = nn.Sequential(Decorated(), nn.Linear(2, 2), Counted(), Decorated())
    found = find_expert_tensors(model)
    assert [(e.name, e.layer, e.module_name) for e in found] == [
        ("0.up", 0, "0"),
        ("0.up_bias", 0, "0"),
        ("2.kernel", 1, "2"),
        ("2.deep", 1, "2"),
        ("3.up", 2, "3"),
        ("3.up_bias", 2, "3"),
    ]
    assert [name for name, _ in decorated_expert_modules(model)] == ["0", "3"]


def test_tied_tensors_are_found_once_and_frozen_ones_skipped():
    model = nn.Sequential(Decorated(), Decorated())
    model[1].up = model[0].up
    model[0].up_bias.requires_grad_(False)
    assert names(model) == ["0.up", "1.up_bias"]
    assert names(model, include_frozen=True) == ["0.up", "0.up_bias", "1.up_bias"]


@pytest.mark.parametrize("kind", ["olmoe", "granite"])
def test_real_architectures_on_meta_tensors(kind):
    """OLMoE-1B-7B and Granite-3.1-3B-A800M at full size: 2L tensors holding 6.44e9 and 3.02e9 parameters (§1, §5.1)."""
    import transformers

    config, expected = {
        "olmoe": (transformers.OlmoeConfig(intermediate_size=1024, num_experts=64), (32, 6_442_450_944, 64)),
        "granite": (
            transformers.GraniteMoeConfig(
                hidden_size=1536,
                intermediate_size=512,
                num_hidden_layers=32,
                num_local_experts=40,
                num_experts_per_tok=8,
            ),
            (64, 3_019_898_880, 40),
        ),
    }[kind]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = find_expert_tensors(model)
    assert (len(found), sum(e.parameter.numel() for e in found), found[0].num_experts) == expected
    assert {e.layer for e in found} == set(range(len(found) // 2))
    parameters = dict(model.named_parameters())
    assert all(parameters[e.name] is e.parameter for e in found)
