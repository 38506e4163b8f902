"""Kernel time by kind: the classification by hand-computed traces, and real CPU profiles against clocks of our own."""

import time
from contextlib import nullcontext

import pytest
import torch

from sonar_repro.instruments.kernels import (
    KINDS,
    STEP,
    breakdown,
    flatten,
    kernel_work,
    operator_work,
    profile_steps,
    read_trace,
    time_by_kind,
)
from sonar_repro.methods import Schedule, ScheduledOptimizer
from sonar_repro.methods.ranges import CLIP, OPTIMIZER, named_range

MAIN, BACKWARD = 100, 101  # threads


def event(category, name, start, end, tid=MAIN, **arguments):
    given = {key.replace("_", " "): value for key, value in arguments.items()}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": tid, "args": given}


def note(name, start, end, tid=MAIN):
    return event("user_annotation", name, start, end, tid)


def kernel(start, end, correlation=None, name="gemm", category="kernel", stream=7):
    return event(category, name, start, end, stream, correlation=correlation, stream=stream)


def launch(correlation, at, tid=MAIN, category="cuda_runtime", **arguments):
    return event(category, "cudaLaunchKernel", at, at + 1, tid, correlation=correlation, **arguments)


def two_steps():
    """Two steps of 100 µs; kernels overlap on three streams; optimizer work is launched from the backward thread."""
    return [
        note(STEP, 0, 100),
        note(STEP, 200, 300),
        note(OPTIMIZER, 10, 20, BACKWARD),
        note(CLIP, 40, 46),
        note(OPTIMIZER, 201, 215),
        event("cpu_op", "aten::mm", 4, 8),
        event("cpu_op", "aten::mm", 4, 8, BACKWARD),
        launch(1, 5),
        kernel(10, 30, 1),
        launch(2, 12, BACKWARD, category="cuda_driver"),
        kernel(20, 40, 2, stream=8),
        launch(3, 12),  # the same time as an optimizer range, but on another thread
        kernel(24, 28, 3, stream=9),
        launch(4, 41),
        kernel(50, 60, 4),
        launch(5, 47),  # after the clipping range has ended
        kernel(55, 65, 5, name="Memcpy HtoD", category="gpu_memcpy"),
        launch(6, 205),
        kernel(210, 230, 6, name="Memset", category="gpu_memset"),
        launch(7, 150),
        kernel(150, 160, 7),  # between the steps
        event("gpu_user_annotation", OPTIMIZER, 0, 300, 7),
        event("ac2g", "ac2g", 0, 300),
        {"ph": "M", "name": "process_name", "args": {}},
    ]


def test_busy_idle_and_kinds_of_two_steps_by_hand():
    """Step 1: union 10-40 and 50-65; 20-30 is shared by two kinds, 55-60 too. Step 2: 210-230."""
    got = breakdown(two_steps(), "cuda")
    assert got["steps"] == 2 and got["source"] == "profiler (CUDA kernels)"
    by_hand = {
        "forward_backward_ms": 10 + 5 + 2.5 + 5,
        "optimizer_ms": 5 + 10 + 20,
        "clipping_ms": 5 + 2.5,
        "busy_ms": 30 + 15 + 20,
        "idle_ms": 200 - 65,
        "step_ms": 200,
    }
    assert {name: got[name] for name in by_hand} == pytest.approx({k: v / 1e3 / 2 for k, v in by_hand.items()})


def test_kinds_that_run_at_once_share_the_time_whatever_the_number_of_kernels():
    fwd, clip, opt = KINDS
    three_kinds = [(0, 9, fwd), (0, 9, fwd), (3, 9, clip), (6, 12, opt)]
    assert time_by_kind(three_kinds, [(0, 20)]) == pytest.approx({fwd: 3 + 1.5 + 1, clip: 1.5 + 1, opt: 1 + 3})
    assert time_by_kind([(0, 10, fwd), (5, 15, clip)], [(2, 4), (8, 30)]) == {fwd: 2 + 1, clip: 1 + 5, opt: 0}
    assert sum(time_by_kind([(0, 5, fwd), (5, 5, opt), (7, 8, fwd)], [(0, 10)]).values()) == 6


def test_the_innermost_range_names_the_work():
    assert flatten([(0, 100, "optimizer"), (10, 20, "clipping"), (12, 14, "optimizer"), (150, 160, "clipping")]) == [
        (0, 10, "optimizer"),
        (10, 12, "clipping"),
        (12, 14, "optimizer"),
        (14, 20, "clipping"),
        (20, 100, "optimizer"),
        (150, 160, "clipping"),
    ]
    ranges = [note(OPTIMIZER, 0, 100), note(CLIP, 10, 20)]
    work = kernel_work(read_trace([*ranges, launch(1, 15), kernel(90, 95, 1), launch(2, 30), kernel(96, 99, 2)]))
    assert work == [(90, 95, "clipping"), (96, 99, "optimizer")]


