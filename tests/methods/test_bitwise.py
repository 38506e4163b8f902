"""The bitwise claims of Sonar-MoE (§4.2, §5.1) on tiny OLMoE and Granite, over five steps with warm-up."""

import pytest
import torch
from tiny_moe import HYPER, LAYERS, batches, build, differing, tiny_model, train, warm_up, weights

STEPS = 5
EXPERTS = {"olmoe": 4, "granite": 4}


def run(model_name, dtype, method, optimizer, steps=STEPS, model_options=None, **kwargs):
    model = tiny_model(model_name, dtype, **(model_options or {}))
    start = weights(model)
    scheduled = build(model, method, optimizer, **kwargs)
    norms = []
    train(
        model,
        scheduled,
        batches(steps),
        warm_up(scheduled),
        after_step=lambda k: norms.append(scheduled.last_clip.norm),
    )
    return start, weights(model), scheduled, norms


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_name", ["olmoe", "granite"])
def test_in_backward_is_the_standard_update(model_name, dtype, optimizer):
    start, baseline, _, norms = run(model_name, dtype, "standard_no_expert_clip", optimizer)
    # The claims below would hold trivially for an optimizer that moves nothing (fused SGD in bf16 on the CPU did that).
    assert len(differing(start, baseline)) == len(start)
    assert all(float(norm) > 1.0 for norm in norms), "the clip must be active"

    _, sonar, scheduled, sonar_norms = run(model_name, dtype, "sonar", optimizer)
    assert differing(baseline, sonar) == []
    assert [float(n) for n in norms] == [float(n) for n in sonar_norms]
    assert scheduled.last_clip.scope == "non_expert"

    _, per_expert, ablation, _ = run(model_name, dtype, "sonar_per_expert", optimizer)
    assert differing(sonar, per_expert) == []

    _, no_clip, _, _ = run(model_name, dtype, "standard_no_clip", optimizer)
    _, everything, in_backward, _ = run(model_name, dtype, "optimizer_in_backward", optimizer)
    assert differing(no_clip, everything) == []

    _, global_clip, standard, _ = run(model_name, dtype, "standard_global_clip", optimizer)
    assert differing(global_clip, baseline), "clipping the experts must change something"
    assert differing(no_clip, baseline), "clipping the rest must change something"

    tensors, experts = 2 * LAYERS, EXPERTS[model_name]
    assert scheduled.hook_firings == STEPS * tensors
    assert scheduled.optimizer_calls == STEPS * (tensors + 1)
    assert ablation.hook_firings == STEPS * tensors
    assert ablation.optimizer_calls == STEPS * (tensors * experts + 1)
    assert in_backward.optimizer_calls == in_backward.hook_firings == STEPS * len(start)
    assert (standard.optimizer_calls, standard.hook_firings) == (STEPS, 0)


def test_bitwise_on_two_threads_too():
    torch.set_num_threads(2)
    _, baseline, _, _ = run("olmoe", torch.float32, "standard_no_expert_clip", "adamw")
    _, sonar, _, _ = run("olmoe", torch.float32, "sonar", "adamw")
    assert differing(baseline, sonar) == []


@pytest.mark.parametrize("clip", ["all", "none"])
def test_standard_methods_are_plain_pytorch(clip):
    """An independent loop: one fused torch.optim.AdamW, clip_grad_norm_ over everything, LambdaLR."""
    method = {"all": "standard_global_clip", "none": "standard_no_clip"}[clip]
    _, ours, _, norms = run("olmoe", torch.bfloat16, method, "adamw")
    model = tiny_model("olmoe", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER["adamw"])
    scheduler = warm_up(optimizer)
    reference_norms = []
    for batch in batches(STEPS):
        optimizer.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        if clip == "all":
            reference_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        scheduler.step()
    assert differing(ours, weights(model)) == []
    assert norms == (reference_norms if clip == "all" else [None] * STEPS)


def test_no_expert_clip_is_clip_grad_norm_over_the_rest():
    _, ours, _, norms = run("granite", torch.float32, "standard_no_expert_clip", "adamw")
    model = tiny_model("granite", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER["adamw"])
    scheduler = warm_up(optimizer)
    rest = [p for name, p in model.named_parameters() if p.ndim != 3]  # in this model the experts are the 3-D ones
    for k, batch in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        assert torch.equal(torch.nn.utils.clip_grad_norm_(rest, 1.0), norms[k])
        optimizer.step()
        scheduler.step()
    assert differing(ours, weights(model)) == []


@pytest.mark.parametrize("backend", ["eager", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sonar_equals_standard_with_checkpointing_and_dropout(dtype, backend):
    results = []
    for method in ("standard_no_expert_clip", "sonar"):
        model = tiny_model("olmoe", dtype, backend, attention_dropout=0.1)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        scheduled = build(model, method)
        torch.manual_seed(5)
        train(model, scheduled, batches(3), warm_up(scheduled))
        results.append(weights(model))
    assert differing(*results) == []


def test_mixed_dtypes_in_one_model():
    """27 of 59 families keep some non-expert parameters in fp32 inside a bf16 model."""
    results = []
    for method in ("standard_no_expert_clip", "sonar"):
        model = tiny_model("olmoe", torch.bfloat16)
        model.model.norm.float()  # cast back in forward by torch's type promotion; lm_head must then be fp32 too
        model.lm_head.float()
        scheduled = build(model, method)
        train(model, scheduled, batches(3), warm_up(scheduled))
        results.append(weights(model))
    assert differing(*results) == []


def test_8bit_in_backward_is_the_standard_update():
    pytest.importorskip("bitsandbytes")
    for model_name in ("olmoe", "granite"):
        _, baseline, _, _ = run(model_name, torch.bfloat16, "standard_no_expert_clip", "adamw8bit")
        _, sonar, _, _ = run(model_name, torch.bfloat16, "sonar", "adamw8bit")
        assert differing(baseline, sonar) == []


@pytest.mark.parametrize("width, equal", [(64, True), (16, False)])
def test_8bit_per_expert_equals_batched_only_for_whole_blocks(width, equal):
    """Down slices of 64 x 64 = 4,096 elements are kept in 8 bits as the batched tensor is; 64 x 16 = 1,024 in fp32."""
    pytest.importorskip("bitsandbytes")
    shape = {"hidden_size": 64, "intermediate_size": width}
    _, sonar, _, _ = run("olmoe", torch.bfloat16, "sonar", "adamw8bit", 3, shape)
    _, per_expert, _, _ = run("olmoe", torch.bfloat16, "sonar_per_expert", "adamw8bit", 3, shape)
    assert (differing(sonar, per_expert) == []) is equal
