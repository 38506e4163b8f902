"""Fast Sinkhorn against the plain loop in float64, its algebra, its traps and what it costs in memory and launches."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sonar_repro.optim import reference
from sonar_repro.optim.sinkhorn import Descent, Normalisation, block_mean_square, sinkhorn, sinkhorn_update_
from sonar_repro.optim.squares import MatrixBatch, Sizes

BLOCKED = Sizes(pack=64, resident=64, block=40)  # every matrix above 64 elements goes through row blocks
SHAPES = [(1, 1, 9), (1, 9, 1), (3, 24, 40), (2, 40, 24), (5, 7, 5), (1, 130, 300)]


def loop(g: torch.Tensor, **options) -> torch.Tensor:
    return torch.stack([reference.sinkhorn(x.double(), **options) for x in g])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


def uneven(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape) * torch.rand(*shape[:-1], 1).mul(6).sub(3).exp()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["sage", "sinkgd"])
@pytest.mark.parametrize("sizes", [None, BLOCKED], ids=["resident", "blocked"])
@pytest.mark.parametrize("rounds", [1, 2, 5, 30])
def test_equals_the_loop_in_float64(shape, form, sizes, rounds):
    g = uneven(shape)
    d = sinkhorn(g, Normalisation(rounds, form=form), sizes=sizes)
    # Stated fp32 error: 2-5e-7; K = 30 accumulates a little more.
    assert relative(d, loop(g, rounds=rounds, form=form)) < (5e-7 if rounds <= 5 else 1e-6)


def test_float64_input_is_computed_in_float64():
    g = uneven((2, 24, 40)).double()
    assert relative(sinkhorn(g), loop(g)) < 1e-14
    assert relative(sinkhorn(g, sizes=BLOCKED), loop(g)) < 1e-14


@pytest.mark.parametrize("sizes", [None, BLOCKED], ids=["resident", "blocked"])
def test_bf16_input_is_computed_in_fp32(sizes):
    g = uneven((2, 24, 40)).bfloat16()
    exact = loop(g)
    assert relative(sinkhorn(g, sizes=sizes), exact) < 5e-7
    # Rounded to bf16 at the end: the stated 1.7e-3; the loop in bf16 is worse.
    assert relative(sinkhorn(g).bfloat16(), exact) < 2.5e-3
    assert relative(torch.stack([reference.sinkhorn(x) for x in g]), exact) > 2.5e-3


def test_columns_have_norm_one_and_rms_is_one_over_root_rows():
    d = sinkhorn(uneven((3, 24, 40)))
    # Columns are normalised last; ε = 1e-8 and fp32 rounding leave 1e-6.
    assert torch.allclose(d.norm(dim=1), torch.ones(3, 40), atol=1e-6)
    assert d.square().mean().sqrt().item() == pytest.approx(24**-0.5, rel=1e-6)
    scaled = sinkhorn(uneven((3, 24, 40)), Normalisation(form="sinkgd"))
    assert scaled.square().mean().sqrt().item() == pytest.approx(1.0, rel=1e-6)


def test_a_batch_equals_its_matrices_one_by_one_bitwise():
    g = uneven((7, 15, 21))
    one_by_one = torch.stack([sinkhorn(x) for x in g])
    assert torch.equal(sinkhorn(g), one_by_one)
    assert torch.equal(sinkhorn(g, sizes=Sizes(2 * 15 * 21, 1 << 20, 1 << 20)), one_by_one)


def test_strided_views_are_read_and_written_in_place():
    torch.manual_seed(0)
    w, g = torch.randn(2, 8, 6, 4), torch.randn(2, 8, 6, 4)
    for part in (0, 1):
        view, source = w[..., part::2, :].transpose(-1, -2)[0], g[..., part::2, :].transpose(-1, -2)[0]
        expected = view - 0.5 * torch.stack([reference.sinkhorn(x) for x in source])
        sinkhorn_update_([MatrixBatch(view, source)], Descent(0.05, 0.0, 10.0), Normalisation())
        assert torch.allclose(view, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_update_equals_the_reference_and_leaves_the_source_alone(dtype):
    torch.manual_seed(0)
    w, g = torch.randn(3, 12, 20, dtype=torch.float64), torch.randn(3, 12, 20, dtype=torch.float64)
    w, g = w.to(dtype), g.to(dtype)
    before = g.clone()
    expected = reference.descend(w.double(), loop(g), lr=2e-3, weight_decay=0.1, tau=10.0)
    sinkhorn_update_([MatrixBatch(w, g)], Descent(2e-3, 0.1, 10.0), Normalisation())
    assert torch.equal(g, before)
    # One rounding of W to its dtype.
    assert torch.allclose(w.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)


# ---- traps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [None, BLOCKED], ids=["resident", "blocked"])
@pytest.mark.parametrize("batched", [False, True])
def test_zero_matrices_rows_and_columns_give_zero(sizes, batched):
    g = uneven((4, 12, 20))
    g[0] = 0
    g[1, 3] = 0
    g[2, :, 5] = 0
    d = sinkhorn(g, sizes=sizes, batched=batched)
    assert torch.isfinite(d).all()
    assert not d[0].any() and not d[1, 3].any() and not d[2, :, 5].any()
    assert relative(d, loop(g)) < 5e-7


def test_a_row_that_lives_only_in_a_dead_column_does_not_grow_to_infinity():
    g = torch.zeros(1, 4, 4)
    g[0, :3, :3] = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    g[0, 3, 3] = 1e-13  # row and column 3 are nearly dead together: each alone would look alive after normalising
    g[0, 0, 3] = 1e-20
    d = sinkhorn(g, Normalisation(rounds=20))
    assert torch.isfinite(d).all() and not d[0, 3].any() and d[0, :3, :3].abs().max() <= 1


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("ratio", [1e-5, 1e-9, 1e-11, 1e-13, 1e-16, 1e-19, 1e-25])
def test_nearly_dead_rows_and_columns_neither_overshoot_nor_turn_to_nan(axis, ratio):
    """A neuron idle for 400 steps has momentum 5e-19 of the others: dead below 1e-12, exact above."""
    g = torch.randn(2, 12, 20, generator=torch.Generator().manual_seed(0))
    g.select(axis, 4).mul_(ratio)
    d = sinkhorn(g)
    assert torch.isfinite(d).all() and d.norm(dim=1).max() <= 1 + 1e-5
    others = [i for i in range(g.shape[axis]) if i != 4]
    if ratio > 1e-12:
        assert relative(d, loop(g)) < 2e-6
    else:
        assert not d.select(axis, 4).any()
        kept = g.clone()
        kept.select(axis, 4).zero_()
        wanted = loop(kept).index_select(axis, torch.tensor(others))
        assert relative(d.index_select(axis, torch.tensor(others)), wanted) < 5e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-22, 1e-18, 1e-12, 1e-6, 1e6, 1e15, 1e25, 1e36])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("sizes", [None, BLOCKED], ids=["resident", "blocked"])
def test_extreme_scales_equal_the_loop_in_float64(dtype, scale, batched, sizes):
    g = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(0))
    g = (g * torch.tensor([scale, 1.0]).view(2, 1, 1)).to(dtype)
    assert relative(sinkhorn(g, batched=batched, sizes=sizes), loop(g)) < 6e-7


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The path that reads no value (always scaled, always masked, batched), on real CPU tensors."""
    for module in ("sinkhorn", "controls", "sage"):
        monkeypatch.setattr(f"sonar_repro.optim.{module}.on_host", lambda tensor: False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["sage", "sinkgd"])
