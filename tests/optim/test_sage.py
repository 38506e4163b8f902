"""SAGE, the block multiplier and the controls against their plain references."""

from __future__ import annotations

import math

import pytest
import torch

from sonar_repro.optim import reference
from sonar_repro.optim.controls import (
    BlockScale,
    Factored,
    block_multiplier,
    factored_update_,
    sign_update_,
    update_statistics_,
)
from sonar_repro.optim.sage import Sage, sage_matrices_, sage_vectors_
from sonar_repro.optim.sinkhorn import Descent, Normalisation, sinkhorn, sinkhorn_update_
from sonar_repro.optim.squares import MatrixBatch, Sizes, Workspace

HYPER = {"lr": 2e-3, "weight_decay": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}


def gradients(count: int, *shape: int, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("order", ["code", "paper"])
@pytest.mark.parametrize("limit", [1 << 19, 70])
def test_sage_on_matrices_equals_the_reference(order, limit, monkeypatch):
    monkeypatch.setattr("sonar_repro.optim.sage.CPU", Sizes(limit, limit, limit))
    w = gradients(1, 2, 17, 5)[0]
    m, s = torch.zeros_like(w), torch.zeros(2, 5, dtype=w.dtype)
    expected = [(w[b].clone(), m[b].clone(), s[b].clone()) for b in range(2)]
    for step, g in enumerate(gradients(6, 2, 17, 5), start=1):
        g[:, :, 2] *= 50  # an uneven column, so that the damping is below 1
        sage_matrices_(w, g, m, s, Sage(**HYPER, order=order, step=step), Workspace())
        expected = [
            reference.sage_matrix(*e[:1], g[b], *e[1:], step, **HYPER, order=order) for b, e in enumerate(expected)
        ]
        for b in range(2):
            for mine, plain in zip((w[b], m[b], s[b]), expected[b]):
                assert torch.allclose(mine, plain, rtol=1e-12, atol=1e-14)
    assert not torch.equal(m[0], torch.zeros_like(m[0]))


def test_the_two_orders_differ_when_the_gradient_turns():
    """After 300 equal gradients, one of the opposite sign: only the code's order lets it into m before the sign."""
    results = {}
    for order in ("code", "paper"):
        w, m, s = torch.zeros(1, 1, 1), torch.full((1, 1, 1), 0.112), torch.ones(1, 1)
        how = Sage(**{**HYPER, "weight_decay": 0.0}, order=order, step=300)
        sage_matrices_(w, torch.full((1, 1, 1), -1.0), m, s, how, Workspace())
        results[order] = w.sign().item()
    assert results == {"code": 1.0, "paper": -1.0}


@pytest.mark.parametrize("order", ["code", "paper"])
def test_sage_on_vectors_equals_the_reference_and_rows_are_apart(order):
    w = gradients(1, 3, 7)[0]
    m, s = torch.zeros_like(w), torch.zeros_like(w)
    expected = [(w[b].clone(), m[b].clone(), s[b].clone()) for b in range(3)]
    for step, g in enumerate(gradients(5, 3, 7), start=1):
        g[1] *= 1000  # one expert's bias gradient must not damp another's
        sage_vectors_(w, g, m, s, Sage(**HYPER, order=order, step=step))
        expected = [
            reference.sage_vector(*e[:1], g[b], *e[1:], step, **HYPER, order=order) for b, e in enumerate(expected)
        ]
        for b in range(3):
            for mine, plain in zip((w[b], m[b], s[b]), expected[b]):
                assert torch.allclose(mine, plain, rtol=1e-12, atol=1e-14)


def test_sage_in_bf16_computes_in_fp32_and_rounds_once():
    w, g = (t.bfloat16() for t in gradients(2, 1, 9, 6))
    m, s = torch.zeros_like(w), torch.zeros(1, 6)
    expected, _, _ = reference.sage_matrix(w[0].double(), g[0].double(), m[0].double(), s[0].double(), 1, **HYPER)
    sage_matrices_(w, g, m, s, Sage(**HYPER, order="code", step=1), Workspace())
    assert torch.equal(w[0], expected.bfloat16()) and s.dtype == torch.float32


def test_a_zero_gradient_moves_nothing_but_decay():
    w = torch.ones(1, 4, 3)
    sage_matrices_(
        w,
        torch.zeros(1, 4, 3),
        torch.zeros(1, 4, 3),
        torch.zeros(1, 3),
        Sage(**HYPER, order="code", step=1),
        Workspace(),
    )
    assert torch.allclose(w, torch.full_like(w, 1 - 2e-3 * 0.01))


# ---- MESH-B ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_block_scaled_update_equals_the_reference(axis):
    w = gradients(1, 3, 12, 20)[0]
    v = torch.zeros(3, 12 if axis == "rows" else 20, dtype=torch.float64)
    expected_w, expected_v = [x.clone() for x in w], [x.clone() for x in v]
    for g in gradients(4, 3, 12, 20):
        g[:, 2] *= 100  # a loud row, so that the clip is reached
        g[:, :, 3] *= 0.01
        sinkhorn_update_(
            [MatrixBatch(w, g, v, axis)], Descent(2e-3, 0.01, 10.0), Normalisation(), multiplier=BlockScale()
        )
        for b in range(3):
            expected_v[b] = reference.block_statistic(expected_v[b], g[b], axis)
            q = reference.block_multiplier(expected_v[b])
            d = reference.sinkhorn(g[b]) * (q[:, None] if axis == "rows" else q)
            expected_w[b] = reference.descend(expected_w[b], d, 2e-3, 0.01, 10.0)
            assert torch.allclose(v[b], expected_v[b], rtol=1e-12)
            assert torch.allclose(w[b], expected_w[b], rtol=1e-10, atol=1e-13)


def test_q_has_mean_one_ignores_scale_and_leaves_dead_blocks_out():
    v = torch.rand(5, 40, generator=torch.Generator().manual_seed(0)) + 0.1
    q = block_multiplier(v, (0.25, 4.0))
    assert torch.allclose(q.mean(1), torch.ones(5), atol=1e-6)
    assert torch.allclose(block_multiplier(v * 1e-12, (0.25, 4.0)), q, rtol=1e-5)
    v[:, :4] = 0  # a tenth of the neurons dead
    q = block_multiplier(v, (0.25, 4.0))
    assert not q[:, :4].any() and torch.allclose(q[:, 4:].mean(1), torch.ones(5), atol=1e-6)
    assert torch.equal(block_multiplier(torch.zeros(1, 3), (0.25, 4.0)), torch.zeros(1, 3))
    equal = block_multiplier(torch.full((1, 4), 7.0), (0.25, 4.0))
    assert torch.allclose(equal, torch.ones(1, 4))


def test_q_is_clipped_relative_to_the_rms():
    v = torch.tensor([[1.0, 1.0, 1.0, 1e6]])
    q = block_multiplier(v, (0.25, 4.0))
    assert torch.allclose(q, reference.block_multiplier(v[0]).unsqueeze(0))
    # √(mean/V) is 500 for the quiet three and 0.5 for the loud one: clipped to 4 and 0.5, then the mean is divided out.
    assert (q[0, 0] / q[0, 3]).item() == pytest.approx(8.0, rel=1e-5)


def test_update_statistics_is_an_ema():
    v = torch.tensor([[1.0, 2.0]])
    update_statistics_([v], [torch.tensor([[3.0, 0.0]])], 0.75)
    assert torch.equal(v, torch.tensor([[1.5, 1.5]]))


# ---- controls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sign_only_has_sinkhorns_rms(dtype):
    w, g = (t.to(dtype) for t in gradients(2, 3, 16, 20))
    expected = reference.descend(w.double(), reference.sign_direction(g.double()), 2e-3, 0.01, 10.0)
    sign_update_([MatrixBatch(w, g)], Descent(2e-3, 0.01, 10.0))
    assert torch.allclose(w.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-14)
    rms = reference.sign_direction(g.double()).square().mean().sqrt()
    assert rms.item() == pytest.approx(sinkhorn(g).double().square().mean().sqrt().item(), rel=1e-6)


def test_factored_v_equals_the_reference():
    w = gradients(1, 3, 12, 20)[0]
    rows, columns = torch.zeros(3, 12, dtype=w.dtype), torch.zeros(3, 20, dtype=w.dtype)
    expected = [(w[b].clone(), rows[b].clone(), columns[b].clone()) for b in range(3)]
    for step, g in enumerate(gradients(5, 3, 12, 20), start=1):
        g = g * 10 ** (step - 3)  # a growing gradient, so that the RMS clip is active
        factored_update_([MatrixBatch(w, g)], [rows], [columns], Descent(2e-3, 0.01, 10.0), Factored(0.99, step))
        for b in range(3):
            old, row, column = expected[b]
            d, row, column = reference.factored_direction(g[b], row, column, step)
            expected[b] = (reference.descend(old, d, 2e-3, 0.01, 10.0), row, column)
            for mine, plain in zip((w[b], rows[b], columns[b]), expected[b]):
                assert torch.allclose(mine, plain, rtol=1e-9, atol=1e-13)
            assert d.square().mean().sqrt() <= 1 / math.sqrt(12) + 1e-9


def test_reference_adamw_is_torchs():
    p = torch.nn.Parameter(gradients(1, 4, 5)[0])
    w, m, v = p.detach().clone(), torch.zeros(4, 5), torch.zeros(4, 5)
    theirs = torch.optim.AdamW([p], lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for step, g in enumerate(gradients(4, 4, 5), start=1):
        p.grad = g
        theirs.step()
        w, m, v = reference.adamw(w, g, m.double(), v.double(), step, 6e-4)
        assert torch.allclose(p.detach(), w, rtol=1e-12)