def test_a_kernel_without_its_launch_goes_by_its_name_and_a_strange_thread_by_its_operator():
    adam = "void multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<BFloat16, 4>, float>"
    norm = "void multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<BFloat16, NormType::L2>>"
    trace = [
        note(OPTIMIZER, 10, 20, BACKWARD),
        event("cpu_op", "aten::_fused_adamw_", 12, 15, BACKWARD, External_id=77),
        kernel(1, 2, name=adam),
        kernel(2, 3, name=norm),
        kernel(3, 4, name="nvjet_gemm"),
        launch(9, 13, tid=555, External_id=77),
        kernel(4, 5, 9),
        launch(8, 13, tid=556, External_id=78),
        kernel(5, 6, 8, name=adam),  # launched outside every range that is known: its launch decides
    ]
    kinds = [kind for _, _, kind in kernel_work(read_trace(trace))]
    assert kinds == ["optimizer", "clipping", "forward_backward", "optimizer", "forward_backward"]


def test_cpu_operators_are_cut_at_the_ranges_of_their_thread():
    trace = [
        note(STEP, 0, 100),
        note(CLIP, 20, 40),
        note(OPTIMIZER, 0, 100, BACKWARD),
        event("cpu_op", "autograd::engine::evaluate_function: AccumulateGrad", 0, 100),  # encloses hooks: no operator
        event("cpu_op", "torch::autograd::AccumulateGrad", 0, 100),
        event("cpu_op", "SumBackward0", 10, 30),  # its self time is cut at 20
        event("cpu_op", "aten::expand", 12, 18),
        event("cpu_op", "aten::norm", 35, 50),
        event("cpu_op", "aten::add_", 45, 55, BACKWARD),
    ]
    assert sorted(operator_work(read_trace(trace))) == [
        (10, 20, "forward_backward"),
        (20, 30, "clipping"),
        (35, 40, "clipping"),
        (40, 50, "forward_backward"),
        (45, 55, "optimizer"),
    ]
    got = breakdown(trace, "cpu")
    assert got["source"] == "profiler (cpu operators)"
    assert got["forward_backward_ms"] == pytest.approx(0.0175)  # 10 + 5 alone, 5 shared with the other thread
    assert got["optimizer_ms"] == pytest.approx(0.0075)
    assert got["busy_ms"] == pytest.approx(0.040) and got["idle_ms"] == pytest.approx(0.060)


@pytest.mark.parametrize(
    ("trace", "why"), [([], "no step"), ([note(STEP, 0, 9), event("cpu_op", "aten::mm", 1, 2)], "no CUDA kernel")]
)
def test_what_was_not_seen_is_null_with_a_reason_and_never_zero(trace, why):
    got = breakdown(trace, "cuda")
    assert all(got[f"{name}_ms"] is None for name in (*KINDS, "busy", "idle", "step"))
    assert why in got["reason"]


def test_ranges_cost_nothing_without_a_profiler():
    assert isinstance(named_range(CLIP), nullcontext)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not isinstance(named_range(CLIP), nullcontext)
    assert isinstance(named_range(OPTIMIZER), nullcontext)


# ---- real profiles on a CPU ----------------------------------------------------------------------------------------


class Timed(torch.optim.SGD):
    """Its step is one matrix product that takes milliseconds, and it keeps the time by its own clock."""

    seconds = 0.0
    left = torch.randn(700, 700)

    @torch.no_grad()
    def step(self, closure=None):
        start = time.perf_counter()
        torch.mm(self.left, self.left)
        Timed.seconds += time.perf_counter() - start


def tiny_moe():
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model("olmoe", **sizes, pad_token_id=0, eos_token_id=1)
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager").train()


def profiled(method, steps=3):
    """Breakdown of ``steps`` steps, the clock's seconds a step inside the optimizer, and the wall seconds of each."""
    torch.set_num_threads(1)
    model = tiny_moe()
    schedule = Schedule.named(method)
    timed = lambda named, _: Timed([p for _, p in named], lr=0.1)  # noqa: E731
    optimizer = ScheduledOptimizer(model, timed, schedule, on_nonfinite="off")
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    clocks = []

    def step(_):
        before, start = Timed.seconds, time.perf_counter()
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        clocks.append((Timed.seconds - before, time.perf_counter() - start))

    got = profile_steps(step, range(1 + steps), torch.device("cpu"))
    inside, wall = (sum(values) / steps for values in zip(*clocks[1:]))
    return got, inside, wall


@pytest.mark.parametrize("method", ["standard_global_clip", "sonar", "sonar_per_expert", "optimizer_in_backward"])
def test_a_real_step_adds_up_and_the_optimizer_is_found_wherever_it_runs(method):
    got, inside, wall = profiled(method)
    assert got["steps"] == 3
    parts = got["forward_backward_ms"] + got["clipping_ms"] + got["optimizer_ms"]
    assert got["busy_ms"] == pytest.approx(parts, rel=1e-9)
    assert got["step_ms"] == pytest.approx(got["busy_ms"] + got["idle_ms"], rel=1e-9)
    assert wall * 1e3 <= got["step_ms"] <= 1.5 * wall * 1e3 + 20  # a busy machine may add time at the range's ends
    assert got["optimizer_ms"] == pytest.approx(inside * 1e3, rel=0.2, abs=1)
    assert got["forward_backward_ms"] > 0 and got["idle_ms"] > 0
    assert (got["clipping_ms"] == 0) == (method == "optimizer_in_backward")


def test_too_few_steps_to_profile_is_a_reason():
    assert "no step" in profile_steps(lambda item: None, [1], torch.device("cpu"))["reason"]
