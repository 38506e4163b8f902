"""Everything GPU-only, through its contract: meters, caps, out-of-memory, the card's facts, forecast before loading."""

import dataclasses
import os
import random
import socket

import fake_cuda
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from sonar_repro import child, headroom, machine, plan, runner
from sonar_repro import config as configs
from sonar_repro.__main__ import main
from sonar_repro.config import Config, fingerprint, from_dict
from sonar_repro.errors import Unsupported, UserError
from sonar_repro.instruments.memory import CudaHistory, CudaMeter
from sonar_repro.instruments.timer import StepTimer
from sonar_repro.tasks import setup

GB = 1_000_000_000
CUDA = torch.device("cuda")


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.Cuda().install(monkeypatch)


@pytest.fixture
def driver(monkeypatch):
    """Install a fake CUDA driver; everything cached about the machine is forgotten before and after."""

    def forget():
        for function in (machine._driver, machine.cuda_device_count, machine.first_card):
            function.cache_clear()

    def install(fake):
        forget()
        monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: fake)
        return fake

    yield install
    monkeypatch.undo()
    forget()


def composed(*overrides):
    GlobalHydra.instance().clear()
    configs.register()
    with initialize_config_dir(str(configs.conf_dir()), version_base="1.3"):
        return configs.resolve(compose("config", overrides=list(overrides)))


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
    assert child.classify(error) == status


@pytest.mark.parametrize(("step", "phase"), [(1, "warmup, step 1"), (2, "warmup, step 2"), (4, "measured, step 4")])
def test_an_out_of_memory_is_told_with_its_phase_and_step(tiny_arm, monkeypatch, step, phase):
    from sonar_repro.tasks import train

    config, report = tiny_arm("steps=5", "warmup_steps=1", "window_start=3")
    original, count = train.training_step, [0]

    def fails(*args, **kwargs):
        count[0] += 1
        if count[0] == 2 + step:  # two steps measure memory first
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(*args, **kwargs)

    monkeypatch.setattr(train, "training_step", fails)
    status, error, sections = child.execute(config, report)
    assert (status, error["phase"]) == ("oom", phase)
    assert sections["environment"]["parity"]["compared"] and "time" not in sections


@pytest.fixture
def tiny_arm(tmp_path):
    def make(*overrides):
        small = ["num_hidden_layers=1", "hidden_size=32", "intermediate_size=16"]
        data = ["data.train_examples=8", "data.heldout_count=2", "threads=1"]
        config = composed(*[f"model.smoke.{s}" for s in small], *data, *overrides)
        return config, child.Reporter(None, tmp_path)

    return make


class Meter:
    """A meter that keeps the order of what it was told."""

    def __init__(self, log):
        self.log = log

    def phase(self, name):
        self.log.append(name)

    def read(self):
        return {"source": "cuda", "measured": {"peak_allocated_bytes": 7}}


def test_phases_start_at_their_steps_and_the_history_ends_before_the_window(tiny_arm, monkeypatch, cuda):
    from sonar_repro.tasks.train import Training

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
    from sonar_repro.tasks.train import Training

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


# -- the forecast before loading -------------------------------------------------------------------------------------


def paper(*overrides):
    fixed = ["scale=paper", "model.weights=random", "data=embedded_instructions", "checkpoint_every=0"]
    return composed(*fixed, *overrides)


METHODS = ("sonar", "standard_global_clip", "optimizer_in_backward", "standard_no_expert_clip")


@pytest.fixture
def card(driver, monkeypatch, tmp_path):
    """A card of so many bytes, with so many MiB in use by others, and forecasts as given by method."""

    def make(total, forecasts, used=0):
        driver(fake_cuda.Driver(total=total))
        fake_cuda.nvidia_smi(tmp_path / "bin", monkeypatch, CARD.replace("517", str(used)))
        asked = []

        def peak(arm, capability):
            asked.append(arm.method.name)
            assert capability == 9
            return forecasts[arm.method.name] if isinstance(forecasts, dict) else forecasts

        monkeypatch.setattr(headroom, "forecast_peak", peak)
        return asked

    return make


