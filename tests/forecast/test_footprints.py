"""What the footprints allocate and keep: byte counts from the libraries' descriptions, and one library itself."""

import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import OlmoeConfig
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from sonar_repro.errors import Unsupported
from sonar_repro.forecast import footprints
from sonar_repro.instruments.tracker import AllocationTracker

T, K, E, D, WIDTH = 64, 2, 4, 128, 96  # tokens, experts a token, experts, hidden size, expert width
S, G = T * K, 2 * WIDTH


def experts(implementation, dtype=torch.bfloat16):
    footprints.register()
    config = OlmoeConfig(hidden_size=D, intermediate_size=WIDTH, num_experts=E, num_experts_per_tok=K)
    config._experts_implementation = implementation
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    module = OlmoeExperts(config)
    torch.set_default_dtype(before)
    return module


def inputs(dtype):
    index = torch.zeros(T, K, dtype=torch.long)
    index[:, 1] = 1
    return (
        torch.zeros(T, D, dtype=dtype, requires_grad=True),
        index,
        torch.zeros(T, K, dtype=dtype, requires_grad=True),
    )


def measure(module, dtype, hooked=False):
    """(bytes that forward left behind, its peak, backward's peak) above what was there before, and the gradients."""
    tracker = AllocationTracker()
    tracker.attach(module, module.parameters())
    with tracker:
        hidden, index, weights = inputs(dtype)
        start = tracker.live_requested
        tracker.phase("measured")
        output = module(hidden, index, weights)
        kept = tracker.live_requested - start
        if hooked:
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        loss = output.sum()
        tracker.phase("warmup")
        loss.backward()
    peaks = [tracker.peaks[name].requested - start for name in ("measured", "warmup")]
    return kept, *peaks, (output, hidden.grad, weights.grad, [p.grad for p in module.parameters()])


def fake(implementation, dtype=torch.bfloat16, hooked=False):
    with FakeTensorMode():
        return measure(experts(implementation, dtype), dtype, hooked)


def test_sonicmoe_keeps_x_the_pre_activation_and_the_routing():
    kept, forward_peak, _, _ = fake("sonicmoe_footprint")
    routing = 4 * (3 * S + (E + 1) + (T + 1))
    scores = 4 * S
    output = 2 * T * D
    # X is the caller's: kept, but not new. The paper's 2TD + 2SG is X and H; H is what the layer adds.
    assert kept == 2 * S * G + scores + routing + output
    activated, by_row = 2 * S * WIDTH, 2 * S * D
    indices = 4 * S + 4 * S + 4 * E  # token and expert index, counts: gone when the layer returns
    assert forward_peak == kept + activated + by_row + indices


def test_sonicmoe_holds_both_weight_gradients_and_scattermoe_one():
    up, down = 2 * E * G * D, 2 * E * D * WIDTH
    _, _, sonic, _ = fake("sonicmoe_footprint", hooked=True)
    _, _, scatter, _ = fake("scattermoe_footprint", hooked=True)
    kept_by_sonic = 2 * S * G + 4 * S + 4 * (3 * S + E + 1 + T + 1) + 2 * T * D + 2  # and the loss
    # up half: dW2, dW1, dH, dX by row, dX, dScores, and the output's gradient is gone
    assert sonic >= up + down + 2 * S * G + 2 * S * D + 2 * T * D
    assert sonic <= up + down + kept_by_sonic + 2 * S * G + 2 * S * D + 2 * T * D + 2 * 4 * S
    # hooks change SonicMoE's peak within a layer by nothing, ScatterMoE's by the down weight's gradient
    assert fake("sonicmoe_footprint")[2] == sonic
    assert fake("scattermoe_footprint")[2] - scatter == down


def test_scattermoe_keeps_rows_gate_and_expanded_output():
    kept, _, _, _ = fake("scattermoe_footprint")
    indices = 8 * (2 * S + E)
    # [S, G] in expert order, silu of the gate and the product [S, I], output by row [S, D] and output [T, D]
    assert kept == indices + 2 * (S * G + 2 * S * WIDTH + S * D) + 2 * T * D


@pytest.mark.parametrize("implementation", footprints.NAMES)
def test_gradients_have_the_real_implementation_s_shapes_and_layouts(implementation):
    module = experts("grouped_mm")
    for parameter in module.parameters():
        torch.nn.init.zeros_(parameter)
    *_, real = measure(module, torch.bfloat16)
    *_, stand_in = fake(implementation)
    for expected, got in zip([*real[:3], *real[3]], [*stand_in[:3], *stand_in[3]]):
        assert (expected.shape, expected.dtype, expected.stride()) == (got.shape, got.dtype, got.stride())


@pytest.mark.parametrize("implementation", footprints.NAMES)
def test_biases_and_transposed_weights(implementation):
    footprints.register()
    config = GptOssConfig(hidden_size=D, intermediate_size=WIDTH, num_local_experts=E, num_experts_per_tok=K)
    config._experts_implementation = implementation
    with FakeTensorMode():
        module = GptOssExperts(config)
        hidden, index, weights = inputs(torch.float32)
        module(hidden, index, weights).sum().backward()
        for parameter in module.parameters():
            assert parameter.grad.shape == parameter.shape


@pytest.mark.parametrize("implementation", footprints.NAMES)
def test_a_footprint_never_runs_on_real_tensors(implementation):
    module = experts(implementation)
    with pytest.raises(Unsupported, match="computes nothing; use backend=.*scale=forecast"):
        module(*inputs(torch.bfloat16))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 to run Triton on a CPU")
@pytest.mark.parametrize("hooked", [False, True])
def test_scattermoe_itself_allocates_the_same_bytes(hooked, monkeypatch):
    """The library on real CPU tensors under Triton's interpreter: kept, forward peak and backward peak are equal."""
    pytest.importorskip("scattermoe")
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")

    def library(self, hidden_states, top_k_index, top_k_weights):
        routing = flatten_sort_count(top_k_index, num_experts=self.num_experts)
        up = self.gate_up_proj.transpose(2, 1)
        rows = parallel_linear(hidden_states, up, K, *routing, grouped_in=False, grouped_out=True)
        rows = self._apply_gate(rows)
        down = self.down_proj.transpose(2, 1)
        return parallel_linear(rows, down, 1, *routing, grouped_in=True, grouped_out=False, gates=top_k_weights)

    ALL_EXPERTS_FUNCTIONS.register("scattermoe_library", library)
    module = experts("scattermoe_library", torch.float32)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    assert measure(module, torch.float32, hooked)[:3] == fake("scattermoe_footprint", torch.float32, hooked)[:3]
