"""The ScatterMoE adapter against eager: outputs and gradients, on a stand-in and, where installed, the library."""

import importlib.util
import os
import sys
import types

import experts_cases as cases
import pytest
import stand_in_scattermoe as stand_in
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from sonar_repro.errors import UserError
from sonar_repro.kernels import registry, scattermoe

LIBRARY = importlib.util.find_spec("scattermoe") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def on_stand_in(monkeypatch):
    """The adapter registered over the stand-in."""
    stand_in.calls.clear()
    monkeypatch.setitem(sys.modules, "scattermoe", stand_in)
    before = dict(ALL_EXPERTS_FUNCTIONS._global_mapping)
    yield scattermoe.register()
    type(ALL_EXPERTS_FUNCTIONS)._global_mapping.clear()
    type(ALL_EXPERTS_FUNCTIONS)._global_mapping.update(before)


def compare(kind, routed, dtype, implementation):
    module = cases.experts_module(kind, dtype)
    index, weights = cases.routing(routed, module.num_experts, cases.SHAPES[kind]["num_experts_per_tok"])
    wanted = cases.run(module, "eager", index, weights, dtype)
    return module, index, cases.relative_errors(cases.run(module, implementation, index, weights, dtype), wanted)


@pytest.mark.parametrize("routed", cases.ROUTINGS)
@pytest.mark.parametrize("kind", ["olmoe", "granitemoe", "gpt_oss"])
def test_outputs_and_gradients_are_eagers(kind, routed, on_stand_in):
    """float64: whatever is not rounding is the adapter's fault (order of gate and up, transposes, routing, biases)."""
    module, index, errors = compare(kind, routed, torch.float64, on_stand_in)
    assert set(errors) == {"output", "hidden", "weights", *dict(module.named_parameters())}
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("kind", ["olmoe", "granitemoe"])
def test_bf16_stays_within_rounding(kind, on_stand_in):
    _, _, errors = compare(kind, "mixed", torch.bfloat16, on_stand_in)
    assert max(errors.values()) < 2e-2, errors


def test_an_expert_without_tokens_has_a_zero_gradient(on_stand_in):
    module = cases.experts_module("olmoe", torch.float32)
    index, weights = cases.routing("idle_expert", 16, 4)
    got = cases.run(module, on_stand_in, index, weights, torch.float32)
    idle = sorted(set(range(16)) - set(index.flatten().tolist()))
    assert idle == [0, 8, 15]
    for name in ("gate_up_proj", "down_proj"):
        assert all(bool((got[name][e] == 0).all()) == (e in idle) for e in range(16)), name


@pytest.mark.parametrize("kind", ["olmoe", "gpt_oss"])
def test_weights_go_in_as_views_and_nothing_is_copied(kind, on_stand_in):
    module = cases.experts_module(kind, torch.float32)
    index, weights = cases.routing("mixed", module.num_experts, 2)
    module.config._experts_implementation = on_stand_in
    hidden = torch.randn(37, 64)
    module(hidden, index, weights)
    up, down = stand_in.calls
    for call, parameter in ((up, module.gate_up_proj), (down, module.down_proj)):
        assert call["weights"].data_ptr() == parameter.data_ptr()
        view = parameter if module.is_transposed else parameter.transpose(1, 2)
        assert call["weights"].shape == view.shape and call["weights"].stride() == view.stride()
    assert up["inputs"] is hidden and up["k"] == 2  # tokens are gathered by the kernel, not by us
    assert down["k"] == 1


def test_the_down_weights_gradient_comes_before_the_up_weights(on_stand_in):
    """A hook can free the one before the other exists: the order that the memory forecast of this backend assumes."""
    module = cases.experts_module("olmoe", torch.float32)
    index, weights = cases.routing("mixed", 16, 4)
    module.config._experts_implementation = on_stand_in
    order = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    module(torch.randn(37, 64, requires_grad=True), index, weights).sum().backward()
    assert order == ["down_proj", "gate_up_proj"]


def test_offsets_are_where_each_expert_ends():
    index = torch.tensor([[5, 1], [1, 0], [5, 3]])
    experts, rows, offsets = scattermoe.sort_by_expert(index, 7)
    assert experts.tolist() == [0, 1, 1, 3, 5, 5]
    assert rows.tolist() == [3, 1, 2, 5, 0, 4]  # row = token * K + slot, in order within an expert
    assert offsets.tolist() == [1, 3, 3, 4, 4, 6, 6]


def test_what_the_kernels_do_not_know_is_refused(on_stand_in):
    module = cases.experts_module("olmoe", torch.float32)
    index, weights = cases.routing("mixed", 16, 4)
    module.config._experts_implementation = on_stand_in
    for flag in ("has_post_expert_norm", "_is_expert_parallel"):
        setattr(module, flag, True)
        with pytest.raises(UserError, match="use backend=grouped_mm"):
            module(torch.randn(37, 64), index, weights)
        setattr(module, flag, False)


# -- what keeps it from running here ---------------------------------------------------------------------------------


def test_missing_library_names_what_to_install(monkeypatch):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    assert f"pip install '{registry.SCATTERMOE}'" in registry.status("scattermoe", "cuda")
    assert "need a CUDA GPU" in registry.status("scattermoe", "cpu")


def test_an_old_card_an_old_library_and_a_broken_one_are_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "compute capability 8.0), this card has 7.5" in scattermoe.why_not("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setitem(sys.modules, "scattermoe", stand_in)
    assert scattermoe.why_not("cuda") is None
    old = types.SimpleNamespace(parallel_linear=lambda inputs, expert_weights, k, sorted_expert_idxs: None)
    monkeypatch.setitem(sys.modules, "scattermoe", old)
    assert f"without sorted_scattered_idxs; install commit {scattermoe.COMMIT[:7]}" in scattermoe.why_not("cuda")
    monkeypatch.setitem(sys.modules, "scattermoe", None)
    assert "cannot be imported (ModuleNotFoundError" in scattermoe.why_not("cuda")


def test_what_is_installed_is_the_commit_that_the_adapter_is_written_for():
    assert registry.SCATTERMOE.endswith(f"github.com/shawntan/scattermoe@{scattermoe.COMMIT}")


# -- the library itself ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (LIBRARY and INTERPRETED), reason="needs the scattermoe library and TRITON_INTERPRET=1")
@pytest.mark.parametrize("routed", cases.ROUTINGS)
@pytest.mark.parametrize("kind", ["olmoe", "granitemoe"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 5e-3)])
def test_the_librarys_own_kernels_agree_with_eager(kind, routed, dtype, bound):
    """Not in bf16: Triton's interpreter (3.6 to 3.9) gets a bare bf16 ``tl.dot`` wrong."""
    module, _, errors = compare(kind, routed, dtype, scattermoe.register())
    assert max(errors.values()) < bound, errors
