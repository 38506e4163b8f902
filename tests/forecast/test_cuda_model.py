"""Hidden device buffers against sizes worked out by hand from PyTorch's CUDA sources."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sonar_repro.forecast.cuda_buffers import CudaModel
from sonar_repro.instruments.tracker import AllocationTracker


def hidden(run):
    """Sizes of the temporaries that ``run`` leaves in the log: allocated and freed in one go."""
    with FakeTensorMode():
        prepared = run[0]()
        tracker = AllocationTracker(events=True, device_model=CudaModel(0))
        with tracker:
            kept = run[1](*prepared)
    events = list(tracker.log.events)
    pairs = [block for block in range(len(tracker.log.sizes)) if tracker.log.owners[block] == 0]
    inside = [block for block in pairs if -(block + 1) in events]
    assert kept is not None
    return [tracker.log.sizes[block] for block in inside]


def test_foreach_norm_keeps_a_partial_norm_a_chunk_of_the_largest_tensor():
    def norms():
        return ([torch.empty(65536 * 3 + 1), torch.empty(5)],)

    # two tensors, four chunks of 65,536 elements, fp32
    assert hidden((norms, lambda tensors: torch._foreach_norm(tensors))) == [2 * 4 * 4]


def test_embedding_backward_sorts_above_3072_indices():
    def lookups(count):
        return lambda: (torch.empty(count, 40), torch.empty(count, dtype=torch.long))

    def backward(gradient, indices):
        return torch.ops.aten.embedding_dense_backward(gradient, indices, 1000, -1, False)

    assert hidden((lookups(3072), backward)) == []
    # int64 keys and positions; (4000 / 10 + 1000) fp32 rows of 40 rounded up to 64
    assert hidden((lookups(4000), backward)) == [32000, 32000, 1400 * 64 * 4]


def test_attention_backward_accumulates_in_fp32():
    def attention(heads, kv_heads):
        def make():
            query = torch.empty(2, heads, 200, 48, dtype=torch.bfloat16, requires_grad=True)
            keys = [torch.empty(2, kv_heads, 200, 48, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
            out = torch.nn.functional.scaled_dot_product_attention(query, *keys, is_causal=True, enable_gqa=True)
            return (out,)

        return make

    def backward(out):
        out.sum().backward()
        return out

    rows, columns = 256, 64  # 200 up to 128s, 48 up to 32s
    sizes = hidden((attention(8, 8), backward))
    assert 2 * rows * 8 * columns * 4 in sizes and 2 * 8 * rows * 4 in sizes
    grouped = hidden((attention(8, 2), backward))
    assert grouped.count(2 * 200 * 8 * 48 * 2) >= 2  # dK and dV at the queries' head count
