"""Our accounting against PyTorch's MemTracker to the byte, against sums worked out by hand, real against fake."""

import pytest
import tiny_runs as tiny
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from sonar_repro.forecast.fake_model import fake_environment
from sonar_repro.instruments.events import round_to_block
from sonar_repro.instruments.memory import CudaMeter, TrackerMeter
from sonar_repro.instruments.tracker import AllocationTracker

MIB = 1 << 20


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prepared(family, checkpointing, frozen):
    model = tiny.real_model(family)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if frozen:
        for parameter in [*model.model.layers[0].parameters(), *tiny.experts_of(model)[2:3]]:
            parameter.requires_grad_(False)
    return model


CASES = [
    ("olmoe", "sonar", False, 1),
    ("olmoe", "sonar", True, 2),
    ("olmoe", "standard_global_clip", False, 2),
    ("olmoe", "sonar_per_expert", False, 1),
    ("granitemoe", "sonar", False, 2),
    ("granitemoe", "standard_global_clip", True, 1),
    ("granitemoe", "optimizer_in_backward", False, 1),
]


# MemTracker reads ``optimizer.state`` after each step, for which per-expert states are joined: its own copies.
WITHOUT_PER_EXPERT = [case for case in CASES if case[1] != "sonar_per_expert"]


@pytest.mark.parametrize(("family", "method", "checkpointing", "accumulation"), WITHOUT_PER_EXPERT)
def test_peak_equals_memtracker_to_the_byte_on_a_real_run(family, method, checkpointing, accumulation):
    options = {"method": method, "accumulation": accumulation}
    model = prepared(family, checkpointing, frozen=False)
    reference = MemTracker()
    reference.track_external(model)
    with reference:
        tiny.run_steps(model, tiny.real_batch, before_backward=reference.reset_mod_stats, **options)
    expected = reference.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

    model = prepared(family, checkpointing, frozen=False)
    tracker = AllocationTracker(events=True)
    tracker.attach(model, tiny.experts_of(model))
    tracker.phase("measured")
    with tracker:
        tiny.run_steps(model, tiny.real_batch, **options)
    assert tracker.peaks["measured"].requested == expected


@pytest.mark.parametrize(("family", "method", "checkpointing", "accumulation"), CASES)
def test_a_fake_run_counts_what_the_real_run_counts(family, method, checkpointing, accumulation):
    options = {"method": method, "accumulation": accumulation}
    model = prepared(family, checkpointing, frozen=True)
    real = AllocationTracker()
    real.attach(model)
    real.phase("measured")
    with real:
        tiny.run_steps(model, tiny.real_batch, **options)

    fake = AllocationTracker()
    with fake_environment() as environment, fake:
        model = environment.build(tiny.config(family))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for parameter in [*model.model.layers[0].parameters(), *tiny.experts_of(model)[2:3]]:
            parameter.requires_grad_(False)
        fake.phase("measured")
        tiny.run_steps(model, lambda: environment.batch(2, 16), **options)
    # A real run asks for the mask's sum and whether positions are packed; both are freed before anything is large.
    assert fake.peaks["measured"].requested == real.peaks["measured"].requested
    assert fake.bytes_by_owner()["weights"] == 0  # nothing was attached: owners are optional


def owners_of_a_run(method, kind="adamw", steps=2, **build):
    tracker = AllocationTracker(events=True)
    with fake_environment() as environment, tracker:
        model = environment.build(tiny.config(**build))
        tracker.attach(model, tiny.experts_of(model))
        made = tiny.run_steps(model, lambda: environment.batch(2, 16), method=method, kind=kind, steps=steps)
        return tracker, model, made, tracker.bytes_by_owner()


def nbytes(parameters):
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def test_owners_after_a_standard_step_are_the_sums_of_their_tensors():
    _, model, made, owners = owners_of_a_run("standard_no_clip")
    parameters = list(model.parameters())
    assert owners["weights"] == nbytes([*parameters, *model.buffers()])
    # two moments in the parameter's dtype, and one fp32 step count a parameter
    assert owners["optimizer_state"] == 2 * nbytes(parameters) + 4 * len(parameters) == made.optimizer_state_bytes()
    assert owners["expert_gradients"] == nbytes(tiny.experts_of(model))
    assert owners["expert_gradients"] + owners["other_gradients"] == nbytes(parameters)


def test_gradients_freed_in_hooks_are_gone_and_never_exceed_one_layer():
    tracker, model, _, owners = owners_of_a_run("sonar")
    experts = tiny.experts_of(model)
    assert owners["expert_gradients"] == 0
    assert owners["other_gradients"] == nbytes(model.parameters()) - nbytes(experts)
    live = peak = 0
    log = tracker.log
    for event in log.events:
        block = abs(event) - 1
        if log.owners[block] == 2:
            live += log.sizes[block] if event > 0 else -log.sizes[block]
            peak = max(peak, live)
    one_layer = nbytes(experts) // 2
    assert one_layer // 2 <= peak <= one_layer


