"""The step-time forecast end to end on tiny models: what is recorded, at which length, on which card and host."""

import dataclasses
import functools
import json

import pytest
import torch

from sonar_repro.config.schema import Config, conf_dir
from sonar_repro.errors import UserError
from sonar_repro.forecast import host_costs
from sonar_repro.forecast import task as forecast
from sonar_repro.forecast.fake_model import fake_environment
from sonar_repro.forecast.memory import ForecastMeter
from sonar_repro.forecast.recorder import CLIPPING, OPTIMIZING, StepRecorder
from sonar_repro.forecast.step_time import Constants, profile, simulate
from sonar_repro.forecast.time_table import cards, representative_length
from sonar_repro.models.experts import find_expert_tensors
from sonar_repro.training.build import make_optimizer
from sonar_repro.training.step import training_step

TINY = (
    "scale=forecast", "model.architecture.num_hidden_layers=2", "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=32", "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=4", "model.architecture.num_experts=8",
    "model.architecture.vocab_size=512", "data.max_length=160", "threads=1",
)  # fmt: skip
CARD = next(card for card in cards() if card.name == "rtx_pro_6000")


@pytest.fixture
def record(compose_config):
    """A function: overrides -> (recorder, config, tensors that are trained) of a tiny run at the lengths asked."""

    def made(*overrides, lengths=(32, 64)):
        config = compose_config(*TINY, *overrides)
        recorder = StepRecorder()
        with fake_environment() as fake, recorder, ForecastMeter(recorder=recorder) as meter:
            model = forecast.build(config, fake)
            meter.attach(model, [t.parameter for t in find_expert_tensors(model)])
            optimizer = make_optimizer(config, model)

            def step(micro_batches):
                training_step(model, optimizer, None, micro_batches, config.accumulation)

            for number, length in enumerate((lengths[0], *lengths)):
                if number:
                    recorder.step([length] * config.accumulation)
                step(meter._micro_batches(fake, 2, [length] * config.accumulation, False))
                recorder.end()
        return recorder, config, len(list(model.parameters()))

    return made


def of_kind(recorder, kind):
    return [o for o in recorder.steps[-1].operators if o.kind == kind]


def test_sonar_updates_inside_backward_and_the_standard_step_at_its_end(record):
    contexts = {}
    for method in ("sonar", "standard_global_clip"):
        recorder, _, _ = record("backend=sonicmoe", f"method={method}")
        updates = [o.context for o in of_kind(recorder, OPTIMIZING) if o.name == "aten::_fused_adamw_"]
        contexts[method] = updates
        last_backward = max(i for i, o in enumerate(recorder.steps[-1].operators) if o.context == "backward")
        first = next(i for i, o in enumerate(recorder.steps[-1].operators) if o.name == "aten::_fused_adamw_")
        assert (first < last_backward) == (method == "sonar")
    assert contexts == {"sonar": ["hook"] * 4 + ["end"], "standard_global_clip": ["end"] * 2}


def test_per_expert_calls_are_pieces_after_the_first_of_a_hook(record):
    recorder, _, _ = record("backend=sonicmoe", "method=sonar_per_expert")
    updates = [o.context for o in of_kind(recorder, OPTIMIZING) if o.name == "aten::_fused_adamw_"]
    assert updates == (["hook"] + ["piece"] * 7) * 4 + ["end"]


def test_clipping_and_optimizer_move_the_bytes_of_their_parameters(record):
    """A norm reads every gradient, the scaling reads and writes it; AdamW moves seven words a parameter (bf16)."""
    recorder, config, _ = record("backend=sonicmoe", "method=standard_global_clip")
    with fake_environment() as fake:
        count = sum(p.numel() for p in forecast.build(config, fake).parameters())
    clipping = {o.name: o.work for o in of_kind(recorder, CLIPPING)}
    assert clipping["aten::_foreach_norm"].nbytes == 2 * count
    assert clipping["aten::_foreach_mul_"].nbytes == 2 * 2 * count
    adamw = [o.work for o in of_kind(recorder, OPTIMIZING) if o.name == "aten::_fused_adamw_"]
    assert sum(w.nbytes for w in adamw) == 7 * 2 * count
    sonar, _, _ = record("backend=sonicmoe", "method=sonar")
    assert sum(o.work.nbytes for o in of_kind(sonar, OPTIMIZING) if o.name == "aten::_fused_adamw_") == 14 * count
    rest = next(o.work.nbytes for o in of_kind(sonar, CLIPPING) if o.name == "aten::_foreach_norm")
    assert rest == 2 * (count - 2 * 8 * 3 * 64 * 32)


