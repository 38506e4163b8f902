"""Where SonicMoE's kernels come from, what is checked before a model is built, and what transformers hands them."""

import importlib.machinery
import sys
import types

import experts_cases as cases
import pytest
import torch
from transformers.integrations import sonicmoe as adapter
from transformers.utils import import_utils

from sonar_repro.errors import Unsupported
from sonar_repro.kernels import registry, sonicmoe

LOW, HIGH = import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION


@pytest.fixture
def installed(monkeypatch):
    """Pretend these distributions are installed, on a Hopper card, under Python 3.12 unless told otherwise."""

    def pretend(capability=(9, 0), python=(3, 12), **versions):
        have = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(sonicmoe, "_version", have.get)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(sonicmoe, "sys", types.SimpleNamespace(version_info=(*python, 0)))

    monkeypatch.setattr(adapter, "_SONICMOE", None)
    return pretend


def hub(**more):
    return {"kernels": LOW, "nvidia_cutlass_dsl": "9.0", "apache_tvm_ffi": "9.0", **more}


def package(monkeypatch, call):
    """A module ``sonicmoe`` with this entry point."""
    module, enums = types.ModuleType("sonicmoe"), types.ModuleType("sonicmoe.enums")
    module.__spec__ = importlib.machinery.ModuleSpec("sonicmoe", None)
    module.moe_general_routing_inputs = call
    enums.ActivationType = types.SimpleNamespace(SWIGLU="swiglu", GEGLU="geglu", REGLU="reglu")
    monkeypatch.setitem(sys.modules, "sonicmoe", module)
    monkeypatch.setitem(sys.modules, "sonicmoe.enums", enums)


def entry(
    x, scores, tokens, experts, w1, b1, w2, b2, E, activation_type, is_inference_mode_enabled, concat_layout, stream_id
):
    """The kernel's entry point in plain PyTorch: w1 ``[2I, H, E]`` with gate rows first, w2 ``[H, I, E]``."""
    assert concat_layout and activation_type == "swiglu" and b1 is None and b2 is None
    assert tokens.dtype == experts.dtype == torch.int32 and bool((tokens.diff() >= 0).all()) and w1.shape[2] == E
    gate, up = torch.einsum("sh,shf->sf", x[tokens], w1.permute(2, 1, 0)[experts]).chunk(2, dim=-1)
    rows = torch.einsum("si,sih->sh", torch.nn.functional.silu(gate) * up, w2.permute(2, 1, 0)[experts])
    return torch.zeros_like(x).index_add(0, tokens, rows * scores[:, None]), experts.bincount(minlength=E)


def test_an_older_card_is_told_its_capability(installed):
    installed(capability=(8, 9), **hub())
    assert sonicmoe.why_not("cuda") == "its kernels need compute capability 9.0 (Hopper) or newer, this card has 8.9"


def test_everything_in_place_runs(installed):
    for version in (LOW, LOW + ".post1"):
        installed(**hub(kernels=version))
        assert registry.status("sonicmoe", "cuda") is None
    assert "need a CUDA GPU" in registry.status("sonicmoe", "cpu")


def test_on_python_311_with_nothing_installed_both_ways_are_named(installed):
    installed(python=(3, 11))
    reason = registry.status("sonicmoe", "cuda")
    assert reason.startswith("backend=sonicmoe: the package kernels is not installed (pip install 'kernels>=")
    assert "sonar_repro[sonicmoe]" in reason
    assert reason.endswith("the package sonic-moe needs Python 3.12 or newer, this is 3.11") and "\n" not in reason
    with pytest.raises(Unsupported, match="Python 3.12"):
        registry.require("sonicmoe", "cuda")


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"kernels": "0.1.0"}, f"needs kernels>={LOW},<{HIGH} and 0.1.0 is installed"),
        ({"kernels": HIGH}, f"<{HIGH} and {HIGH} is installed"),
        ({"nvidia_cutlass_dsl": None}, "nvidia-cutlass-dsl is not installed"),
        ({"nvidia_cutlass_dsl": "4.5.9"}, "nvidia-cutlass-dsl>=4.6.0 and 4.5.9 is installed"),
        ({"apache_tvm_ffi": "0.1.9"}, "apache-tvm-ffi>=0.1.10 and 0.1.9 is installed"),
    ],
)
def test_versions_are_checked_before_a_model_is_built(installed, versions, words):
    installed(python=(3, 11), **hub(**versions))
    assert words in sonicmoe.why_not("cuda")


def test_the_package_stands_in_where_it_is_what_is_installed(installed, monkeypatch):
    installed(sonic_moe="0.1.2")
    package(monkeypatch, entry)
    assert sonicmoe.why_not("cuda") is None
    assert registry.require("sonicmoe", "cuda") == "sonicmoe"
    assert adapter.load_sonicmoe_kernel().moe_general_routing_inputs is entry
    assert sonicmoe.versions() == {"sonic-moe": "0.1.2", "source": "package sonic-moe 0.1.2"}


@pytest.mark.parametrize("routed", cases.ROUTINGS)
@pytest.mark.parametrize("kind", ["olmoe", "granitemoe"])
def test_the_package_gets_what_it_takes_and_agrees_with_eager(kind, routed, installed, monkeypatch):
    installed(sonic_moe="0.1.2")
    package(monkeypatch, entry)
    sonicmoe.register()
    module = cases.experts_module(kind, torch.float64)
    index, weights = cases.routing(routed, module.num_experts, 4)
    got, wanted = (cases.run(module, name, index, weights, torch.float64) for name in ("sonicmoe", "eager"))
    assert max(cases.relative_errors(got, wanted).values()) < 1e-12


def test_a_package_that_would_interleave_gate_and_up_is_refused(installed, monkeypatch):
    installed(sonic_moe="0.1.0")
    package(monkeypatch, lambda x, E, stream_id, activation_type, is_inference_mode_enabled: None)
    assert "the package sonic-moe 0.1.0 has no argument concat_layout" in sonicmoe.why_not("cuda")


def test_a_package_that_cannot_be_imported_is_told(installed, monkeypatch):
    installed(sonic_moe="0.1.2")
    package(monkeypatch, entry)
    monkeypatch.delattr(sys.modules["sonicmoe"], "moe_general_routing_inputs")
    assert "cannot be imported (AttributeError" in sonicmoe.why_not("cuda")


def test_a_kernel_that_cannot_be_loaded_ends_the_arm_before_a_model(installed, monkeypatch):
    installed(**hub())

    def offline():
        raise FileNotFoundError("Cannot find a matching build\nlisting")

    monkeypatch.setattr(adapter, "load_sonicmoe_kernel", offline)
    with pytest.raises(Unsupported, match="Cannot find a matching build.*kernels-community/sonic-moe") as caught:
        registry.require("sonicmoe", "cuda")
    assert "\n" not in str(caught.value)


def test_the_record_names_the_source_and_the_versions(installed):
    installed(**hub(triton="3.6.0"))
    found = sonicmoe.versions()
    assert found["kernels"] == LOW and found["triton"] == "3.6.0" and "sonic-moe" not in found
    assert found["source"].startswith("hub: kernels-community/sonic-moe at ")


def test_a_transformers_with_another_adapter_is_told(installed, monkeypatch):
    installed(sonic_moe="0.1.2")
    package(monkeypatch, entry)
    monkeypatch.delattr(adapter, "SonicMoE")
    with pytest.raises(Unsupported, match="from the hub only"):
        sonicmoe.register()
