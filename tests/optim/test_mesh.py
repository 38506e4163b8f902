"""The optimizer built from the role -> rule table: variants against plain references, state, settings, bytes."""

from __future__ import annotations

import pytest
import torch
from tiny_whale import FAMILIES, Toy, differing, family, mesh, run, toy_data, weights

from sonar_repro.optim import reference
from sonar_repro.optim.mesh import build
from sonar_repro.optim.settings import VARIANTS, make_settings

STEPS = 4


def as_matrices(name: str, t: torch.Tensor) -> list[torch.Tensor]:
    """The toy's logical matrices, written out by hand."""
    if name == "experts.gate_up":
        return [half for e in t for half in (e[:6], e[6:])]
    return list(t) if t.ndim == 3 else [t]


def put_together(name: str, matrices: list[torch.Tensor]) -> torch.Tensor:
    if name == "experts.gate_up":
        return torch.stack([torch.cat(matrices[i : i + 2]) for i in range(0, len(matrices), 2)])
    return torch.stack(matrices) if name == "experts.down" else matrices[0]


class Plain:
    """A whole training step from the reference functions, one logical matrix at a time, in float64."""

    def __init__(self, model: Toy, rules: dict[str, str], **options) -> None:
        self.model, self.rules, self.options, self.step_count = model, rules, options, 0
        self.state: dict[tuple[str, int], dict[str, torch.Tensor]] = {}

    def role(self, name: str) -> str:
        if name in ("embedding.weight", "head.weight"):
            return "vocabulary"
        if name.startswith("experts"):
            return "routed"
        return "one_d" if name.endswith("bias") else "dense"

    @torch.no_grad()
    def step(self) -> None:
        self.step_count += 1
        for name, p in self.model.named_parameters():
            rule = self.rules[self.role(name)]
            axis = "columns" if name == "experts.down" else "rows"
            pairs = zip(as_matrices(name, p.double()), as_matrices(name, p.grad.double()))
            new = [
                self.update(rule, axis, w, g, self.state.setdefault((name, i), {})) for i, (w, g) in enumerate(pairs)
            ]
            p.copy_(put_together(name, new))

    def update(self, rule: str, axis: str, w, g, state) -> torch.Tensor:
        zero, t = torch.zeros_like, self.step_count
        if rule == "adamw":
            w, state["m"], state["v"] = reference.adamw(w, g, state.get("m", zero(w)), state.get("v", zero(w)), t, 6e-4)
            return w
        if rule == "sage":
            kind = reference.sage_vector if w.ndim == 1 else reference.sage_matrix
            s = zero(w) if w.ndim == 1 else torch.zeros(w.shape[1], dtype=w.dtype)
            w, state["m"], state["s"] = kind(w, g, state.get("m", zero(w)), state.get("s", s), t, 2e-3)
            return w
        if rule == "factored_v":
            row, column = state.get("r", torch.zeros(w.shape[0])), state.get("c", torch.zeros(w.shape[1]))
            d, state["r"], state["c"] = reference.factored_direction(g, row.double(), column.double(), t)
            return reference.descend(w, d, 2e-3, 0.01, 10.0)
        source = g
        if rule.startswith("mesh") or (rule == "sign" and self.options.get("sign_source") == "H"):
            source = state["H"] = reference.momentum(state.get("H", zero(w)), g)
        if rule == "sign":
            return reference.descend(w, reference.sign_direction(source), 2e-3, 0.01, 10.0)
        d = reference.sinkhorn(source)
        if "_b" in rule or rule == "v_only":
            start = torch.zeros(w.shape[0 if axis == "rows" else 1], dtype=w.dtype)
            raw = g if self.options.get("stat") == "G" else source
            state["V"] = reference.block_statistic(state.get("V", start), raw, axis)
            q = reference.block_multiplier(state["V"])
            d = d * (q[:, None] if axis == "rows" else q)
        return reference.descend(w, d, 2e-3, 0.01, 10.0)