def test_the_path_without_reading_values_equals_the_loop(as_on_a_gpu, shape, form):
    for sizes in (None, BLOCKED):
        g = uneven(shape)
        assert relative(sinkhorn(g, Normalisation(form=form), sizes=sizes), loop(g, form=form)) < 5e-7
        g = uneven(shape).bfloat16()
        assert relative(sinkhorn(g, Normalisation(form=form), sizes=sizes), loop(g, form=form)) < 5e-7


def test_the_path_without_reading_values_survives_the_traps(as_on_a_gpu):
    g = torch.randn(6, 12, 20, generator=torch.Generator().manual_seed(0))
    g[0] = 0
    g[1, 3], g[2, :, 5] = 0, 0
    g[3, 4] *= 1e-16
    g[4] *= 1e-20
    for sizes in (None, BLOCKED):
        d = sinkhorn(g, sizes=sizes)
        assert torch.isfinite(d).all() and not d[0].any() and not d[1, 3].any() and not d[2, :, 5].any()
        assert not d[3, 4].any() and d.norm(dim=1).max() <= 1 + 1e-5
        assert relative(d[[1, 2, 4, 5]], loop(g[[1, 2, 4, 5]])) < 6e-7
    g[5, 0, 0] = torch.nan
    assert sinkhorn(g)[5].isnan().any() and sinkhorn(g)[:5].isfinite().all()


