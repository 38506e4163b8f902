"""``sonar-repro fit``: its answer is the arm's forecast, verdicts are replays, a mistake is one line and exit 2."""

import dataclasses
import json
import random

import pytest
from composing import composed, run_main

from sonar_repro.config.schema import GpuConfig
from sonar_repro.errors import UserError
from sonar_repro.forecast import fit
from sonar_repro.harness import fit_command
from sonar_repro.harness.runner import make_arm, run

TINY = {
    "model_type": "olmoe", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture
def tiny_model(tmp_path, monkeypatch):
    """A model of 80 million parameters as a config.json; the cache is the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny é (1)" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def here(monkeypatch):
    """Forecasts in this process: what a worker does, without the seconds of its start. Counts them."""
    done = []

    class Done:
        def __init__(self, value):
            self.value = value

        def result(self):
            return self.value

    def submit(self, config, cards):
        done.append(config)
        return Done(fit.work(dataclasses.asdict(config), [dataclasses.asdict(card) for card in cards]))

    monkeypatch.setattr(fit_command.Workers, "_submit", submit)
    return done


def answer(capsys, *words):
    code, out, err = run_main(capsys, "fit", *words, "--json")
    assert code in (0, 3), err
    return code, json.loads(out)


def test_what_fit_says_is_what_the_forecast_records(tiny_model, here, capsys, tmp_path):
    words = ["--batch", "2", "--length", "128", "--method", "sonar"]
    code, told = answer(capsys, str(tiny_model), *words)
    same = composed(
        "scale=forecast", "method=sonar", "optimizer=adamw", "backend=grouped_mm", "batch_size=2",
        "data.max_length=128", f"model.config={fit_command._quoted(str(tiny_model))}", f"runs_dir={tmp_path / 'runs'}",
    )  # fmt: skip
    record = run(make_arm(same))
    assert record["status"] == "ok" and code == 0
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert told["memory"][name] == record["memory"]["measured"][name]
    filled = record["time"]["forecast"]["cards"]["h100"]["filled"]
    card = next(card for card in told["cards"] if card["name"] == "h100")
    assert (card["step_ms"], card["tokens_per_s"]) == (filled["step_ms"], filled["tokens_per_s"])


@pytest.mark.parametrize("method", ["standard_global_clip", "sonar", "optimizer_in_backward", "sonar_per_expert"])
@pytest.mark.parametrize("length", [64, 512])
def test_the_parts_sum_to_the_peak_byte_for_byte(tiny_model, here, capsys, method, length):
    _, told = answer(capsys, str(tiny_model), "--method", method, "--length", str(length), "--gpu", "h100")
    memory = told["memory"]
    parts = {name: size for name, size in memory["breakdown"].items() if name != "fragmentation"}
    assert sum(parts.values()) == memory["peak_allocated_bytes"]
    assert sum(memory["breakdown"].values()) == memory["peak_reserved_bytes"]
    experts = 6 * 16 * 3 * 512 * 512
    assert parts["optimizer states, experts"] >= 2 * 2 * experts  # two moments in bf16; blocks are rounded up
    assert parts["optimizer states, experts"] < 2 * 2 * experts * 1.01
    assert all(size >= 0 for size in memory["breakdown"].values())


def test_another_cards_workspaces_are_exact(tiny_model, here):
    """The run of a Hopper card replayed with an Ada card's cuBLAS workspaces is the run recorded for that card."""
    from sonar_repro.forecast import task

    def meter(capability):
        config = composed(
            "scale=forecast",
            f"model.config={fit_command._quoted(str(tiny_model))}",
            f"gpu.compute_capability={capability}",
        )
        return task.run(config, fit._Sections())

    hopper, ada = meter(9), meter(8)
    replayed = hopper.under(10**12, 8)
    assert replayed.phases["measured"] == ada.report().phases["measured"]
    assert hopper.report().phases["measured"] != ada.report().phases["measured"]


def test_a_card_is_judged_by_a_replay_under_its_memory(tiny_model, here, capsys):
    """Fits wherever the allocated peak and what cannot be given back fit, below the uncapped reserved figure."""
    from sonar_repro.forecast import task

    _, told = answer(capsys, str(tiny_model), "--length", "512", "--gpu", "h100")
    allocated, reserved = (told["memory"][f"peak_{kind}_bytes"] for kind in ("allocated", "reserved"))
    for budget, code in ((reserved, 0), (allocated - 10**6, 3)):
        assert answer(capsys, str(tiny_model), "--length", "512", "--budget-gb", f"{budget / 1e9:.9f}")[0] == code
    config = composed(
        "scale=forecast", "data.max_length=512", "batch_size=1", "method=standard_global_clip",
        f"model.config={fit_command._quoted(str(tiny_model))}",
    )  # fmt: skip
    for share in (0.2, 0.5, 0.8):
        cap = int(allocated + share * (reserved - allocated))
        capped = dataclasses.replace(config, memory_cap_gb=cap / 1e9)
        code, _ = answer(capsys, str(tiny_model), "--length", "512", "--budget-gb", f"{cap / 1e9:.9f}")
        try:
            ran = bool(task.run(capped, fit._Sections()))
        except task.ForecastOutOfMemory:
            ran = False
        assert (code == 0) == ran


def test_solve_finds_the_largest_batch(tiny_model, here, capsys):
    def ask(*words):
        return answer(capsys, str(tiny_model), "--length", "128", *words)

    peaks = {batch: ask("--gpu", "h100", "--batch", str(batch))[1]["memory"] for batch in (1, 5)}
    budget = ("--budget-gb", f"{peaks[5]['peak_reserved_bytes'] / 1e9:.9f}")
    code, told = ask(*budget, "--solve", "batch")
    found = told["solved"]["value"]
    assert code == 0 and found >= 5 and told["solved"]["axis"] == "batch" and told["solved"]["monotone"]
    assert ask(*budget, "--batch", str(found))[0] == 0 and ask(*budget, "--batch", str(found + 1))[0] == 3
    code, told = ask("--budget-gb", f"{peaks[1]['peak_allocated_bytes'] / 2e9:.9f}", "--solve", "batch")
    assert code == 3 and told["solved"]["value"] is None


@pytest.mark.parametrize("seed", range(20))
def test_bisection_equals_brute_force(seed):
    draw = random.Random(seed)
    limit, start = draw.randint(1, 300), 1
    edge = draw.randint(0, 320)
    assert fit.largest(lambda n: n <= edge, limit, start) == max(
        (n for n in range(start, limit + 1) if n <= edge), default=None
    )
    assert fit.smallest(lambda n: n >= edge, limit) == min((n for n in range(1, limit + 1) if n >= edge), default=None)


def test_a_known_arm_comes_from_the_cache_and_another_does_not(tiny_model, here, capsys):
    first = answer(capsys, str(tiny_model), "--length", "64", "--gpu", "h100")[1]
    again = answer(capsys, str(tiny_model), "--length", "64", "--gpu", "h100")[1]
    assert len(here) == 1
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    answer(capsys, str(tiny_model), "--length", "65", "--gpu", "h100")
    assert len(here) == 2
    tiny_model.write_text(json.dumps({**TINY, "num_hidden_layers": 5}))  # the same path, another model
    changed = answer(capsys, str(tiny_model), "--length", "64", "--gpu", "h100")[1]
    assert changed["memory"]["peak_allocated_bytes"] < first["memory"]["peak_allocated_bytes"]
    for file in (tiny_model.parents[1] / "cache").rglob("*.json"):
        file.write_text("{")  # damaged
    repaired = answer(capsys, str(tiny_model), "--length", "64", "--gpu", "h100")[1]
    assert {**repaired, "seconds": 0} == {**changed, "seconds": 0}


def test_the_first_change_that_makes_it_fit_is_a_forecast(tiny_model, here, capsys):
    length = ["--length", "256"]
    standard = answer(capsys, str(tiny_model), *length, "--gpu", "h100")[1]["memory"]["peak_allocated_bytes"]
    sonar = answer(capsys, str(tiny_model), *length, "--gpu", "h100", "--method", "sonar")[1]["memory"]
    budget = (sonar["peak_reserved_bytes"] + standard) / 2e9
    assert sonar["peak_reserved_bytes"] < standard
    code, told = answer(capsys, str(tiny_model), *length, "--budget-gb", f"{budget:.6f}", "--explain")
    assert code == 3 and [row["change"] for row in told["remedies"]] == ["Sonar-MoE (--method sonar)"]


def test_prices_are_the_users(tiny_model, here, capsys):
    _, told = answer(capsys, str(tiny_model), "--gpu", "h100", "--length", "64", "--price", "h100=3.6")
    card = told["cards"][0]
    assert card["dollars_per_million_tokens"] == pytest.approx(1000 / card["tokens_per_s"], rel=1e-3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["olmo"], "did you mean olmoe?"),
        (["olmoe", "--gpu", "rtx4090"], "did you mean rtx_4090?"),
        (["olmoe", "--length", "10000"], "the model takes at most 4096"),
        (["olmoe", "--length", "1"], "--length 1: must be at least 2"),
        (["olmoe", "--batch", "0"], "--batch 0: must be at least 1"),
        (["olmoe", "--budget-gb", "0"], "--budget-gb 0: must be positive"),
        (["olmoe", "--budget-gb", "nan"], "--budget-gb nan: must be positive"),
        (["olmoe", "--method", "sonnar"], "did you mean sonar?"),
        (["olmoe", "--optimizer", "adam"], "optimizer=adam: no such option"),
        (["olmoe", "--price", "h100=free"], "write CARD=DOLLARS per hour"),
        (["olmoe", "--gpu", "h100", "--price", "l40s=1"], "l40s is not an asked card"),
        (["someone/some-model"], "hf download someone/some-model config.json"),
        (["olmoe", "--set", "nosuch=1"], "nosuch: no such key"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(words, told, here, capsys):
    code, out, err = run_main(capsys, "fit", *words)
    assert code == 2 and told in err and err.count("\n") == 1 and not out and not here


def test_a_folder_without_a_config_is_named(tmp_path, capsys):
    code, _, err = run_main(capsys, "fit", str(tmp_path))
    assert code == 2 and "holds no config.json" in err


def test_a_worker_brings_a_mistake_back_as_a_line():
    with pytest.raises(UserError, match="a line"):
        fit.from_plain({"error": "a line"})
    assert fit.budget_card(24).memory_gb == 24 and isinstance(fit.budget_card(24), GpuConfig)


def test_the_screen_names_the_set_up_first(tiny_model, here, capsys):
    code, out, err = run_main(capsys, "fit", str(tiny_model), "--length", "64", "--explain")
    lines = out.splitlines()
    assert code == 0 and not err
    assert "method standard_global_clip, optimizer adamw" in lines[0] and "batch 1 × 64" in lines[0]
    assert any(line.startswith("h100") and " yes" in line for line in lines) and "fragmentation" in out