def test_the_tiny_forward_pass_has_the_matrix_operations_of_its_shapes(record):
    recorder, _, _ = record("backend=sonicmoe", "method=sonar")
    products = [o for o in recorder.steps[-1].operators if o.context == "forward" and o.name == "aten::mm"]
    tokens = 2 * 64
    per_layer = 4 * 2 * tokens * 64 * 64 + 2 * tokens * 64 * 8  # q, k, v, o and the router
    assert sum(o.work.flops for o in products) == 2 * per_layer + 2 * tokens * 64 * 512


@pytest.mark.parametrize("backend", ["sonicmoe", "scattermoe", "grouped_mm"])
def test_a_length_between_the_recorded_ones_is_as_if_recorded(record, backend):
    ours, config, tensors = record(f"backend={backend}", "method=sonar", lengths=(32, 64))
    theirs, _, _ = record(f"backend={backend}", "method=sonar", lengths=(32, 48))
    host = host_costs.load(config.host)
    between = profile(ours.steps, host, tensors)
    direct = profile(theirs.steps, host, tensors)
    assert between.names == direct.names
    for name in ("nbytes", "flops", "launches", "tokens"):
        found, wanted = between.at(name, [48]), direct.lines[name][1]
        # attention is quadratic in the length; all else is a line
        close = [abs(a - b) <= 0.02 * b for n, a, b in zip(between.names, found, wanted) if "attention" not in n]
        assert all(close), name
    assert simulate(between, CARD, [48])[0]["step_ms"] == pytest.approx(simulate(direct, CARD, [48])[0]["step_ms"])


def test_identities_of_the_simulated_step(record):
    recorder, config, tensors = record("backend=scattermoe", "method=sonar")
    step = profile(recorder.steps, host_costs.load(config.host), tensors)
    times, kernels, _, index = simulate(step, CARD, [64])
    parts = [times[f"{kind}_ms"] for kind in ("forward_backward", "clipping", "optimizer")]
    assert sum(parts) == pytest.approx(times["busy_ms"])
    assert times["idle_ms"] == pytest.approx(times["step_ms"] - times["busy_ms"])
    assert len(index) == times["kernels"] == len(kernels.kind)
    instant = simulate(step, CARD, [64], Constants(host_speed=1e9, gap_us=0.0))[0]
    assert instant["step_ms"] == pytest.approx(instant["busy_ms"], rel=1e-6) == times["busy_ms"]
    steps = [simulate(step, CARD, [64], Constants(host_speed=s))[0]["step_ms"] for s in (4, 2, 1, 0.5)]
    assert steps == sorted(steps) and steps[-1] > 1.5 * steps[1]  # a tiny model is bound by its host
    # a card that is nothing but a narrow memory takes the time of the bytes
    narrow = dataclasses.replace(CARD, bandwidth_gb_s=1e-3)
    moved = step.at("nbytes", [64]).sum() + step.at("expert_bytes", [64]).sum()  # 128 tokens hit every expert
    assert simulate(step, narrow, [64])[0]["busy_ms"] == pytest.approx(moved / (1e-3 * 0.88 * 1e9) * 1e3, rel=1e-3)


def test_grouped_products_loop_over_the_experts_where_the_card_has_no_grouped_kernel(record):
    recorder, config, tensors = record("backend=grouped_mm", "method=sonar")
    step = profile(recorder.steps, host_costs.load(config.host), tensors)
    assert int(step.grouped.sum()) == 2 * 2 * 3  # up and down, forward and two gradients, two layers
    hopper = dataclasses.replace(CARD, compute_capability=9)
    looped, grouped = (simulate(step, card, [64])[0] for card in (CARD, hopper))
    assert looped["kernels"] - grouped["kernels"] == 12 * (8 - 2)
    assert looped["step_ms"] > grouped["step_ms"]


def test_accumulation_runs_forward_and_backward_as_often(record):
    def work(accumulation):
        recorder, config, tensors = record(
            "backend=sonicmoe", "method=standard_no_clip", f"accumulation={accumulation}"
        )
        return recorder, simulate(
            profile(recorder.steps, host_costs.load(config.host), tensors), CARD, [64] * accumulation
        )[0]

    (one, first), (two, second) = work(1), work(2)
    assert {o.micro_batch for o in two.steps[-1].operators} == {0, 1}
    flops = [sum(o.work.flops for o in r.steps[-1].operators) for r in (one, two)]
    assert flops[1] == 2 * flops[0]
    assert second["optimizer_ms"] == pytest.approx(first["optimizer_ms"])
    assert second["forward_backward_ms"] > 1.9 * first["forward_backward_ms"]


def test_memory_is_the_same_with_and_without_a_recorder(record, compose_config):
    config = compose_config(*TINY, "backend=sonicmoe", "method=sonar")
    read = []
    for recorder in (None, StepRecorder()):
        with fake_environment() as fake, ForecastMeter(recorder=recorder) as meter:
            meter.phase("load")
            model = forecast.build(config, fake)
            optimizer = make_optimizer(config, model)
            step = functools.partial(training_step, model, optimizer, None)
            meter.run(fake, step, batch_size=2, max_length=64, replayed_steps=4)
        read.append(json.dumps(meter.read()))
    assert read[0] == read[1]


