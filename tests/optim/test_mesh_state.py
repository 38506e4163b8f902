"""State and settings of the MESH family: exact resume, bytes, and bad values refused in one line."""

from __future__ import annotations

import io

import pytest
import torch
from tiny_whale import Toy, differing, mesh, run, toy_data, weights

from sonar_repro.errors import UserError
from sonar_repro.optim.mesh import validate
from sonar_repro.optim.settings import ROLES, RULES, VARIANTS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", [*VARIANTS])
def test_resume_is_bit_for_bit_and_keeps_dtypes(variant, dtype):
    straight, resumed = Toy(dtype=dtype), Toy(dtype=dtype)
    data = toy_data(6)
    optimizer = mesh(straight, variant)
    run(straight, optimizer, data)
    first = mesh(resumed, variant)
    run(resumed, first, data[:3])
    file = io.BytesIO()
    torch.save({"model": resumed.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = Toy(seed=9, dtype=dtype)
    again.load_state_dict(saved["model"])
    second = mesh(again, variant)
    second.load_state_dict(saved["optimizer"])
    for p, q in zip(resumed.parameters(), again.parameters()):
        for key, value in first.state[p].items():
            other = second.state[q][key]
            if isinstance(value, torch.Tensor):
                assert other.dtype == value.dtype and torch.equal(other, value) and other is not value
    run(again, second, data[3:])
    assert differing(weights(straight), weights(again)) == []


def test_a_loaded_state_is_a_copy():
    a, b = Toy(), Toy()
    first, second = mesh(a, "mesh"), mesh(b, "mesh")
    run(a, first, toy_data(2))
    second.load_state_dict(first.state_dict())
    kept = second.state[b.experts.down]["H"].clone()
    run(a, first, toy_data(2))
    assert torch.equal(second.state[b.experts.down]["H"], kept)


def test_the_state_of_another_variant_is_refused():
    toy = Toy()
    with pytest.raises(UserError, match="same variant"):
        mesh(toy, "mesh").load_state_dict(mesh(toy, "mesh_b").state_dict())


def test_bytes_are_those_of_the_tensors_held():
    """Toy: vocabulary 2 x (128 + 8), vector 2 x 8, experts 288 + 144 = 432 elements, 36 + 18 blocks; fp32."""
    base = 4 * (2 * (128 + 8) + 2 * 8)
    expected = {"direct": (base, 0), "mesh": (base, 4 * 432), "mesh_b": (base + 4 * 54, 4 * 432)}
    expected |= {"mesh_full": (base + 4 * 432, 0), "mesh_b_full": (base + 4 * (432 + 54), 0)}
    for variant, (state, hidden) in expected.items():
        toy = Toy()
        optimizer = mesh(toy, variant)
        run(toy, optimizer, toy_data(2))
        assert (optimizer.optimizer_state_bytes(), optimizer.hidden_buffer_bytes()) == (state, hidden)
        optimizer.prepare()
        assert optimizer.hidden_buffer_bytes() == hidden
    assert not any("H" in s for s in mesh(Toy(), "direct").state.values())


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, value",
    [
        ("lr", -1.0), ("lr", float("nan")), ("weight_decay", -0.1), ("betas", (0.9, 1.0)), ("betas", 0.9), ("eps", 0.0),
        ("tau", 0.0), ("tau", -10.0), ("rounds", 0), ("rounds", 2.5), ("rounds", True), ("form", "other"),
        ("order", "x"), ("stat", "W"), ("sign_source", "W"), ("bounds", (4.0, 0.25)), ("clip", 0.0), ("adamw_lr", -1),
        ("adamw_betas", (2, 0)), ("diagnostics", 1), ("tua", 10.0), ("roles", "adamw"), ("roles", {"router": "adamw"}),
        ("roles", {"routed": "sgd"}), ("roles", {"one_d": "mesh"}),
    ],
)  # fmt: skip
def test_bad_values_are_one_line_with_key_and_value(key, value):
    with pytest.raises(UserError) as caught:
        validate("mesh", {key: value})
    message = str(caught.value)
    shown = next(iter(value.items())) if isinstance(value, dict) else (key, value)
    assert key in message and repr(shown[1]) in message and "\n" not in message


def test_unknown_variants_and_hidden_stat_g_are_refused():
    with pytest.raises(UserError, match="did you mean mesh_b"):
        validate("mesh-b", {})
    with pytest.raises(UserError, match="use mesh_b_full"):
        validate("mesh_b", {"stat": "G"})
    validate("mesh_b_full", {"stat": "G"})


def test_every_variant_covers_every_role_and_every_rule_is_used():
    assert all(set(rules) == set(ROLES) for rules in VARIANTS.values())
    assert {rule for rules in VARIANTS.values() for rule in rules.values()} == set(RULES)


def test_an_ablation_of_a_role_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="no parameter with the role shared: leave roles.shared out"):
        mesh(Toy(), "direct", roles={"shared": "adamw"})


def test_parameters_cannot_be_added_later():
    with pytest.raises(UserError, match="add_param_group"):
        mesh(Toy(), "mesh").add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def test_mesh_needs_routed_experts_and_direct_does_not():
    toy = Toy()
    toy.experts = torch.nn.Linear(8, 8)
    with pytest.raises(UserError, match="no routed experts"):
        mesh(toy, "mesh")
    run(toy, mesh(toy, "direct"), toy_data(1))
