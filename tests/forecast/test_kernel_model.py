"""Bytes, operations and launches of single operators against values worked out by hand."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sonar_repro.forecast.kernel_model import MAX_BLOCKS, KernelModel, foreach_group, multi_tensor_launches

MIB = 1 << 20


class Watch(TorchDispatchMode):
    """(short name, work) of every operator inside."""

    def __init__(self):
        super().__init__()
        self.seen, self.model = [], KernelModel()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        work = self.model.work(func, args, kwargs or {}, result)
        if work is not None:
            self.seen.append((func._schema.name.split("::")[1], work))
        return result


def works(call):
    with Watch() as watch, torch.no_grad():
        call()
    return watch.seen


def one(call):
    found = [work for _, work in works(call) if work.launches]
    assert len(found) == 1
    return found[0]


def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def test_elementwise_reads_operands_and_writes_results():
    a, b = bf16(64, 32), bf16(64, 32)
    assert one(lambda: a + b).nbytes == 3 * 64 * 32 * 2
    assert one(lambda: a.add_(b)).nbytes == 3 * 64 * 32 * 2  # reads both, writes one
    assert one(lambda: a.float()).nbytes == 64 * 32 * (2 + 4)
    assert one(lambda: a.copy_(b)).nbytes == 2 * 64 * 32 * 2
    assert one(lambda: a.zero_()).nbytes == 64 * 32 * 2
    assert one(lambda: torch.zeros(10)).nbytes == 40
    row = bf16(1, 32)  # an expanded operand is read as it is stored
    expanded = [work for name, work in works(lambda: a * row.expand(64, 32)) if name == "mul"]
    assert expanded[0].nbytes == 2 * 64 * 32 * 2 + 32 * 2


def test_views_and_allocations_do_nothing_on_the_device():
    a = bf16(8, 6)

    def only_metadata():
        a.t(), a.view(6, 8), a[:2], a.permute(1, 0), a.unsqueeze(0).expand(3, 8, 6), a.detach(), a.split(2)
        torch.empty(4), torch.empty_like(a), a.new_empty(3)

    found = works(only_metadata)
    assert len(found) > 8 and all(work.launches == 0 and work.nbytes == 0 for _, work in found)


def test_matrix_products():
    a, w = bf16(100, 64), bf16(32, 64)
    work = one(lambda: torch.nn.functional.linear(a, w))
    assert work.flops == 2 * 100 * 64 * 32
    assert work.nbytes == 2 * (100 * 64 + 64 * 32 + 100 * 32) and work.launches == 1 and work.tensor_core
    wide, many = torch.zeros(4, 4), bf16(5, 4, 4)
    assert not one(lambda: torch.mm(wide, wide)).tensor_core
    assert one(lambda: torch.bmm(many, many)).flops == 2 * 5 * 4 * 4 * 4


def test_grouped_product_reads_only_rows_and_leaves_weights_to_routing():
    rows, weights = bf16(48, 16), bf16(4, 16, 32)
    offsets = torch.tensor([12, 24, 36, 48], dtype=torch.int32)
    work = one(lambda: torch._grouped_mm(rows, weights, offs=offsets))
    assert work.flops == 2 * 48 * 16 * 32 and work.grouped and work.experts == 4
    assert work.nbytes == 2 * (48 * 16 + 48 * 32) and work.expert_bytes == 2 * 4 * 16 * 32
    grown = bf16(16, 48), bf16(48, 32)
    gradient = one(lambda: torch._grouped_mm(*grown, offs=offsets))
    assert gradient.flops == 2 * 48 * 16 * 32 and gradient.expert_bytes == 0
    assert gradient.nbytes == 2 * (16 * 48 + 48 * 32 + 4 * 16 * 32)


def test_attention_operations_forward_and_backward():
    shape = (2, 4, 32, 16)  # batch, heads, tokens, width
    query, key, value = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with Watch() as watch:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    found = {name: work for name, work in watch.seen if "attention" in name}
    forward, backward = (next(w for n, w in found.items() if n.endswith(e)) for e in ("cpu", "backward"))
    assert forward.flops == 2 * 2 * (2 * 4) * 32 * 32 * 16
    assert backward.flops == pytest.approx(2.5 * forward.flops) and backward.launches == 3


def test_embedding_reads_rows_and_its_gradient_fills_the_table():
    table, ids, rows = bf16(1000, 8), torch.zeros(5, dtype=torch.long), bf16(5, 8)
    assert one(lambda: torch.nn.functional.embedding(ids, table)).nbytes == 5 * 8 + 2 * 5 * 8 * 2
    gradient = one(lambda: torch.ops.aten.embedding_dense_backward(rows, ids, 1000, -1, False))
    assert gradient.nbytes == 1000 * 8 * 2 + 3 * 5 * 8 * 2 + 2 * 5 * 8 and gradient.launches == 2


def test_fused_adamw_moves_seven_words_a_parameter():
    """Parameter and two moments read and written, gradient read."""
    sizes = [(64, 32), (100,)]
    parameters = [torch.nn.Parameter(bf16(*size)) for size in sizes]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.step()
    found = dict(works(optimizer.step))
    assert found["_fused_adamw_"].nbytes == 7 * 2 * (64 * 32 + 100)
    assert found["_fused_adamw_"].tensors == 2 and found["_fused_adamw_"].launches == 1
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)
    sgd.step()
    assert dict(works(sgd.step))["_fused_sgd_"].nbytes == 5 * 2 * (64 * 32 + 100)


def test_eight_bit_adamw_moves_one_byte_a_moment():
    bnb = pytest.importorskip("bitsandbytes")
    parameter = torch.nn.Parameter(torch.zeros(64, 256))
    optimizer = bnb.optim.AdamW8bit([parameter], min_8bit_size=0)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    work = dict(works(optimizer.step))["optimizer_update_8bit_blockwise"]
    count = 64 * 256
    blocks = count // 256
    assert work.nbytes == 4 * count + 2 * 4 * count + 2 * 2 * count + 2 * 2 * 4 * blocks


def test_foreach_operators_and_their_one_tensor_stand_ins():
    tensors = [bf16(64), bf16(32)]
    assert one(lambda: torch._foreach_add_(tensors, 1.0)).nbytes == 2 * 2 * 96
    assert foreach_group([64, 32], [2, 2], writes=False).nbytes == 2 * 96
    assert foreach_group([64, 32], [2, 2], writes=True).nbytes == 2 * 2 * 96
    assert foreach_group([64, 32], [2, 2], writes=False).launches == 2  # partial norms, then their sum


def test_multi_tensor_launches_by_hand():
    assert multi_tensor_launches([1], 1) == 1
    assert multi_tensor_launches([65536 * MAX_BLOCKS], 4) == 1
    assert multi_tensor_launches([65536 * MAX_BLOCKS + 1], 4) == 2
    assert multi_tensor_launches([10] * 36, 4) == 1 and multi_tensor_launches([10] * 37, 4) == 2
    assert multi_tensor_launches([10] * 110, 1) == 1 and multi_tensor_launches([10] * 111, 1) == 2
    assert multi_tensor_launches([0, 0], 1) == 0
    # a gate/up weight of OLMoE: 64 x 2048 x 2048 elements are 4,096 chunks, 12.8 launches
    assert multi_tensor_launches([64 * 2048 * 2048], 4) == 13


def brute_force(sizes, lists):
    """multi_tensor_apply, chunk by chunk, as the CUDA source walks."""
    limit = (110, 64, 48, 36, 30)[lists - 1]
    launches = blocks = tensors = 0
    for size in sizes:
        chunks = -(-size // 65536)
        if not chunks:
            continue
        tensors += 1
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if (tensors == limit and last) or blocks == 320:
                launches, blocks = launches + 1, 0
                tensors = 0 if last else 1
    return launches + (blocks > 0)


@pytest.mark.parametrize("lists", [1, 4])
def test_multi_tensor_launches_as_the_source_walks(lists):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        sizes = (torch.rand(90, generator=generator) ** 8 * 40_000_000).long().tolist()
        assert multi_tensor_launches(sizes, lists) == brute_force(sizes, lists)
