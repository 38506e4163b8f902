"""Everything GPU-only, through its contract: meters, caps, out-of-memory, the card's facts in the record."""

import os
import random

import fake_cuda
import pytest
import torch
from composing import composed

from sonar_repro import machine
from sonar_repro.config.schema import Config
from sonar_repro.errors import Unsupported
from sonar_repro.harness import runner, worker
from sonar_repro.instruments.memory import CudaHistory, CudaMeter
from sonar_repro.instruments.timer import StepTimer
from sonar_repro.training import process as setup

GB = 1_000_000_000
CUDA = torch.device("cuda")


# -- meters and timer ------------------------------------------------------------------------------------------------


def test_peaks_are_by_phase_and_the_device_is_synchronised_before_each_reading(cuda):
    meter = CudaMeter(CUDA)
    meter.phase("load")
    cuda.allocate(10 * GB)
    meter.phase("warmup")  # ends load
    cuda.allocate(20 * GB)
    cuda.retries, cuda.ooms = 3, 1
    cuda.allocated -= 20 * GB
    meter.phase("measured")
    cuda.allocate(5 * GB)
    cuda.retries += 2
    block = meter.read()
    assert block["source"] == "cuda"
    assert [block[p]["peak_allocated_bytes"] for p in ("load", "warmup", "measured")] == [10 * GB, 30 * GB, 15 * GB]
    assert block["warmup"]["peak_requested_bytes"] == 30 * GB - 100
    assert [block[p]["allocation_retries"] for p in ("load", "warmup", "measured")] == [0, 3, 2]
    assert [block[p]["out_of_memory_errors"] for p in ("load", "warmup", "measured")] == [0, 1, 0]
    assert block["measured"]["peak_reserved_bytes"] == 30 * GB  # what warm-up reserved is still held
    assert cuda.log == ["reset", "synchronize", "reset", "synchronize", "reset", "synchronize"]
    cuda.allocate(1 * GB)
    assert meter.read()["measured"]["peak_allocated_bytes"] == 16 * GB  # reading does not end the phase


def test_a_device_that_was_never_used_has_no_statistics_yet(cuda):
    """torch: an empty dict and "did you call init?" before the first allocation; the meter is the first to touch it."""
    meter = CudaMeter(CUDA)
    meter.phase("load")
    block = meter.read()
    assert block["load"]["peak_allocated_bytes"] == 0 and block["load"]["allocation_retries"] == 0
    assert block["measured"] == {
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "reason": "phase did not run",
    }


def test_no_gpu_no_meter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="use the tracker .CPU. or scale=forecast"):
        CudaMeter(CUDA)


def test_steps_are_timed_between_two_synchronisations(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: log.append("synchronize"))
    timer = StepTimer(CUDA, clock=lambda: log.append("clock") or 0.0)
    with timer.step(1):
        log.append("step")
    assert log == ["synchronize", "clock", "step", "synchronize", "clock"]


def test_a_snapshot_covers_what_is_not_timed(monkeypatch, tmp_path, cuda):
    log = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled="all", max_entries=0: log.append(enabled))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: log.append(path))
    history = CudaHistory(tmp_path)
    assert history.save() == "memory_snapshot.pickle" and history.save() is None
    assert log == ["all", str(tmp_path / "memory_snapshot.pickle"), None]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="task.options.snapshot=true"):
        CudaHistory(tmp_path)


# -- caps ------------------------------------------------------------------------------------------------------------


def test_a_cap_is_never_a_byte_short():
    """The allocator takes int(share * total): that must be the cap, or one byte more, never less."""
    rng = random.Random(0)
    for _ in range(20_000):
        total = rng.randrange(8 * GB, 200 * GB)
        cap = rng.randrange(1 * GB, total)
        assert cap <= int(setup.memory_fraction(cap, total) * total) <= cap + 1
    assert setup.memory_fraction(24 * GB, 24 * GB) == setup.memory_fraction(25 * GB, 24 * GB) == 1.0