def run_preflight(tmp_path, *overrides, methods=METHODS):
    plan.preflight([paper(f"method={m}", f"runs_dir={tmp_path / 'runs'}", *overrides) for m in methods])


def test_where_the_standard_schedule_fits_one_forecast_answers_for_its_kin(card, tmp_path, capsys):
    asked = card(97 * GB, 57 * GB)
    run_preflight(tmp_path)
    assert asked == ["standard_global_clip"]
    assert "fits: 58.0 GB by forecast, 97.0 GB free" in capsys.readouterr().err


def test_arms_that_do_not_fit_are_refused_by_name_with_the_forecast(card, tmp_path):
    small = {"standard_global_clip": 57 * GB, "standard_no_expert_clip": 56 * GB}
    asked = card(48 * GB, {**small, "sonar": 44 * GB, "optimizer_in_backward": 43 * GB})
    with pytest.raises(UserError) as caught:
        run_preflight(tmp_path)
    text = str(caught.value)
    assert "\n" not in text and "Fake GPU: 48.0 GB of 48.0 are free" in text and "force_memory=true" in text
    assert "standard_global_clip-adamw-bs2-s42 needs 58.0 GB" in text and "clip-adamw-bs2-s42 needs 57.0 GB" in text
    assert "sonar" not in text.replace("sonar_repro", "") and "optimizer_in_backward" not in text
    assert sorted(asked) == sorted(METHODS)


def test_force_memory_warns_and_goes_on(card, tmp_path, capsys):
    card(48 * GB, 57 * GB)
    run_preflight(tmp_path, "force_memory=true")
    warning = capsys.readouterr().err
    assert warning.startswith("warning: Fake GPU: 48.0 GB") and "needs 58.0 GB" in warning


def test_what_others_hold_is_not_free_and_is_told(card, tmp_path, capsys):
    card(97 * GB, 57 * GB, used=40_000)
    with pytest.raises(UserError, match="55.1 GB of 97.0 are free"):
        run_preflight(tmp_path, methods=("sonar",))
    assert "warning: the GPU is shared: 41.9 GB are in use" in capsys.readouterr().err


def test_an_arm_without_a_forecast_is_warned_of_and_runs(card, tmp_path, capsys):
    card(48 * GB, "backend=eager: loops over the experts")
    run_preflight(tmp_path, methods=("sonar",))
    assert "warning: no memory forecast for olmoe-" in capsys.readouterr().err


def test_tiny_arms_are_not_forecast_but_a_shared_card_is_told(card, tmp_path, capsys):
    asked = card(8 * GB, 57 * GB, used=6_000)
    for device in ("cuda", "auto"):
        plan.preflight([composed(f"scale.device={device}", f"runs_dir={tmp_path}")])
        assert "warning: the GPU is shared: 6.3 GB" in capsys.readouterr().err
    assert asked == []


def test_caps_do_not_make_a_card_smaller(card, tmp_path):
    """Table 6 runs into its caps on purpose: the refusal is about the card."""
    card(97 * GB, 57 * GB)
    run_preflight(tmp_path, "memory_cap_gb=30.5")


def test_a_forecast_arm_is_the_same_arm_on_fake_tensors(tmp_path):
    arm = paper("method=sonar", "batch_size=4", "optimizer=adamw8bit", "memory_cap_gb=46", "data.max_length=128")
    forecast = headroom.forecast_config(arm, 9)
    configs.check(forecast)
    assert forecast.scale.name == "forecast" and forecast.scale.device == "fake" and forecast.memory_cap_gb is None
    assert (forecast.batch_size, forecast.data.max_length, forecast.gpu.compute_capability) == (4, 128, 9)
    assert forecast.method == arm.method and forecast.optimizer == arm.optimizer and forecast.model == arm.model
    assert fingerprint(from_dict(dataclasses.asdict(forecast))) == fingerprint(forecast)