CASES = [(v, {}) for v in VARIANTS if v != "sinkgd"] + [
    ("mesh_b_full", {"stat": "G"}),
    ("mesh_sign_only", {"sign_source": "H"}),
    ("direct", {"roles": {"routed": "adamw"}}),
    ("direct", {"roles": {"routed": "sage"}}),
    ("mesh", {"roles": {"vocabulary": "adamw"}}),
    ("mesh", {"roles": {"dense": "adamw"}}),
]


@pytest.mark.parametrize("variant, options", CASES, ids=[f"{v}-{o}" for v, o in CASES])
def test_every_variant_equals_the_plain_references(variant, options):
    torch.set_default_dtype(torch.float64)
    try:
        mine, plain = Toy(dtype=torch.float64), Toy(dtype=torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer = mesh(mine, variant, **options)
    other = Plain(plain, make_settings(variant, options).rules(), **options)
    for ids in toy_data(STEPS):
        run(mine, optimizer, [ids])
        plain.zero_grad()
        plain(ids).backward()
        other.step()
        for (name, a), b in zip(mine.named_parameters(), plain.parameters()):
            # Both in float64. The fp32 loss head and the sign functions leave room for 1e-9.
            assert torch.allclose(a, b, rtol=0, atol=1e-9), (name, (a - b).abs().max())


def test_sinkgd_uses_adamw_outside_and_its_own_scale():
    toy = Toy()
    optimizer = mesh(toy, "sinkgd")
    rules = {g["name"]: (g["rule"], g.get("tau"), g.get("form")) for g in optimizer.param_groups}
    assert rules["vocabulary"][0] == rules["one_d"][0] == "adamw"
    assert rules["dense"] == rules["routed"] == ("sinkhorn", 0.05, "sinkgd")
    before = toy.mix.weight.detach().clone()
    run(toy, optimizer, toy_data(1))
    moved = (toy.mix.weight.detach() - before * (1 - 2e-3 * 0.01)).square().mean().sqrt()
    assert moved.item() == pytest.approx(2e-3 * 0.05, rel=1e-3)  # RMS 1 times lr·τ


def test_adamw_variant_is_torchs_adamw_bit_for_bit():
    a, b = Toy(), Toy()
    ours = mesh(a, "mesh_adamw", lr=1e-3)
    theirs = torch.optim.AdamW(b.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for ids in toy_data(STEPS):
        run(a, ours, [ids])
        theirs.zero_grad()
        b(ids).backward()
        theirs.step()
    assert differing(weights(a), weights(b)) == []


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("variant", ["direct", "mesh_b", "mesh_factored_v"])
def test_families_take_a_step_with_the_stated_length(name, variant):
    """Each logical matrix of a Sinkhorn role moves by lr·τ/√m in RMS, whatever tensor it hides in."""
    model = family(name)
    optimizer = mesh(model, variant, weight_decay=0.0)
    before = {p: p.detach().clone() for p in model.parameters()}
    ids = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(0))
    optimizer.prepare()
    model(input_ids=ids, labels=ids).loss.backward()
    idle = {p for p in model.parameters() if p.grad is None}
    optimizer.step()
    for role in optimizer._roles.values():
        if role.role not in ("dense", "routed", "shared") or role.parameter in idle:
            continue
        if variant == "mesh_factored_v" and role.role != "dense":
            continue
        for new, old in zip(role.layout.views(role.parameter.detach()), role.layout.views(before[role.parameter])):
            rms = (new - old).square().mean((1, 2)).sqrt()
            block = variant == "mesh_b" and role.role != "dense"
            expected = 2e-3 * 10 / new.shape[1] ** 0.5
            live = rms > 0  # an expert without tokens has a zero gradient in the first step
            assert live.any() and torch.allclose(rms[live], torch.tensor(expected), rtol=0.5 if block else 2e-2)


def test_bitwise_repeatable_and_it_converges():
    losses = []
    for _ in range(2):
        toy = Toy()
        data = toy_data(1) * 60
        losses.append(run(toy, mesh(toy, "mesh_b"), data))
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.5 * losses[0][0]


def test_two_halves_in_hooks_equal_one_optimizer():
    """The in-backward seam: MESH-Full on one expert tensor at a time is bit for bit the whole optimizer."""
    whole, apart = Toy(), Toy()
    optimizer = mesh(whole, "mesh_b_full")
    named = list(apart.named_parameters())
    inner = [build([pair], apart, variant="mesh_b_full") for pair in named if pair[0].startswith("experts")]
    rest = build([pair for pair in named if not pair[0].startswith("experts")], apart, variant="mesh_b_full")
    for one in inner:
        (p,) = one.param_groups[0]["params"]

        def fire(parameter, one=one):
            one.step()
            parameter.grad = None

        p.register_post_accumulate_grad_hook(fire)
    for ids in toy_data(STEPS):
        run(whole, optimizer, [ids])
        rest.zero_grad()
        apart(ids).backward()
        assert apart.experts.down.grad is None
        rest.step()
    assert differing(weights(whole), weights(apart)) == []


def test_per_expert_views_equal_the_batched_tensor():
    whole, apart = Toy(), Toy()
    a, b = whole.experts.gate_up, apart.experts.gate_up
    together = build([("experts.gate_up", a)], whole, variant="mesh_b_full")
    views = [torch.nn.Parameter(piece) for piece in b.detach()]
    single = [build([(f"experts.gate_up[{e}]", v)], apart, variant="mesh_b_full") for e, v in enumerate(views)]
    for seed in range(3):
        a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(seed))
        together.step()
        for view, optimizer, piece in zip(views, single, a.grad):
            view.grad = piece
            optimizer.step()
    assert torch.equal(a, b)