def test_a_matrix_far_below_epsilon_is_still_normalised():
    """800 idle steps leave H at 1e-41: its direction stays that of the same matrix at scale 1, within ε's reach."""
    g = torch.randn(1, 24, 40, generator=torch.Generator().manual_seed(0))
    tiny = g * 1e-40
    assert relative(sinkhorn(tiny), loop(tiny * 1e30)) < 2e-2
    assert sinkhorn(tiny).norm(dim=1).sub(1).abs().max() < 1e-5


def test_nan_and_infinity_are_not_hidden():
    g = uneven((3, 12, 20))
    g[0, 2, 3], g[1, 2, 3] = torch.nan, torch.inf
    d = sinkhorn(g)
    assert d[0].isnan().any() and not d[1].isfinite().all() and d[2].isfinite().all()


def test_many_rounds_on_very_non_square_matrices_do_not_drift():
    g = uneven((1, 3, 500))
    assert relative(sinkhorn(g, Normalisation(rounds=60)), loop(g, rounds=60)) < 2e-6


def test_block_mean_squares_are_those_of_the_source_even_when_it_is_scaled():
    g = torch.randn(3, 12, 20, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-9, 1.0, 1e9]).view(
        3, 1, 1
    )
    for axis, dim in (("rows", 2), ("columns", 1)):
        found = block_mean_square(MatrixBatch(g, g, axis=axis))
        assert torch.allclose(found.double(), g.double().square().mean(dim), rtol=1e-5, atol=0)


# ---- cost -----------------------------------------------------------------------------------------------------------


class Ops(TorchDispatchMode):
    """Counts dispatched operators and the largest storage any of them allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.largest, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        views = ("view", "select", "slice", "expand", "unsqueeze", "squeeze", "split", "unbind", "as_strided", "alias")
        self.count += not any(v in func.__name__ for v in (*views, "detach", "transpose", "::t", "permute"))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.seen:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out

    def known(self, *tensors: torch.Tensor) -> Ops:
        self.seen |= {t.untyped_storage()._cdata for t in tensors}
        return self


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 160, 320), (1, 2048, 1600)])
def test_no_full_size_temporary(shape, dtype):
    """13 MB of fp32 squares would be full size; nothing larger than the 2 MB workspace is ever allocated."""
    w, g = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    with Ops().known(w, g) as ops:
        sinkhorn_update_([MatrixBatch(w, g)], Descent(2e-3, 0.01, 10.0), Normalisation())
    assert 0 < ops.largest <= (1 << 19) * 4 + 64
    assert ops.largest < w.numel() * 4 / 5


def test_batched_launches_do_not_grow_with_the_number_of_matrices():
    """The contract that makes it few launches on CUDA, checked by counting operators on the CPU."""

    def count(parameters: int) -> int:
        batches = [MatrixBatch(torch.randn(2, 8, 6), torch.randn(2, 8, 6)) for _ in range(parameters)]
        with Ops() as ops:
            sinkhorn_update_(batches, Descent(2e-3, 0.01, 10.0), Normalisation(), batched=True)
        return ops.count

    few, many = count(2), count(50)
    assert few == many < 120


def test_batched_equals_one_by_one():
    torch.manual_seed(0)
    shapes = [(2, 8, 6), (3, 8, 6), (1, 6, 8), (4, 8, 6)]
    for dtype in (torch.float32, torch.bfloat16):
        ws, gs = [torch.randn(s).to(dtype) for s in shapes], [torch.randn(s).to(dtype) for s in shapes]
        before = [g.clone() for g in gs]
        results = []
        for batched in (False, True):
            copies = [w.clone() for w in ws]
            batches = [MatrixBatch(w, g) for w, g in zip(copies, gs)]
            sinkhorn_update_(batches, Descent(2e-3, 0.01, 10.0), Normalisation(), batched=batched)
            results.append(copies)
        assert all(map(torch.equal, gs, before))  # H is not written
        for a, b in zip(*results):
            assert torch.allclose(a.float(), b.float(), rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_fake_tensors_run_through_the_same_code():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        w, g = torch.randn(4, 24, 40), torch.randn(4, 24, 40)
        sinkhorn_update_([MatrixBatch(w, g)], Descent(2e-3, 0.01, 10.0), Normalisation())
        sinkhorn_update_([MatrixBatch(w, g)], Descent(2e-3, 0.01, 10.0), Normalisation(), sizes=BLOCKED)


def test_repeats_bit_for_bit():
    g = uneven((5, 40, 33))
    assert torch.equal(sinkhorn(g), sinkhorn(g))
