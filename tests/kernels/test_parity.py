"""Parity at start: right kernels pass, every kind of wrong one is caught and named, nothing is left behind."""

import types

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from sonar_repro.errors import Unsupported, UserError
from sonar_repro.harness import worker
from sonar_repro.kernels import parity
from sonar_repro.models.build import architecture
from sonar_repro.models.experts import find_expert_tensors

SIZES = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=32, vocab_size=128)


@pytest.fixture(params=["olmoe", "granite"])
def config(request, tiny):
    return architecture(tiny(f"model={request.param}").model, "smoke", 128)


def reference(module, hidden, index, weights, *, fault=None):
    """A correct kernel in plain PyTorch over whole tensors, or one with a fault."""
    gate_up, down = module.gate_up_proj, module.down_proj
    if fault == "no gradient of down_proj":
        down = down.detach()
    if fault == "experts off by one":
        index = (index + 1) % module.num_experts
    both = torch.einsum("th,tkfh->tkf", hidden, gate_up[index])
    gate, up = (both[..., 0::2], both[..., 1::2]) if fault == "interleaved" else both.chunk(2, -1)
    if fault == "swapped":
        gate, up = up, gate
    rows = module.act_fn(gate) * up
    rows = torch.einsum("tki,tkhi->tkh", rows, down[index])
    if fault == "unweighted":
        weights = torch.ones_like(weights)
    if fault == "weights without gradient":
        weights = weights.detach()
    rows = rows * weights[..., None]
    if fault == "last row lost":
        rows = torch.cat([rows[:-1], torch.zeros_like(rows[-1:])])
    if fault == "single token":
        rows = rows if rows.shape[0] > 1 else rows * 1.5
    if fault == "refuses one token" and hidden.shape[0] == 1:
        raise ValueError("needs two rows")
    if fault == "refuses many tokens" and hidden.shape[0] > 1:
        raise ValueError("needs one row")
    if fault == "nan":
        rows = rows * float("nan")
    if fault == "half of an expert":
        keep = torch.ones_like(rows)
        keep[index == 3] = 0.5
        rows = rows * keep
    return rows.sum(1)


@pytest.fixture
def kernel():
    """Register a kernel with a fault under a name of its own."""
    before = dict(ALL_EXPERTS_FUNCTIONS._global_mapping)

    def register(fault=None):
        ALL_EXPERTS_FUNCTIONS.register("own", lambda *args: reference(*args, fault=fault))
        return "own"

    yield register
    type(ALL_EXPERTS_FUNCTIONS)._global_mapping.clear()
    type(ALL_EXPERTS_FUNCTIONS)._global_mapping.update(before)