# ---- groups and schedules -------------------------------------------------------------------------------------------


def test_groups_are_the_roles_and_obey_a_scheduler():
    toy = Toy()
    optimizer = mesh(toy, "mesh", roles={"vocabulary": "adamw"})
    assert [g["name"] for g in optimizer.param_groups] == ["vocabulary", "one_d", "dense", "routed"]
    owned = [p for g in optimizer.param_groups for p in g["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, toy.parameters()))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5)
    before = weights(toy)
    run(toy, optimizer, toy_data(1))
    scheduler.step()
    moved = toy.mix.weight.detach() - before["mix.weight"] * (1 - 1e-3 * 0.01)
    assert moved.square().mean().sqrt().item() == pytest.approx(0.5 * 2e-3 * 10 / 8**0.5, rel=1e-3)
    lines = optimizer.describe()
    assert len(lines) == 4 and all("\n" not in line for line in lines)
    assert lines[3].startswith("routed: 2 tensors, 432 parameters, 9 matrices, rule mesh, hidden momentum")


def test_clipping_leaves_expert_momentum_out_of_norm_and_scaling():
    for variant in ("mesh", "mesh_full"):
        free, clipped = Toy(), Toy()
        a, b = mesh(free, variant), mesh(clipped, variant, clip=1e-3)
        for ids in toy_data(STEPS):
            run(free, a, [ids])
        for ids in toy_data(1):
            b.zero_grad()
            b.prepare()
            clipped(ids).backward()
            rest = [p.grad for n, p in clipped.named_parameters() if not n.startswith("experts")]
            expected = torch.linalg.vector_norm(torch.stack([g.norm() for g in rest]))
            experts = clipped.experts.down.grad.clone()
            b.step()
            assert b.last_clip_norm.item() == pytest.approx(expected.item(), rel=1e-5)
            assert torch.equal(b.state[clipped.experts.down]["H"], experts)  # not scaled by 1e-3 / norm
        assert a.last_clip_norm is None
        assert sorted(map(id, b.hidden_parameters)) == sorted(map(id, clipped.experts.parameters()))


def test_works_inside_the_scheduled_optimizer():
    """The harness: one ScheduledOptimizer, no in-backward updates, no clipping; the same bits as the plain loop."""
    from sonar_repro import make_factory
    from sonar_repro.methods import Schedule, ScheduledOptimizer

    for variant in ("direct", "mesh_b", "mesh_b_full"):
        plain, wrapped = Toy(), Toy()
        own = mesh(plain, variant)
        outer = ScheduledOptimizer(wrapped, make_factory(variant), Schedule("none", "tensor", "none"))
        for ids in toy_data(STEPS):
            run(plain, own, [ids])
            outer.zero_grad(set_to_none=True)
            outer.prepare()
            wrapped(ids).backward()
            outer.step()
        assert differing(weights(plain), weights(wrapped)) == []


def test_resumes_inside_the_scheduled_optimizer():
    from sonar_repro import make_factory
    from sonar_repro.methods import Schedule, ScheduledOptimizer

    def step(toy, optimizer, ids):
        optimizer.zero_grad(set_to_none=True)
        optimizer.prepare()
        toy(ids).backward()
        optimizer.step()

    def wrapped(toy):
        return ScheduledOptimizer(toy, make_factory("mesh_b"), Schedule("none", "tensor", "none"))

    straight, resumed = Toy(), Toy()
    first, second = wrapped(straight), wrapped(resumed)
    data = toy_data(6)
    for ids in data[:3]:
        step(straight, first, ids)
    resumed.load_state_dict(straight.state_dict())
    second.load_state_dict(first.state_dict())
    for ids in data[3:]:
        step(straight, first, ids)
        step(resumed, second, ids)
    assert differing(weights(straight), weights(resumed)) == []
    assert first.optimizer_state_bytes() == 4 * (2 * (128 + 8) + 2 * 8 + 54)
    assert first.hidden_buffer_bytes() == 4 * 432


@pytest.mark.parametrize("method", ["sonar", "sonar_per_expert", "optimizer_in_backward"])
def test_mesh_full_inside_backward_is_mesh_full(method):
    """Each hooked tensor (or expert) steps its own MESH-B-Full; hidden momentum is for end-of-step schedules."""
    from sonar_repro import make_factory
    from sonar_repro.methods import ScheduledOptimizer

    plain, hooked = Toy(), Toy()
    own = mesh(plain, "mesh_b_full")
    outer = ScheduledOptimizer(hooked, make_factory("mesh_b_full"), method, max_grad_norm=None)
    for ids in toy_data(STEPS):
        run(plain, own, [ids])
        outer.zero_grad()
        outer.prepare()
        hooked(ids).backward()
        assert hooked.experts.down.grad is None
        outer.step()
    assert differing(weights(plain), weights(hooked)) == []


def test_fused_partition_normalises_the_pair_as_one_matrix():
    toy = Toy()
    optimizer = mesh(toy, "direct", partition="fused", weight_decay=0.0)
    before = toy.experts.gate_up.detach().clone()
    toy(toy_data(1)[0]).backward()
    expected = torch.stack([reference.sinkhorn(g) for g in toy.experts.gate_up.grad])
    optimizer.step()
    assert torch.allclose((before - toy.experts.gate_up.detach()) / (2e-3 * 10), expected, atol=1e-5)
    split = Toy()
    run(split, mesh(split, "direct", weight_decay=0.0), toy_data(1))
    assert not torch.allclose(split.experts.gate_up, toy.experts.gate_up, atol=1e-4)


def test_fake_tensors_take_the_same_steps():
    """Forecasts run the real optimizer on fake tensors: nothing may read a value."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for variant in VARIANTS:
        with FakeTensorMode():
            toy = Toy()
            optimizer = mesh(toy, variant)
            for _ in range(2):
                optimizer.zero_grad()
                optimizer.prepare()
                toy(torch.zeros(12, dtype=torch.long)).backward()
                optimizer.step()
