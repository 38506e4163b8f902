"""Checkpoint and resume: one state format for all methods, and 3 + 3 steps equal 6 bit for bit."""

import io

import pytest
import torch
from tiny_moe import backward, batches, build, differing, tiny_model, train, warm_up, weights

from sonar_repro.errors import UserError
from sonar_repro.methods import METHODS

EXPERTS_AND_REST = ("standard_no_expert_clip", "sonar", "sonar_per_expert")
NO_CLIP = ("standard_no_clip", "optimizer_in_backward")
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def through_a_file(value):
    """Saved and read back as HF Trainer does: torch.save, then torch.load with weights_only."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def six_steps(first, second, optimizer, dtype, shape):
    """Six steps under ``second``, of which the first three (if ``first`` is given) ran under it and were resumed."""
    data = batches(6)
    model = tiny_model("olmoe", dtype, attention_dropout=0.1, **shape)
    torch.manual_seed(7)  # dropout: the generator's state is part of a checkpoint
    scheduled = build(model, first or second, optimizer)
    scheduler = warm_up(scheduled, 4)
    train(model, scheduled, data[:3], scheduler)
    if first:
        saved = through_a_file(
            [model.state_dict(), scheduled.state_dict(), scheduler.state_dict(), torch.get_rng_state()]
        )
        model = tiny_model("olmoe", dtype, seed=99, attention_dropout=0.1, **shape)
        scheduled = build(model, second, optimizer)
        scheduler = warm_up(scheduled, 4)
        torch.manual_seed(1234)
        model.load_state_dict(saved[0])
        scheduled.load_state_dict(saved[1])
        scheduler.load_state_dict(saved[2])
        torch.set_rng_state(saved[3])
    train(model, scheduled, data[3:], scheduler)
    return weights(model), scheduled


def assert_states_equal(a, b):
    assert a["state"].keys() == b["state"].keys()
    for name, state in a["state"].items():
        other = b["state"][name]
        assert state.keys() == other.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == other[key].dtype
                assert torch.equal(value, other[key]), (name, key)
            else:
                assert value == other[key]
    assert a["param_groups"] == b["param_groups"]
    assert (a["steps"], a["optimizer"]) == (b["steps"], b["optimizer"])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "adamw8bit"])
@pytest.mark.parametrize("methods", [EXPERTS_AND_REST, NO_CLIP], ids=["no_expert_clip", "no_clip"])
def test_three_plus_three_is_six_across_methods(methods, optimizer):
    """Every method of a family goes on with what the next one saved; bitwise the uninterrupted run."""
    shape = {}
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
        shape = {"hidden_size": 64, "intermediate_size": 64}  # slices are whole 8-bit blocks
    reference, uninterrupted = six_steps(None, methods[0], optimizer, torch.bfloat16, shape)
    for first, second in zip(methods, methods[1:] + methods[:1]):
        resumed, scheduled = six_steps(first, second, optimizer, torch.bfloat16, shape)
        assert differing(reference, resumed) == [], (first, second)
        assert_states_equal(uninterrupted.state_dict(), scheduled.state_dict())
        assert scheduled.steps == 6


def test_resume_under_the_same_method_in_fp32():
    for method in ("standard_global_clip", "sonar"):
        reference, _ = six_steps(None, method, "adamw", torch.float32, {})
        resumed, _ = six_steps(method, method, "adamw", torch.float32, {})
        assert differing(reference, resumed) == []


def trained(method, optimizer="adamw", dtype=torch.float32):
    model = tiny_model(dtype=dtype)
    scheduled = build(model, method, optimizer)
    train(model, scheduled, batches(2))
    return scheduled


def test_format_is_keyed_by_name_and_the_same_for_every_method():
    saved = {method: trained(method).state_dict() for method in METHODS}
    model = tiny_model()
    for state in saved.values():
        assert list(state["state"]) == [name for name, _ in model.named_parameters()]
        assert state["state"].keys() == {n for g in state["param_groups"] for n in g["params"]}
        for name, p in model.named_parameters():
            assert state["state"][name]["exp_avg"].shape == p.shape
            assert state["state"][name]["step"].ndim == 0
    for other in EXPERTS_AND_REST[1:]:
        assert_states_equal(saved[EXPERTS_AND_REST[0]], saved[other])


def test_state_before_the_first_step_can_be_loaded():
    """Accelerate saves and loads the state of a fresh optimizer when it wraps one."""
    optimizer = build(tiny_model(), "sonar")
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    assert optimizer.optimizer_state_bytes() == 0


@pytest.mark.parametrize("method", METHODS)
def test_moment_dtypes_survive_loading(method):
    """torch's own load_state_dict would cast fp32 moments of bf16 parameters to bf16."""
    scheduled = trained(method, dtype=torch.bfloat16)
    saved = scheduled.state_dict()
    assert saved["state"][NAME]["exp_avg"].dtype == torch.bfloat16
    saved["state"][NAME]["exp_avg"] = saved["state"][NAME]["exp_avg"].float()
    fresh = build(tiny_model(dtype=torch.bfloat16), method)
    fresh.load_state_dict(saved)
    assert fresh.state_dict()["state"][NAME]["exp_avg"].dtype == torch.float32
    assert fresh.state_dict()["state"][NAME]["step"].dtype == torch.float32