def run_forecast(config, reporter):
    report = reporter("arm")
    forecast.run(config, report)
    return report.sections


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "sgd", "lion"])
def test_the_record_holds_what_the_analysis_reads(compose_config, reporter, optimizer, tmp_path):
    pytest.importorskip("bitsandbytes") if optimizer == "adamw8bit" else None
    trace = tmp_path / "trace.json"
    config = compose_config(*TINY, "backend=sonicmoe", f"optimizer={optimizer}", f"task.trace={trace}")
    block = run_forecast(config, reporter)["time"]["forecast"]
    json.dumps(block, allow_nan=False)
    for name in ("step_ms", "tokens_per_s", "forward_backward_ms", "clipping_ms", "optimizer_ms", "busy_ms", "idle_ms"):
        assert block[name] > 0, name
    assert block["source"] == "forecast" and block["gpu"] == "rtx_pro_6000" and block["fits_gpu"] is True
    assert [p["host_speed"] for p in block["host_curve"]][0] == 0.5
    assert dict((p["host_speed"], p["step_ms"]) for p in block["host_curve"])[1.0] == block["step_ms"]
    low, high = (block["sensitivity"]["launch_us"][end] for end in ("low", "high"))
    assert low < block["step_ms"] < high
    assert block["filled"]["step_ms"] >= block["step_ms"] and block["length"] < 160
    assert block["tokens_per_s"] == pytest.approx(2 * block["length"] / block["step_ms"] * 1e3, rel=1e-4)
    assert set(block["cards"]) == {card.name for card in cards()}
    rows = {event["tid"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"}
    assert rows == {"host", "device"}


def test_the_same_run_gives_the_same_block(compose_config, reporter):
    config = compose_config(*TINY, "backend=grouped_mm")
    first, second = (run_forecast(config, reporter)["time"] for _ in range(2))
    assert json.dumps(first) == json.dumps(second)


def test_a_card_that_is_too_small_still_gets_its_time(compose_config, reporter):
    config = compose_config(*TINY, "backend=sonicmoe", "gpu.memory_gb=1.001")
    block = run_forecast(config, reporter)["time"]["forecast"]
    assert block["fits_gpu"] is False and block["step_ms"] > 0


def test_every_card_composes_and_has_a_rate(compose_config):
    names = sorted(path.stem for path in (conf_dir() / "gpu").glob("*.yaml"))
    assert sorted(card.name for card in cards()) == names
    for name in names:
        card = compose_config("scale=forecast", f"gpu={name}").gpu
        assert 500 < card.bandwidth_gb_s < 10_000 and 50 < card.bf16_tflops < 3000
        assert card.fp32_tflops < card.bf16_tflops


def test_a_card_without_figures_gets_a_reason(compose_config, reporter):
    config = compose_config(*TINY, "backend=sonicmoe", "gpu.bandwidth_gb_s=null", "gpu.name=mine")
    block = run_forecast(config, reporter)["time"]["forecast"]
    assert block == {"step_ms": None, "reason": "gpu=mine has no bandwidth_gb_s or bf16_tflops (conf/gpu)"}


def test_copies_to_the_host_are_not_timed_and_said_so(compose_config, reporter):
    config = compose_config(*TINY, "backend=sonicmoe", "method=sonar_offload_clip")
    block = run_forecast(config, reporter)["time"]["forecast"]
    assert block["step_ms"] is None and "clip=offloaded" in block["reason"]


@pytest.mark.parametrize("method", sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml")))
def test_every_method_composes_into_a_time_or_a_reason(compose_config, reporter, method):
    block = run_forecast(compose_config(*TINY, "backend=sonicmoe", f"method={method}"), reporter)["time"]["forecast"]
    assert (block["step_ms"] or 0) > 0 or block["reason"]


def test_hosts_are_named_files_and_mistakes_are_one_line(tmp_path):
    assert host_costs.load(Config().host).operators["forward"]["aten::mm"] > 0
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(UserError, match="bad.json is no host file"):
        host_costs.load(str(bad))
    with pytest.raises(UserError, match="is no host file"):
        bad.write_text("[1")
        host_costs.load(str(tmp_path / "bad.json"))


def test_representative_length_is_the_median_of_drawn_batches():
    assert representative_length(2, 256, 42, "text") == 256
    one, two, many = (representative_length(size, 256, 42, "instructions") for size in (1, 2, 32))
    assert 80 < one < 100 and 110 < two < 130 and many > 230  # Alpaca's median is 91 (data/lengths.py)
    assert torch.tensor([one, two, many]).diff().min() > 0