def check(config, implementation, dtype=torch.bfloat16, backend="own"):
    return parity.check(config, backend, implementation, dtype=dtype, device="cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_right_kernels_pass_within_rounding(config, kernel, dtype):
    for implementation in ("grouped_mm", kernel()):
        result = check(config, implementation, dtype)
        assert result["compared"] and set(result["errors"]) == {
            "output",
            "gradient of the hidden states",
            "gradient of the routing weights",
            "gradient of gate_up_proj",
            "gradient of down_proj",
        }
        assert result["max_relative_error"] == max(result["errors"].values())
        # half of the bound is left for kernels that round more often than these
        assert result["max_relative_error"] < (result["tolerance"] / 2 if dtype == torch.bfloat16 else 1e-5)


FAULTS = ["interleaved", "swapped", "experts off by one", "unweighted", "last row lost", "single token", "nan"]
FAULTS += ["no gradient of down_proj", "weights without gradient", "half of an expert"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_kind_of_wrong_kernel_is_caught(config, kernel, fault, dtype):
    with pytest.raises(parity.BackendMismatch, match="differs from eager in the .*relative error") as caught:
        check(config, kernel(fault), dtype)
    assert "\n" not in str(caught.value) and "no number was taken" in str(caught.value)
    assert worker.classify(caught.value) == "failed"
    named = {"no gradient of down_proj": "gradient of down_proj", "weights without gradient": "gradient of the routing"}
    assert named.get(fault, "") in str(caught.value)


def test_a_kernel_that_cannot_take_a_single_token_may_run_and_the_record_says_so(config, kernel):
    """No training batch has one token; a kernel that cannot take many is no kernel."""
    result = check(config, kernel("refuses one token"))
    assert result["tokens"] == [parity.TOKENS] and "needs two rows" in result["single_token_refused"]
    with pytest.raises(ValueError, match="needs one row"):
        check(config, kernel("refuses many tokens"))


def test_a_wrong_kernel_ends_the_arm_as_failed_and_never_as_a_number(tiny, reporter, monkeypatch, kernel):
    """The arm through the harness's own child code: no time, no memory, no loss in its record."""
    monkeypatch.setattr("sonar_repro.training.train.require", lambda name, device: kernel("interleaved"))
    report = reporter()
    status, error, sections = worker.execute(tiny(), report)
    assert status == "failed" and error["phase"] == "parity" and error["type"] == "BackendMismatch"
    assert "gate_up_proj" in error["message"] or "output" in error["message"] or "gradient" in error["message"]
    assert not {"time", "memory", "loss", "counts"} & set(sections)


def test_the_record_of_an_arm_holds_its_parity(tiny, reporter):
    report = reporter()
    status, error, sections = worker.execute(tiny("steps=2", "warmup_steps=0", "window_start=1"), report)
    assert status == "ok", error
    found = sections["environment"]["parity"]
    assert found["compared"] and found["tolerance"] == 2e-2 and found["reference"] == "eager, float32"
    assert found["shapes"]["gate_up_proj"] == [8, 64, 64] and 0 < found["max_relative_error"] < 1e-2


def test_eager_is_the_reference(config):
    assert check(config, "eager", backend="eager") == {"compared": False, "reason": "eager is the reference"}


def test_nothing_random_is_used_up_and_the_config_is_left_alone(config, kernel):
    torch.manual_seed(11)
    before, told = torch.get_rng_state(), config.to_json_string()
    first, second = (check(config, "grouped_mm") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before) and config.to_json_string() == told
    assert first["errors"] == second["errors"]


def test_sizes_that_grouped_mm_cannot_take_are_one_line(tiny):
    for sizes in ("model.smoke.intermediate_size=20", "model.smoke.hidden_size=60"):
        shape = architecture(tiny(sizes).model, "smoke", 128)
        with pytest.raises(UserError, match="multiple of 16 bytes.*multiples of 8, or backend=eager") as caught:
            check(shape, "grouped_mm", backend="grouped_mm")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        ("jetmoe", dict(num_key_value_heads=2, kv_channels=8), "JetMoeForCausalLM has expert code of its own"),
        ("llama", dict(num_attention_heads=2), "LlamaForCausalLM has no batched experts"),
    ],
)
def test_a_class_that_would_ignore_the_backend_is_refused(kind, sizes, words):
    from transformers import AutoConfig

    shape = AutoConfig.for_model(kind, **{**SIZES, **sizes})
    with pytest.raises(Unsupported, match=f"{words}.*use backend=eager"):
        check(shape, "grouped_mm", backend="grouped_mm")


def test_one_expert_of_the_comparison_gets_no_token(config):
    template = parity._template(config, "own")
    values = parity._values(template, torch.float32, torch.Generator().manual_seed(0))
    module = parity._filled(template, values, "eager", torch.float32, torch.device("cpu"))
    assert {t.num_experts for t in find_expert_tensors(module)} == {8}
    batch = parity._batch(module, parity.TOKENS, torch.float32, torch.Generator().manual_seed(0))
    assert set(batch["index"].flatten().tolist()) == set(range(7))
    assert all(len(set(row)) == parity.TOP_K for row in batch["index"].tolist())


def test_on_cuda_everything_taken_is_given_back(monkeypatch):
    done = []
    cuda = types.SimpleNamespace(
        synchronize=lambda d: done.append("synchronize"), empty_cache=lambda: done.append("empty")
    )
    monkeypatch.setattr(parity.torch, "cuda", cuda)
    monkeypatch.setattr(
        parity.torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("workspaces"), raising=False
    )
    parity._forget(torch.device("cuda"))
    assert done == ["synchronize", "workspaces", "empty"]