def test_the_cap_is_set_in_this_process_and_lifted_after_measuring(cuda):
    config = Config(memory_cap_gb=10.5)
    assert setup.set_memory_cap(config, CUDA) == "cuda"
    [(_, share)] = cuda.log
    assert int(share * cuda.total) in (10_500_000_000, 10_500_000_001)
    setup.lift_memory_cap("cuda", CUDA)
    assert cuda.log[-1] == ("fraction", 1.0)
    assert setup.set_memory_cap(Config(), CUDA) is None and len(cuda.log) == 2
    assert setup.set_memory_cap(config, torch.device("cpu")) == "tracker"
    setup.lift_memory_cap("tracker", torch.device("cpu"))
    assert len(cuda.log) == 2


@pytest.mark.parametrize("free", [24 * GB, 40 * GB])
def test_a_cap_that_the_card_cannot_give_is_not_measured(free, monkeypatch):
    """An out-of-memory under a cap of 46 GB on a card of 24, or on one that others use, would say nothing of 46 GB."""
    cuda = fake_cuda.Cuda(total=max(free, 24 * GB) + (0 if free == 24 * GB else 56 * GB), free=free).install(
        monkeypatch
    )
    with pytest.raises(Unsupported, match=f"memory_cap_gb=46: the card has {free / GB:.1f} GB free"):
        setup.set_memory_cap(Config(memory_cap_gb=46.0), CUDA)
    assert cuda.log == []


# -- out of memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "oom"),
        (torch.AcceleratorError("CUDA error: out of memory\nlines"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (MemoryError(), "oom"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "failed"),
        (RuntimeError("CUDA error: device-side assert triggered"), "failed"),
        (ValueError("CUDA error: out of memory is a phrase here"), "failed"),
        (Unsupported("needs a GPU"), "unsupported"),
    ],
)
def test_what_counts_as_out_of_memory(error, status):
    assert worker.classify(error) == status


@pytest.mark.parametrize(("step", "phase"), [(1, "warmup, step 1"), (2, "warmup, step 2"), (4, "measured, step 4")])
def test_an_out_of_memory_is_told_with_its_phase_and_step(tiny_arm, monkeypatch, step, phase):
    from sonar_repro.training import train

    config, report = tiny_arm("steps=5", "warmup_steps=1", "window_start=3")
    original, count = train.training_step, [0]

    def fails(*args, **kwargs):
        count[0] += 1
        if count[0] == 2 + step:  # two steps measure memory first
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(*args, **kwargs)

    monkeypatch.setattr(train, "training_step", fails)
    status, error, sections = worker.execute(config, report)
    assert (status, error["phase"]) == ("oom", phase)
    assert sections["environment"]["parity"]["compared"] and "time" not in sections


@pytest.fixture
def tiny_arm(tmp_path):
    def make(*overrides):
        small = ["num_hidden_layers=1", "hidden_size=32", "intermediate_size=16"]
        data = ["data.train_examples=8", "data.heldout_count=2", "threads=1"]
        config = composed(*[f"model.smoke.{s}" for s in small], *data, *overrides)
        return config, worker.Reporter(None, tmp_path)

    return make


class Meter:
    """A meter that keeps the order of what it was told."""

    def __init__(self, log):
        self.log = log

    def phase(self, name):
        self.log.append(name)

    def read(self):
        return {"source": "cuda", "measured": {"peak_allocated_bytes": 7}}


def test_phases_start_at_their_steps_and_the_history_ends_before_the_window(tiny_arm, monkeypatch):
    from sonar_repro.training.train import Training

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 0)
    config, report = tiny_arm("steps=4", "warmup_steps=1", "window_start=3", "scale.device=cpu")
    arm = Training(config, report)
    arm.prepare()
    arm.load_data()
    arm.build()
    log = []
    arm.history = type("History", (), {"save": lambda self: log.append("snapshot") or "file"})()
    arm.one_step = lambda step, batches, one=arm.one_step: (log.append(step), one(step, batches))
    arm.train(Meter(log))
    assert log == ["warmup", 1, 2, "snapshot", "measured", 3, 4]
    assert report.sections["memory_snapshot"] == "file"


