"""A plain-PyTorch stand-in for the ScatterMoE library: the signature of ``parallel_linear``, from its contract.

Rows of ``inputs`` are repeated ``k`` times (unless ``grouped_in``: then they already are one a row, in expert order);
row r of the repeated input is token r // k. ``sorted_scattered_idxs`` lists rows in expert order; ``expert_offsets``
are the ends of the experts' rows. The result is in expert order (``grouped_out``) or scattered back; ``gates``
``[T, K]`` then sum the K rows of each token.
"""

import torch

calls: list[dict] = []  # what the adapter handed over, for the tests


def parallel_linear(
    inputs,
    expert_weights,
    k,
    sorted_expert_idxs,
    sorted_scattered_idxs,
    expert_offsets,
    expert_biases=None,
    gates=None,
    grouped_in=False,
    grouped_out=False,
):
    calls.append({"weights": expert_weights, "inputs": inputs, "k": k, "offsets": expert_offsets})
    rows = sorted_scattered_idxs.numel()
    assert inputs.shape[0] * k == rows and expert_weights.shape[1] == inputs.shape[1]
    assert torch.equal(sorted_expert_idxs, sorted_expert_idxs.sort().values)
    assert expert_offsets.shape == (expert_weights.shape[0],) and int(expert_offsets[-1]) == rows
    grouped = inputs if grouped_in else inputs[sorted_scattered_idxs // k]
    parts, start = [], 0
    for expert, end in enumerate(expert_offsets.tolist()):
        assert bool((sorted_expert_idxs[start:end] == expert).all())
        part = grouped[start:end] @ expert_weights[expert]
        parts.append(part if expert_biases is None else part + expert_biases[expert])
        start = end
    output = torch.cat(parts)
    if not grouped_out:
        output = torch.zeros_like(output).index_copy(0, sorted_scattered_idxs, output)
    if gates is not None:
        assert not grouped_out and gates.dtype == output.dtype
        output = (gates.unsqueeze(1) @ output.view(*gates.shape, -1)).squeeze(1)
    return output
