"""Paper scale before it loads anything: the card by forecast, bad input in one line, and nothing needed but a GPU."""

import dataclasses
import socket

import fake_cuda
import pytest
from composing import composed, run_main

from sonar_repro.config.identity import fingerprint
from sonar_repro.config.schema import from_dict
from sonar_repro.errors import UserError
from sonar_repro.harness import checks, plan, runner, worker
from sonar_repro.harness import memory_check as headroom

GB = 1_000_000_000
CARD = "560.35.03, 450.00, 1200, 1980, 41, 517\n"


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
    checks.check(forecast)
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
    arm.parallel.name, arm.parallel.processes = "ddp", 2
    buckets = headroom.forecast_peak(arm, 9) - peak  # DDP's, which hold a gradient for good, from the first step on
    assert 0 <= buckets <= 2 * parameters + 50_000_000
    arm.parallel.name = "fsdp2"
    assert headroom.forecast_peak(arm, 9) < peak


# -- paper scale needs only a GPU ------------------------------------------------------------------------------------


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
    from sonar_repro.training.train import Training

    arm = Training(paper("model=granite"), worker.Reporter(None, tmp_path))
    arm.load_data()
    assert len(arm.corpus.train) + sum(arm.corpus.counts["train"]["dropped"].values()) == 8000
    assert len(arm.corpus.heldout) + sum(arm.corpus.counts["heldout"]["dropped"].values()) == 500
    assert max(len(example.input_ids) for example in arm.corpus.train) <= 256
    assert arm.shape().vocab_size >= arm.corpus.vocab_size