def test_a_real_forecast_of_a_small_model_is_its_peak():
    """End to end through a process of its own: more than the weights, gradients and moments of a tiny OLMoE."""
    sizes = dict(num_hidden_layers=2, hidden_size=128, intermediate_size=64, num_experts=8, vocab_size=2048)
    arm = paper(
        "backend=grouped_mm", "method=standard_global_clip", *[f"model.architecture.{k}={v}" for k, v in sizes.items()]
    )
    peak = headroom.forecast_peak(arm, 9)
    parameters = 2 * 2048 * 128 + 2 * (8 * 3 * 64 * 128 + 4 * 128 * 128)
    assert isinstance(peak, int) and 8 * parameters < peak < 8 * parameters + 400_000_000
    arm.parallel.name = "ddp"
    assert headroom.forecast_peak(arm, 9) == "parallel=ddp is not forecast"


# -- paper scale needs only a GPU ------------------------------------------------------------------------------------


def run_main(capsys, *argv):
    GlobalHydra.instance().clear()
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_without_a_gpu_paper_scale_is_one_line(capsys, tmp_path):
    code, out, err = run_main(capsys, "+experiment=table1", "scale=paper", f"runs_dir={tmp_path}")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "needs a CUDA GPU and none is visible; use scale=smoke" in err and "scale=forecast" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["model.weights=pretrained", "model.path=/nowhere"], "model.path=/nowhere: no such folder; give a checkpoint"),
        (["model.weights=pretrained"], "config.json of allenai/OLMoE-1B-7B-0924 at revision 6d84c48581ec is not in"),
        (
            ["task=fetch", "model=granite"],
            "config.json of ibm-granite/granite-3.1-3b-a800m-base at revision d4dd87aa3a6c",
        ),
        (["backend=scatermoe"], "did you mean scattermoe"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "cache"), raising=False)
    code, out, err = run_main(capsys, *argv, f"runs_dir={tmp_path}")
    assert code == 2 and out == "" and err.count("\n") == 1 and words in err


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_table1_at_paper_scale_with_random_weights_needs_only_a_gpu(no_network, card, capsys, tmp_path, monkeypatch):
    """Composes, passes every check, and would start each arm: 16 of them, in fresh processes, with no download."""
    card(97 * GB, 57 * GB)
    started = []
    monkeypatch.setattr(runner, "_run_child", lambda arm, progress: started.append(arm) or ("ok", None, {"notes": []}))
    argv = ["+experiment=table1", "scale=paper", "model.weights=random", "data=embedded_instructions"]
    code, _, err = run_main(capsys, *argv, "checkpoint_every=0", f"runs_dir={tmp_path}")
    assert code == 0, err
    assert len(started) == 16
    assert {arm.config.backend.name for arm in started} == {"sonicmoe", "scattermoe"}
    assert {(a.config.scale.device, a.config.model.weights, a.config.data.source) for a in started} == {
        ("cuda", "random", "embedded")
    }
    assert {(a.config.steps, a.config.window_start, a.config.data.train_examples) for a in started} == {
        (2000, 201, 8000)
    }


def test_its_data_is_made_here(no_network, tmp_path):
    """8,000 training and 500 held-out examples of at most 256 tokens, from the package alone."""
    from sonar_repro.tasks.train import Training

    arm = Training(paper("model=granite"), child.Reporter(None, tmp_path))
    arm.load_data()
    assert len(arm.corpus.train) + sum(arm.corpus.counts["train"]["dropped"].values()) == 8000
    assert len(arm.corpus.heldout) + sum(arm.corpus.counts["heldout"]["dropped"].values()) == 500
    assert max(len(example.input_ids) for example in arm.corpus.train) <= 256
    assert arm.shape().vocab_size >= arm.corpus.vocab_size
