"""Roles by module identity, and the logical matrices inside fused, transposed and interleaved expert tensors."""

from __future__ import annotations

import pytest
import torch
from tiny_whale import FAMILIES, Toy, family
from torch import nn

from sonar_repro.errors import UserError
from sonar_repro.optim.layouts import Layout, mlp_layouts
from sonar_repro.optim.roles import ROLES, assign_roles, shared_expert_modules


def roles_of(model: nn.Module):
    return assign_roles(list(model.named_parameters()), model)


def by_role(model: nn.Module) -> dict[str, list[str]]:
    found = {role: [] for role in ROLES}
    for r in roles_of(model):
        found[r.role].append(r.name)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_has_exactly_one_role(name):
    model = family(name)
    roles = roles_of(model)
    assert [id(r.parameter) for r in roles] == [id(p) for p in model.parameters()]
    assert all((r.layout is None) == (r.role == "one_d") for r in roles)
    expected = {"vocabulary": 1 if name == "granitemoe" else 2, "routed": 4}
    counts = {role: len(names) for role, names in by_role(model).items()}
    assert {role: counts[role] for role in expected} == expected


def test_nanowhale_roles():
    found = by_role(family("deepseek_v4"))
    assert found["vocabulary"] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert all(".experts." in n for n in found["routed"]) and all(".shared_experts." in n for n in found["shared"])
    assert len(found["routed"]) == 4 and len(found["shared"]) == 6
    assert not any("expert" in n or "embed" in n for n in found["dense"] + found["one_d"])
    assert any(n.endswith("mlp.gate.weight") for n in found["dense"])  # the router
    assert any(n.endswith("sinks") for n in found["one_d"])


def test_a_shared_mlp_beside_the_block_is_shared_and_fused():
    model = family("granitemoeshared")
    assert len(by_role(model)["shared"]) == 4
    shapes = {
        r.name.split(".")[-2]: [v.shape for v in r.layout.views(r.parameter)]
        for r in roles_of(model)
        if r.role == "shared"
    }
    assert shapes == {"input_linear": [(2, 24, 32)], "output_linear": [(1, 32, 24)]}


def test_expert_biases_and_gates_are_vectors():
    biases = [n for n in by_role(family("gpt_oss"))["one_d"] if "experts" in n]
    assert len(biases) == 4
    assert any("shared_expert_gate" in n for n in by_role(family("qwen2_moe"))["one_d"])


def test_the_shared_expert_rule_ignores_routers_gates_and_attention():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 3)
            self.router_mlp = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
            self.projection = nn.Linear(8, 8)
            self.experts = Toy().experts
            self.extra = nn.ModuleList([nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 8))])

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.ModuleDict({k: nn.Linear(8, 8) for k in "qkvo"})
            self.dense_mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
            self.shared_mlp = nn.Sequential(nn.Linear(8, 12), nn.Linear(6, 8))
            self.block = Block()

    assert [path for path, _ in shared_expert_modules(Layer())] == ["block.extra.0", "shared_mlp"]


def test_mlp_layouts_tell_the_output_from_the_inputs():
    class Mlp(nn.Module):
        def __init__(self, **shapes):
            super().__init__()
            for name, shape in shapes.items():
                setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def axes(**shapes):
        found = mlp_layouts(Mlp(**shapes))
        return found and {n: (layout.parts, layout.axis) for n, layout in found.items()}

    assert axes(gate=(6, 8), up=(6, 8), down=(8, 6)) == {"gate": (1, "rows"), "up": (1, "rows"), "down": (1, "columns")}
    assert axes(up=(6, 8), down=(8, 6)) == {"up": (1, "rows"), "down": (1, "columns")}
    assert axes(fused=(12, 8), down=(8, 6)) == {"fused": (2, "rows"), "down": (1, "columns")}
    assert axes(gate=(8, 8), up=(8, 8), down=(8, 8))["down"] == (1, "columns")
    assert axes(gate=(2, 6, 8), up=(2, 6, 8), down=(2, 8, 6))["down"] == (1, "columns")
    assert axes(q=(8, 8), k=(4, 8), v=(4, 8), o=(8, 8)) is None
    assert axes(a=(6, 8), b=(3, 6)) is None


# ---- layouts: what a view must contain is decided by running the experts module --------------------------------------


@pytest.mark.parametrize("name", ["deepseek_v4", "olmoe", "gpt_oss"])
def test_views_of_the_fused_pair_are_the_matrices_the_module_computes_with(name):
    """The module's own ``_apply_gate`` says which outputs pair up: neuron i is row i of both logical matrices."""
    model = family(name)
    experts = model.model.layers[0].mlp.experts
    role = next(r for r in roles_of(model) if r.parameter is experts.gate_up_proj)
    x = torch.randn(5, 32)
    views = role.layout.views(experts.gate_up_proj.detach())
    inner = views[0].shape[1]
    matrices = [m for view in views for m in view]  # concatenated: expert by expert; else gates first, then ups
    expert = 1
    gate, up = (
        (matrices[2 * expert], matrices[2 * expert + 1]) if len(views) == 1 else (views[0][expert], views[1][expert])
    )
    weight = experts.gate_up_proj[expert].detach()
    fused = x @ weight if experts.is_transposed else x @ weight.T
    pairs = torch.zeros(inner, dtype=torch.long)
    base = experts._apply_gate(fused)
    for column in range(fused.shape[1]):  # which output neuron does each fused column feed?
        bumped = fused.clone()
        bumped[:, column] += 0.5
        touched = (experts._apply_gate(bumped) - base).abs().sum(0).nonzero().flatten()
        assert len(touched) == 1
        pairs[touched] += 1
        source = fused[:, column]
        candidates = (x @ gate[touched[0]], x @ up[touched[0]])
        assert any(torch.allclose(source, c, atol=1e-5) for c in candidates)
    assert torch.equal(pairs, torch.full((inner,), 2))