def test_loaded_state_is_a_copy():
    scheduled = trained("sonar")
    saved = scheduled.state_dict()
    fresh = build(tiny_model(), "sonar")
    fresh.load_state_dict(saved)
    before = fresh.state_dict()["state"][NAME]["exp_avg"].clone()
    saved["state"][NAME]["exp_avg"].zero_()
    assert torch.equal(fresh.state_dict()["state"][NAME]["exp_avg"], before)


def remove_state(s):
    del s["state"][NAME]


def remove_name(s):
    s["param_groups"][0]["params"].remove(NAME)
    del s["param_groups"][0]["shapes"][NAME]


def unknown_state(s):
    s["state"]["model.extra"] = {}


def unknown_name(s):
    s["param_groups"][1]["shapes"]["model.extra"] = [2]


def other_shape(s):
    s["param_groups"][0]["shapes"][NAME] = [8, 32, 32]


def other_moment(s):
    s["state"][NAME]["exp_avg"] = torch.zeros(3)


def other_optimizer(s):
    s["optimizer"] = "Lion"


def other_groups(s):
    s["param_groups"][0]["name"] = "all"


def torch_format(s):
    for key in ("format", "optimizer", "steps"):
        del s[key]


@pytest.mark.parametrize(
    "damage, said",
    [
        (remove_state, f"lacks parameter {NAME}"),
        (remove_name, f"lacks parameter {NAME}"),
        (unknown_state, "has the unknown parameter model.extra"),
        (unknown_name, "has the unknown parameter model.extra"),
        (other_shape, rf"{NAME} is for shape \[8, 32, 32\], the model has \[4, 32, 32\]"),
        (other_moment, rf"'exp_avg' of {NAME} has shape \[3\]"),
        (other_optimizer, "state of Lion cannot be loaded into AdamW"),
        (other_groups, "the groups all, other"),
        (torch_format, "lacks format, optimizer, steps"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_is_changed(damage, said):
    target = trained("sonar")
    before = through_a_file(target.state_dict())
    foreign = through_a_file(trained("standard_no_expert_clip").state_dict())
    damage(foreign)
    with pytest.raises(UserError, match=said) as error:
        target.load_state_dict(foreign)
    assert "\n" not in str(error.value)
    assert_states_equal(before, target.state_dict())


def test_8bit_state_that_crosses_expert_borders_is_refused_per_expert():
    pytest.importorskip("bitsandbytes")
    # gate_up is 4 x 40 x 48 = 7,680 elements, kept in 8 bits; its slices of 1,920 elements are no multiple of 256
    shape = {"hidden_size": 48, "intermediate_size": 20, "num_attention_heads": 4}
    model = tiny_model(dtype=torch.float32, backend="eager", **shape)
    scheduled = build(model, "sonar", "adamw8bit")
    train(model, scheduled, batches(1))
    fresh = build(tiny_model(dtype=torch.float32, backend="eager", **shape), "sonar_per_expert", "adamw8bit")
    with pytest.raises(UserError, match="cross expert borders"):
        fresh.load_state_dict(scheduled.state_dict())


def test_state_bytes_count_every_tensor_once():
    """AdamW in bf16: two moments of 2 bytes an element and one fp32 step a tensor (one an expert if per expert)."""
    model = tiny_model(dtype=torch.bfloat16)
    elements, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    for method, steps in (("standard_global_clip", tensors), ("sonar", tensors), ("sonar_per_expert", tensors + 4 * 3)):
        assert trained(method, dtype=torch.bfloat16).optimizer_state_bytes() == 4 * elements + 4 * steps


@pytest.mark.parametrize("mode", ["standard", "fold"])
def test_state_in_the_middle_of_a_step_is_refused(mode):
    """Experts would be a step ahead of the rest (or their moments half folded)."""
    model = tiny_model()
    optimizer = build(model, "sonar", accumulation=2 if mode == "fold" else 1, accumulation_mode=mode)
    backward(model, batches(1)[0])
    with pytest.raises(RuntimeError, match=r"call it after step\(\)"):
        optimizer.state_dict()
    optimizer.step()
    assert optimizer.state_dict()["steps"] == 1


def test_state_view_is_the_inner_state():
    scheduled = trained("sonar")
    p = scheduled.expert_parameters[0]
    assert scheduled.state[p]["exp_avg"] is scheduled.state_dict()["state"][NAME]["exp_avg"]
