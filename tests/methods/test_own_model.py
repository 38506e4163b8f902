"""A model of the user's own: which tensors are experts is said by an attribute or by ``experts=``, never guessed."""

import warnings

import pytest
import torch
from torch import nn

from sonar_repro import ScheduledOptimizer, find_expert_tensors, make_factory
from sonar_repro.errors import UserError

WIDTH, INNER, EXPERTS = 16, 32, 8


class Layer(nn.Module):
    def __init__(self, counted=True, experts=EXPERTS):
        super().__init__()
        if counted:
            self.num_experts = experts
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, WIDTH, INNER) * 0.1)
        self.w2 = nn.Parameter(torch.randn(experts, INNER, WIDTH) * 0.1)

    def forward(self, x):
        share = self.router(x).softmax(-1)
        hidden = torch.einsum("td,edf->tef", x, self.w1).relu()
        return x + torch.einsum("tef,efd,te->td", hidden, self.w2, share)


class Model(nn.Module):
    def __init__(self, counted=(True, True, True), kernel=False, conv=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer(c) for c in counted)
        if kernel:
            self.layers[0].kernel = nn.Parameter(torch.randn(EXPERTS, 3, 3))
        if conv:
            self.conv = nn.Conv1d(WIDTH, WIDTH, 1)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        if hasattr(self, "conv"):
            x = self.conv(x.T[None])[0].T
        return self.head(x)


NAMES = [f"layers.{k}.{w}" for k in range(3) for w in ("w1", "w2")]
FACTORY = make_factory("adamw", lr=1e-2)


def optimizer(model, **kwargs):
    return ScheduledOptimizer(model, FACTORY, "sonar", **kwargs)


def test_without_the_attribute_the_message_says_the_rule_and_the_argument():
    with pytest.raises(UserError) as error:
        optimizer(Model(counted=(False,) * 3))
    said = str(error.value)
    assert "self.num_experts = E on that very module" in said and "experts=" in said and "\n" not in said


def layers_of(model):
    return list(model.layers)


@pytest.mark.parametrize(
    "experts",
    [
        lambda m: NAMES,
        lambda m: "layers.*.w[12]",
        lambda m: "layers.*",  # modules: their tensors of three dimensions
        lambda m: ["layers.0", "layers.1", "layers.2.w1", "layers.2.w2"],
        layers_of,
        lambda m: m.layers,
        lambda m: lambda name, p: p.ndim == 3,
        lambda m: [p for layer in m.layers for p in (layer.w1, layer.w2)],
    ],
    ids=["names", "glob", "module glob", "mixed", "modules", "module list", "predicate", "parameters"],
)
def test_experts_are_named(experts):
    model = Model(counted=(False,) * 3)
    chosen = experts(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = optimizer(model, experts=chosen)
    assert mine.expert_names == NAMES
    assert {(e.num_experts, e.layer) for e in find_expert_tensors(model, experts=chosen)} == {(8, 0), (8, 1), (8, 2)}
    loss = model(torch.randn(5, WIDTH)).square().sum()
    loss.backward()
    assert mine.hook_firings == 6
    mine.step()


def test_biases_are_named_by_their_names():
    model = Model(counted=(False,) * 3)
    model.layers[0].b1 = nn.Parameter(torch.zeros(EXPERTS, INNER))
    found = find_expert_tensors(model, experts=[model.layers[0], "layers.0.b1"])
    assert [e.name for e in found] == ["layers.0.w1", "layers.0.w2", "layers.0.b1"]


@pytest.mark.parametrize(
    "experts, said",
    [
        ("layers.0.w3", r"experts='layers.0.w3'.*did you mean layers.0.w"),
        ("*.ffn.*", "no parameter or module of that name"),
        ([], "name at least one"),
        (["layers.0", 3], r"experts=3: give names"),
        (nn.Linear(2, 2), "Linear: it is no module of Model"),
        (lambda name: True, r"called with \(name, parameter\)"),
        (lambda name, p: False, "no parameter of Model is one"),
        ("head.bias", r"head.bias has shape \[2\]"),
    ],
)
def test_what_names_nothing_is_refused(experts, said):
    with pytest.raises(UserError, match=said) as error:
        optimizer(Model(), experts=experts)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("counted", [(True, False, False), (False, True, True), (True, True, False)])
def test_the_attribute_in_some_layers_only_is_refused(counted):
    """CASES: 2 of 6 tensors were hooked without a word."""
    with pytest.raises(
        UserError, match=r"layers\.\d\.w1 is an expert tensor and layers\.\d\.w1 \(\d such\) is not"
    ) as e:
        optimizer(Model(counted=counted))
    assert "experts=" in str(e.value) and "\n" not in str(e.value)


def test_naming_some_layers_is_a_choice_and_warned():
    with pytest.warns(UserWarning, match=r"layers.1.w1 \(4 such\) .* not taken for an expert tensor"):
        assert optimizer(Model(), experts="layers.0.*").expert_names == ["layers.0.w1", "layers.0.w2"]


@pytest.mark.parametrize("shape", [(8, 3, 3), (8, 5, 7), (8, 1, 3, 3)])
def test_an_unrelated_tensor_with_as_many_rows_is_not_taken_but_named(shape):
    """CASES: an unrelated [8, 3, 3] parameter beside num_experts=8 was taken."""
    model = Model(kernel=True)
    model.layers[0].kernel = nn.Parameter(torch.randn(shape))
    with pytest.warns(UserWarning, match="layers.0.kernel .* not taken for an expert tensor"):
        assert optimizer(model).expert_names == NAMES
    assert optimizer_free_names(model, "layers.0.kernel") == ["layers.0.kernel"]


def optimizer_free_names(model, experts):
    return [e.name for e in find_expert_tensors(model, experts=experts)]


def test_an_unrelated_tensor_in_a_model_of_experts_alone():
    """Nothing else has a width: the experts' own matrices share theirs, the kernel shares none."""
    module = Layer()
    del module.router
    module.kernel = nn.Parameter(torch.zeros(EXPERTS, 3, 3))
    assert [e.name for e in find_expert_tensors(module)] == ["w1", "w2"]
    del module.w1, module.w2
    assert [e.name for e in find_expert_tensors(module)] == ["kernel"]  # alone it is what the attribute says


def test_convolutions_are_no_experts_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert optimizer(Model(conv=True)).expert_names == NAMES


def test_experts_argument_with_frozen_tensors_names_them():
    model = Model(counted=(False,) * 3)
    for layer in model.layers:
        layer.w1.requires_grad_(False)
        layer.w2.requires_grad_(False)
    with pytest.raises(UserError, match="all 6 expert tensors are frozen"):
        optimizer(model, experts="layers.*")