def test_logical_matrices_never_mix_experts_or_gate_and_up():
    e, i, d = 3, 4, 5
    w1, w3 = torch.randn(e, i, d), torch.randn(e, i, d)
    stored = {
        Layout(parts=2, flatten=False): torch.cat([w1, w3], 1),
        Layout(parts=2, interleaved=True, flatten=False): torch.stack([w1, w3], 2).flatten(1, 2),
        Layout(parts=2, transposed=True, flatten=False): torch.cat([w1, w3], 1).transpose(1, 2).contiguous(),
        Layout(parts=2, transposed=True, interleaved=True, flatten=False): torch.stack([w1, w3], 2)
        .flatten(1, 2)
        .transpose(1, 2)
        .contiguous(),
    }
    for layout, tensor in stored.items():
        views = layout.views(tensor)
        got = views[0].unflatten(0, (e, 2)).transpose(0, 1) if len(views) == 1 else torch.stack(views)
        assert torch.equal(got, torch.stack([w1, w3]))
        assert all(v.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for v in views)
    flat = w1.flatten(0, 1)  # rule C: [E*k, D]
    assert torch.equal(Layout(batch=e, flatten=False).views(flat)[0], w1)
    convolution = torch.randn(6, 1, 4)
    assert Layout().views(convolution)[0].shape == (1, 6, 4)


@pytest.mark.parametrize("axis", ["rows", "columns"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("parts, interleaved", [(1, False), (2, False), (2, True)])
def test_statistics_line_up_with_the_views(axis, transposed, interleaved, parts):
    """A statistic's view b is the mean over view b of the parameter; it broadcasts to it where it can."""
    layout = Layout(parts=parts, transposed=transposed, interleaved=interleaved, flatten=False)
    p = torch.randn(3, 5, 8) if transposed else torch.randn(3, 8, 5)
    statistic = torch.zeros(layout.statistic_shape(p.shape, axis))
    views, parts_of = layout.views(p), layout.statistic_views(statistic, axis)
    assert len(views) == len(parts_of)
    for view, part in zip(views, parts_of):
        part.copy_(view.mean(2 if axis == "rows" else 1))
    assert statistic.any() and statistic.numel() == sum(v.shape[0] * v.shape[1 if axis == "rows" else 2] for v in views)
    if axis == "rows":
        assert torch.allclose(statistic, p.mean(1 if transposed else 2, keepdim=True), atol=1e-6)


def test_undecorated_experts_are_read_from_their_shapes():
    class Experts(nn.Module):
        def __init__(self, **shapes):
            super().__init__()
            self.num_experts = 3
            for name, shape in shapes.items():
                setattr(self, name, nn.Parameter(torch.zeros(shape)))

    class Model(nn.Module):
        def __init__(self, **shapes):
            super().__init__()
            self.embedding, self.head, self.experts = nn.Embedding(9, 8), nn.Linear(8, 9), Experts(**shapes)

        def get_input_embeddings(self):
            return self.embedding

        def get_output_embeddings(self):
            return self.head

    def axes(**shapes):
        roles = {r.name.split(".")[-1]: r for r in roles_of(Model(**shapes)) if r.role == "routed"}
        return {n: (r.layout.parts, r.layout.transposed, r.layout.axis) for n, r in roles.items()}

    fused = axes(gate_up=(3, 10, 8), down=(3, 8, 5))
    assert fused == {"gate_up": (2, False, "rows"), "down": (1, False, "columns")}
    transposed = axes(gate_up=(3, 8, 10), down=(3, 5, 8))  # llama4
    assert transposed == {"gate_up": (2, True, "rows"), "down": (1, True, "columns")}
    plain = axes(gate=(3, 5, 8), up=(3, 5, 8), down=(3, 8, 5))
    assert plain == {"gate": (1, False, "rows"), "up": (1, False, "rows"), "down": (1, False, "columns")}


def test_tied_embeddings_are_one_vocabulary_parameter():
    found = by_role(family("granitemoe"))
    assert found["vocabulary"] == ["model.embed_tokens.weight"]


def test_per_expert_views_are_found_by_their_storage():
    toy = Toy()
    view = nn.Parameter(toy.experts.gate_up.detach()[1])
    (role,) = assign_roles([("gate_up[1]", view)], toy)
    assert role.role == "routed" and [v.shape for v in role.layout.views(view)] == [(2, 6, 8)]


def test_wrappers_are_seen_through():
    toy = Toy()
    compiled = torch.compile(toy)
    assert [r.role for r in roles_of(toy)] == [r.role for r in assign_roles(list(toy.named_parameters()), compiled)]


def test_a_replaced_parameter_is_looked_up_again():
    toy = Toy()
    roles_of(toy)
    toy.mix.weight = nn.Parameter(torch.zeros(8, 8))
    assert dict((r.name, r.role) for r in roles_of(toy))["mix.weight"] == "dense"


@pytest.mark.parametrize("case", ["twice", "foreign", "no_getter", "no_experts"])
def test_refusals_are_one_line(case):
    toy = Toy()
    named = list(toy.named_parameters())
    with pytest.raises(UserError) as caught:
        if case == "twice":
            assign_roles(named + named[:1], toy)
        elif case == "foreign":
            assign_roles([("x", nn.Parameter(torch.zeros(2, 2)))], toy)
        elif case == "no_getter":
            roles_of(nn.Linear(2, 2))
        else:
            toy.experts = nn.Linear(8, 8)
            assign_roles(list(toy.named_parameters()), toy, needed={"routed"})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