def test_a_fault_keeps_the_memory_counted_so_far(tiny_arm):
    from sonar_repro.training.train import Training

    config, report = tiny_arm()
    arm = Training(config, report)
    arm.record_unfinished(Meter([]))
    assert report.sections["memory"]["measured"]["peak_allocated_bytes"] == 7
    assert report.sections["memory"]["reason"] == "the run ended before its last step"
    broken = Meter([])
    broken.read = lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: an illegal memory access"))
    arm.record_unfinished(broken)  # the first error stays the one that is told


def test_processes_are_fresh_on_cuda_and_forked_elsewhere(driver):
    config = Config()
    config.scale.device = "cuda"
    assert runner._context(config).get_start_method() == "spawn"
    config.scale.device = "fake"
    assert runner._context(config).get_start_method() == "forkserver"
    config.scale.device = "auto"
    driver(fake_cuda.Driver(devices=1))
    assert runner._context(config).get_start_method() == "spawn"
    driver(fake_cuda.Driver(devices=0))
    assert runner._context(config).get_start_method() == "forkserver"


# -- the card's facts ------------------------------------------------------------------------------------------------


def test_the_driver_names_the_card_that_this_process_sees(driver):
    driver(fake_cuda.Driver(devices=2, total=97 * GB, capability=(12, 0)))
    assert machine.cuda_device_count() == 2
    assert machine.first_card() == machine.Card("Fake GPU", fake_cuda.UUID, 97 * GB, (12, 0))


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceTotalMem_v2"])
def test_a_driver_that_fails_is_no_card(driver, call):
    driver(fake_cuda.Driver(fail=call))
    assert machine.first_card() is None


CARD = "560.35.03, 450.00, 1200, 1980, 41, 517\n"


def test_facts_are_of_that_card_and_others_on_it_are_told(driver, tmp_path, monkeypatch):
    driver(fake_cuda.Driver())
    apps = f"{os.getpid()}, 900\n4242, 31000\n777, [N/A]\n"
    log = fake_cuda.nvidia_smi(tmp_path / "bin", monkeypatch, CARD.replace("517", "32000"), apps)
    facts = machine.gpu_facts()
    assert facts == {
        "driver": "560.35.03",
        "power_limit_w": 450.0,
        "clock_mhz": 1200.0,
        "clock_max_mhz": 1980.0,
        "temperature_c": 41.0,
        "used_before_mib": 32000.0,
        "other_processes": [{"pid": 4242, "used_mib": 31000.0}, {"pid": 777, "used_mib": None}],
    }
    assert all(f"-i {fake_cuda.UUID}" in line for line in log.read_text().splitlines())
    told = machine.shared_card(facts)
    assert "33.6 GB are in use" in told and "4242, 777" in told  # 32,000 MiB in units of 1e9 bytes


def test_a_card_of_ones_own_and_values_that_are_not_there(driver, tmp_path, monkeypatch):
    driver(fake_cuda.Driver())
    fake_cuda.nvidia_smi(tmp_path / "bin", monkeypatch, "560.35.03, [N/A], [N/A], 1980, 41, 517\n")
    facts = machine.gpu_facts()
    assert facts["power_limit_w"] is None and facts["other_processes"] == []
    assert machine.shared_card(facts) is None
    assert "not shown to us" in machine.shared_card({**facts, "used_before_mib": 9000.0})


def test_without_nvidia_smi_there_are_no_facts_and_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpu_facts("GPU-x") == {} and machine.shared_card({}) is None
    fake_cuda.nvidia_smi(tmp_path / "bin", monkeypatch, "", code=9)
    assert machine.gpu_facts("GPU-x") == {}


def test_the_record_holds_gpu_driver_clocks_and_kernel_versions(cuda, monkeypatch):
    monkeypatch.setattr(setup, "kernel_versions", lambda name: {"kernels": "0.18.2"})
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    card = {"driver": "560.35.03", "power_limit_w": 450.0, "clock_mhz": 1200.0, "other_processes": []}
    facts = setup.environment(Config(), "cuda", "sonicmoe", "sdpa", "AdamW", card)
    assert facts["device_name"] == "Fake GPU" and facts["capability"] == "9.0" and facts["driver"] == "560.35.03"
    assert facts["device_memory_bytes"] == 24 * GB and facts["kernels"] == {"kernels": "0.18.2"}
    assert facts["allocator_settings"] == "expandable_segments:True" and facts["power_limit_w"] == 450.0