def test_eight_bit_states_are_two_bytes_a_parameter_and_two_block_maxima():
    _, model, made, owners = owners_of_a_run("sonar", kind="adamw8bit", hidden_size=128, intermediate_size=64)
    quantised = [p for p in model.parameters() if p.numel() >= 4096]
    plain = [p for p in model.parameters() if p.numel() < 4096]
    blocks = sum(-(-p.numel() // 256) for p in quantised)
    codes, maxima, small = 2 * sum(p.numel() for p in quantised), 2 * 4 * blocks, 2 * 4 * sum(p.numel() for p in plain)
    # the quantisation maps, 256 fp32 each, are shared by the tensors of one optimizer
    maps = 2 * 1024 * (len(tiny.experts_of(model)) + 1)
    assert owners["optimizer_state"] == codes + maxima + small + maps
    assert made.optimizer_state_bytes() >= codes + maxima + small


def test_views_and_in_place_operators_allocate_nothing():
    tracker = AllocationTracker()
    tracker.phase("measured")
    with tracker:
        base = torch.zeros(1000)
        kept = [base.view(10, 100), base[3:], base.t(), base.add_(1), base.expand(2, 1000)]
    assert len(kept) == 5 and tracker.live_requested == 4000 and tracker.live_allocated == 4096


def test_a_phase_starts_at_what_is_live_and_goes_on_when_named_again():
    tracker = AllocationTracker()
    with tracker:
        tracker.phase("load")
        kept = torch.empty(100 * 512, dtype=torch.uint8)
        torch.empty(50 * 512, dtype=torch.uint8)
        tracker.phase("warmup")
        tracker.phase("measured")
        torch.empty(7 * 512, dtype=torch.uint8)
        tracker.phase("load")
    assert kept.numel() and [tracker.peaks[name].requested // 512 for name in tracker.peaks] == [150, 100, 107]


def test_storage_that_is_resized_in_place_is_counted_anew():
    tracker = AllocationTracker(events=True)
    with tracker:
        tensor = torch.empty(1024, dtype=torch.uint8)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(4096)
        tensor.view(-1)
    assert tracker.live_requested == 4096
    assert list(tracker.log.events) == [1, -1, 2] and list(tracker.log.sizes) == [1024, 4096]


@pytest.mark.parametrize(("nbytes", "block"), [(0, 0), (1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_rounding_is_cuda_s(nbytes, block):
    assert round_to_block(nbytes) == block


def test_gradient_that_autograd_must_copy_is_still_a_gradient():
    tracker = AllocationTracker()
    parameter = torch.nn.Parameter(torch.zeros(256))
    module = torch.nn.ParameterList([parameter])
    with tracker:
        tracker.attach(module)
        made = torch.optim.SGD([parameter], lr=0.1)
        (2 * parameter.expand(4, 256)).sum().backward()
        keep = parameter.grad.view(-1)  # someone else holds the gradient: the next one is added to it
        parameter.sum().backward()
        made.step()
    assert keep is not None and tracker.bytes_by_owner()["other_gradients"] == 1024


def test_meters_share_one_interface_and_say_what_they_do_not_know():
    meter = TrackerMeter()
    with meter:
        meter.phase("load")
        kept = torch.empty(3000, dtype=torch.uint8)
        meter.phase("measured")
    block = meter.read()
    assert kept.numel() and block["source"] == "tracker"
    assert block["measured"] == {
        "peak_allocated_bytes": 3072,
        "peak_reserved_bytes": None,
        "peak_requested_bytes": 3000,
    }
    assert block["warmup"]["peak_allocated_bytes"] is None and block["warmup"]["reason"] == "phase did not run"
    assert "caching allocator" in block["reserved_reason"]
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="no CUDA device"):
            CudaMeter()


def test_observers_see_every_operator_with_its_region():
    seen = []
    tracker = AllocationTracker(observers=[lambda func, args, kwargs, result, region: seen.append((func, region))])
    weight = torch.nn.Parameter(torch.ones(4, 4))
    made = torch.optim.SGD([weight], lr=0.1)
    with tracker:
        tracker.step(1)
        (weight @ weight).sum().backward()
        made.step()
    assert len(seen) == tracker.operators
    assert {region for func, region in seen if func is torch.ops.aten.mm.default} == {1, 2}
    assert {region for func, region in seen if func.name() == "aten::add_.Tensor"} == {3}
