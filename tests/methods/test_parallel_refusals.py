"""What data parallel cannot honour is refused in one line; one process on torch's fake group is enough for that."""

from __future__ import annotations

import pytest
import torch
from tiny_moe import batches, build, tiny_model, train
from torch.nn.parallel import DistributedDataParallel

from sonar_repro import Schedule, ScheduledOptimizer, data_parallel, make_factory
from sonar_repro.errors import Unsupported, UserError
from sonar_repro.forecast.fake_group import fake_group, stand_in


@pytest.fixture
def group():
    with fake_group(2):
        yield


def refused(words: str, call, kind: type[Exception] = UserError) -> None:
    with pytest.raises(kind, match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_without_a_group_and_unknown_modes():
    refused("ddp: no process group; start with torchrun", lambda: data_parallel(tiny_model(), "ddp"))
    refused("'zero': choose one of ddp, fsdp2", lambda: data_parallel(tiny_model(), "zero"))
    refused(
        "method='sonr': unknown; did you mean sonar",
        lambda: _grouped(lambda: data_parallel(tiny_model(), "ddp", "sonr")),
    )


def _grouped(call):
    with fake_group(2):
        call()


def test_a_plain_ddp_would_average_after_the_update(group):
    wrapped = DistributedDataParallel(tiny_model(), init_sync=False)
    refused("down_proj|gate_up_proj.*updated inside backward.*data_parallel", lambda: build(wrapped, "sonar"))
    assert build(wrapped, "standard_no_expert_clip").hook_firings == 0


def test_wrapped_for_another_method_is_refused(group):
    wrapped = stand_in(data_parallel(tiny_model(), "ddp", "standard_no_clip", init_sync=False))
    refused("updated inside backward.*data_parallel", lambda: build(wrapped, "sonar"))
    left_out = data_parallel(tiny_model(), "ddp", "sonar", init_sync=False)
    for method in ("standard_no_expert_clip", "standard_global_clip"):
        refused("experts.*left out of DDP's reducer.*method of the optimizer", lambda m=method: build(left_out, m))
        refused("experts.*left out of DDP's reducer", lambda m=method: build(left_out.module, m))


@pytest.mark.parametrize("first", ["ddp", "fsdp2"])
def test_a_model_is_wrapped_once(group, first):
    model = tiny_model()
    wrapped = data_parallel(model, first)
    for again in (model, wrapped):
        refused("is data parallel already", lambda m=again: data_parallel(m, "ddp", "standard_no_clip"))


@pytest.mark.parametrize("clip", ["tensor", "lagged", "exact", "kept", "offloaded"])
def test_clips_that_need_whole_gradients(group, clip):
    model = data_parallel(tiny_model(), "fsdp2")
    schedule = Schedule("experts", "tensor", clip)
    factory = make_factory("adamw", lr=1e-3)
    refused(f"clip={clip}: not under FSDP2.*non_expert", lambda: ScheduledOptimizer(model, factory, schedule))


def test_folding_per_expert_hooks_8_bit_and_whole_matrices(group):
    model = data_parallel(tiny_model(), "fsdp2")
    fold = {"accumulation": 2, "accumulation_mode": "fold"}
    refused("accumulation_mode=fold: not under FSDP2", lambda: build(model, "sonar", **fold))
    refused("granularity=expert on the sharded", lambda: build(model, "sonar_per_expert"), Unsupported)
    quantised = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    factory = lambda named, _: quantised([p for _, p in named])  # noqa: E731
    refused("AdamW8bit: bitsandbytes cannot step the sharded", lambda: ScheduledOptimizer(model, factory, "sonar"))
    refused("fused=True: SGD.*sharded", lambda: _build_with(model, make_factory("sgd", lr=0.1, fused=True)))
    refused("sharded \\(DTensor\\): Sinkhorn", lambda: _build_with(model, make_factory("mesh_full", lr=0.1)))


def _build_with(model, factory):
    return ScheduledOptimizer(model, factory, "standard_no_clip")


def test_experts_that_share_a_group_with_what_is_kept(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = tiny_model(), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    refused("experts.*and.*are in one FSDP group.*fully_shard on the experts module", lambda: build(model, "sonar"))
    build(model, "standard_no_expert_clip")
    build(model, "optimizer_in_backward")  # everything in a group is freed


@pytest.mark.parametrize("hook", ["fp16_compress_hook", "powerSGD_hook", "FP16_COMPRESS"])
def test_compressing_communication_hooks_with_hidden_momentum(group, hook):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    wrapped = DistributedDataParallel(tiny_model(), init_sync=False)
    if hook == "FP16_COMPRESS":
        wrapped._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
    else:
        wrapped.register_comm_hook(None, getattr(default_hooks, hook, None) or getattr(powerSGD_hook, hook))
    hidden = _build_with(wrapped, make_factory("mesh_b", lr=1e-2))
    refused(f"communication hook {hook}.*mesh_full", hidden.prepare)
    for allowed in ("mesh_b_full", "adamw"):
        hidden.detach()  # one optimizer on a model at a time
        hidden = _build_with(wrapped, make_factory(allowed, lr=1e-2))
        hidden.prepare()


def test_the_plain_all_reduce_hook_goes_with_hidden_momentum(group):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = DistributedDataParallel(tiny_model(), init_sync=False)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    _build_with(wrapped, make_factory("mesh_b", lr=1e-2)).prepare()


def test_everything_in_backward_needs_no_reducer(group):
    model = tiny_model()
    assert data_parallel(model, "ddp", "optimizer_in_backward") is model
    optimizer = build(model, "optimizer_in_backward")
    train(model, optimizer, batches(1))  # the fake group's sum is this rank's own part
    assert optimizer.hook_firings == len(list(model.parameters()))
