"""The factory: names, hyperparameters, working fused kernels, and Lion against its paper."""

import processes
import pytest
import torch
from torch import nn

from sonar_repro.errors import UserError
from sonar_repro.optim.factory import REGISTRY, make_factory
from sonar_repro.optim.library import fused_works
from sonar_repro.optim.lion import Lion


def model_of(*dtypes):
    model = nn.Module()
    for i, dtype in enumerate(dtypes):
        model.register_parameter(f"p{i}", nn.Parameter(torch.linspace(-1, 1, 80, dtype=dtype)))
    return model


@pytest.mark.parametrize(
    "kind, hyper, said",
    [
        ("adam_w", {}, "optimizer='adam_w': unknown; did you mean adamw"),
        ("zzz", {}, "choose one of adamw, adamw8bit, sgd, lion, sinkgd"),
        ("adamw", {"beta": (0.9, 0.95)}, "adamw has no hyperparameter beta=.*did you mean betas"),
        ("adamw", {"lr": -1e-3}, "adamw: lr=-0.001 is not a number of at least 0"),
        ("adamw", {"lr": "fast"}, "lr='fast'"),
        ("adamw", {"lr": float("nan")}, "lr=nan"),
        ("adamw", {"betas": [0.9, 1.0]}, r"betas=\(0.9, 1.0\) is not two numbers in \[0, 1\)"),
        ("adamw", {"betas": 0.9}, "betas=0.9"),
        ("adamw", {"eps": 0}, "eps=0 is not a positive number"),
        ("adamw8bit", {"fused": True}, "adamw8bit has no hyperparameter fused=True"),
        ("sgd", {"momentum": 1.5}, "momentum=1.5"),
        ("sgd", {"nesterov": 1}, "nesterov=1 is not true or false"),
        ("lion", {"eps": 1e-8}, "lion has no hyperparameter eps"),
        ("lion", {"weight_decay": True}, "weight_decay=True"),
    ],
)
def test_bad_input_names_the_key_and_the_value(kind, hyper, said):
    with pytest.raises(UserError, match=said) as error:
        make_factory(kind, **hyper)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion"])
def test_lists_from_yaml_and_integers_are_accepted(kind):
    hyper = {"lr": 1, "weight_decay": 0} | ({"betas": [0.9, 0.95]} if kind != "sgd" else {})
    model = model_of(torch.float32)
    group = make_factory(kind, **hyper)(list(model.named_parameters()), model).param_groups[0]
    assert group["lr"] == 1 and (kind == "sgd" or tuple(group["betas"]) == (0.9, 0.95))


def test_looking_at_the_registry_loads_no_torch():
    code = (
        "import sys, sonar_repro.optim.factory as f; f.make_factory('adamw', lr=1e-3); sys.exit('torch' in sys.modules)"
    )
    assert processes.python("-c", code).returncode == 0
    assert set(REGISTRY) >= {"adamw", "adamw8bit", "sgd", "lion", "mesh", "mesh_b", "direct", "sage", "sinkgd"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_fused_is_used_only_where_it_computes_the_update(kind, dtype):
    """Fused SGD leaves bf16 vectors on the CPU unchanged in torch 2.13 (pytorch#191763); a later torch may not."""
    p = nn.Parameter(torch.ones(4096, dtype=dtype))
    optimizer = kind([p], lr=0.5, fused=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    moved = bool((p < 1).all())
    assert fused_works(kind, "cpu", dtype) is moved
    model = model_of(dtype)
    name = {torch.optim.AdamW: "adamw", torch.optim.SGD: "sgd"}[kind]
    assert make_factory(name, lr=0.5)(list(model.named_parameters()), model).param_groups[0]["fused"] is moved


def test_adamw_is_fused_on_the_cpu():
    assert fused_works(torch.optim.AdamW, "cpu", torch.float32) and fused_works(
        torch.optim.AdamW, "cpu", torch.bfloat16
    )


def test_fused_is_decided_for_the_whole_model():
    """A method that steps the fp32 parameters apart must run the same kernels as one that steps all together."""
    if fused_works(torch.optim.SGD, "cpu", torch.bfloat16):
        pytest.skip("this torch has no broken fused kernel to tell apart")
    model = model_of(torch.float32, torch.bfloat16)
    optimizer = make_factory("sgd", lr=0.1)(list(model.named_parameters())[:1], model)
    assert optimizer.param_groups[0]["fused"] is False
    with pytest.raises(UserError, match="no working fused kernel for torch.bfloat16 on cpu"):
        make_factory("sgd", lr=0.1, fused=True)(list(model.named_parameters()), model)


def test_fused_is_found_on_fake_tensors_too():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = model_of(torch.bfloat16)
        assert make_factory("adamw", lr=0.1)(list(model.named_parameters()), model).param_groups[0]["fused"]


def test_factory_makes_the_named_class():
    model = model_of(torch.float32)
    for kind, cls in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("lion", Lion)):
        assert type(make_factory(kind, lr=0.1)(list(model.named_parameters()), model)) is cls


def test_8bit_is_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes")
    model = model_of(torch.float32)
    assert type(make_factory("adamw8bit", lr=0.1)(list(model.named_parameters()), model)) is bnb.optim.AdamW8bit


def test_lion_is_algorithm_2_of_its_paper():
    """Chen et al. 2023: c = sign(b1 m + (1-b1) g); p = p - lr (c + wd p); m = b2 m + (1-b2) g. In float64, by hand."""
    p = nn.Parameter(torch.tensor([0.5, -0.3, 0.2, 0.0], dtype=torch.float64))
    optimizer = Lion([p], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    x, m = p.detach().clone(), torch.zeros(4, dtype=torch.float64)
    for g in ([1.0, -2.0, 0.0, 0.5], [-0.05, 3.0, 1.0, -0.1], [0.0, 0.0, 0.0, 0.0]):
        g = torch.tensor(g, dtype=torch.float64)
        p.grad = g.clone()
        optimizer.step()
        x = x - 0.1 * (torch.sign(0.9 * m + 0.1 * g) + 0.5 * x)
        m = 0.99 * m + 0.01 * g
        torch.testing.assert_close(p.detach(), x, rtol=1e-14, atol=1e-15)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], m, rtol=1e-14, atol=1e-15)
        assert torch.equal(p.grad, g), "the gradient is not changed"


def test_lion_keeps_one_state_in_the_parameters_dtype():
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = Lion([p], lr=0.1)
    optimizer.step()
    assert {k: v.dtype for k, v in optimizer.state[p].items()} == {"exp_avg": torch.bfloat16}
