"""What the footprints declare of the libraries' kernels: operations against an independent count, bytes by hand."""

import experts_cases as cases
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sonar_repro.forecast import footprints
from sonar_repro.forecast.declared_work import kernel, listening, share_hit

BF16 = 2


def backward(module, implementation, index, weights, dtype=torch.bfloat16):
    """One forward and backward pass of a copy; hidden states ``[37, 64]`` of the same tokens every time."""
    return cases.run(module, implementation, index, weights, dtype)


@pytest.mark.parametrize("kind", ["olmoe", "granitemoe"])
@pytest.mark.parametrize("library", ["sonicmoe", "scattermoe"])
def test_operations_are_those_of_the_eager_experts(kind, library):
    """torch counts eager's matrix products; forward is 2 x tokens x k x 3 H I, backward twice that."""
    footprints.register()
    module = cases.experts_module(kind, torch.bfloat16)
    index, weights = cases.routing("mixed", module.num_experts, 4)
    with FlopCounterMode(display=False) as counter:
        backward(module, "eager", index, weights)
    declared = []
    with footprints.on_real_tensors(), listening(declared.append):
        backward(module, f"{library}_footprint", index, weights)
    tokens, hidden, width = 37, 64, 48
    assert counter.get_total_flops() == 3 * (2 * tokens * 4 * 3 * hidden * width)
    # ScatterMoE sums a token's experts by a product with the scores, which eager does elementwise
    assert sum(k.flops for k in declared) == counter.get_total_flops()


def test_sonicmoe_bytes_by_hand():
    footprints.register()
    module = cases.experts_module("olmoe", torch.bfloat16)
    index, weights = cases.routing("mixed", 16, 4)
    declared = []
    with footprints.on_real_tensors(), listening(declared.append):
        backward(module, "sonicmoe_footprint", index, weights)
    tokens, rows, hidden, width, experts = 37, 37 * 4, 64, 48, 16
    by_name = {k.name: k for k in declared}
    up_weights, down_weights = experts * 2 * width * hidden * BF16, experts * hidden * width * BF16
    up = by_name["sonicmoe: up, SwiGLU"]  # reads X and W1, writes A [S, I] and H [S, 2I]
    assert up.nbytes == BF16 * (tokens * hidden + rows * width + rows * 2 * width)
    assert (up.expert_bytes, up.tokens, up.top_k, up.experts) == (up_weights, tokens, 4, experts)
    assert by_name["sonicmoe: down"].nbytes == BF16 * (rows * width + rows * hidden)
    grown = by_name["sonicmoe: dW1"]  # reads X and dH, writes every expert's gradient, with tokens or not
    assert grown.nbytes == BF16 * (tokens * hidden + rows * 2 * width) + up_weights and grown.expert_bytes == 0
    assert by_name["sonicmoe: dW2"].nbytes == BF16 * (tokens * hidden + rows * width) + down_weights
    assert sum(k.expert_bytes for k in declared) == 2 * (up_weights + down_weights)  # once forward, once backward


def test_scattermoe_reads_each_weight_twice_and_writes_each_gradient():
    footprints.register()
    module = cases.experts_module("olmoe", torch.bfloat16)
    index, weights = cases.routing("mixed", 16, 4)
    declared = []
    with footprints.on_real_tensors(), listening(declared.append):
        backward(module, "scattermoe_footprint", index, weights)
    rows, hidden, width, experts = 37 * 4, 64, 48, 16
    size = experts * 3 * width * hidden * BF16
    assert sum(k.expert_bytes for k in declared) == 2 * size
    written = [k.nbytes for k in declared if k.name == "scattermoe: dW"]
    assert sum(written) == size + BF16 * rows * (hidden + width + 2 * width + hidden)


def test_nobody_listens_nothing_is_kept_and_real_tensors_are_refused():
    kernel("anything", 1)
    seen = []
    with listening(seen.append):
        kernel("heard", 2, launches=3)
    kernel("not heard", 4)
    assert [(k.name, k.nbytes, k.launches) for k in seen] == [("heard", 2, 3)]


def test_share_of_experts_with_a_token():
    assert share_hit(1, 8, 64) == pytest.approx(1 / 8)  # one token hits its k experts
    assert share_hit(2, 1, 2) == pytest.approx(3 / 4)
    assert share_hit(220, 8, 64) == pytest.approx(1, abs=1e-9) and share_hit(5, 4, 4) == share_hit(3, 1, 1) == 1
    generator = torch.Generator().manual_seed(0)
    hit = [torch.rand(6, 16, generator=generator).topk(4).indices.unique().numel() / 16 for _ in range(3000)]
    assert sum(hit) / len(hit) == pytest.approx(share_hit(6, 4, 16), abs=0.01)
