"""Claims: the papers' own numbers satisfy them, others break them, and no record shows what its scale cannot."""

from pathlib import Path

import pytest
from analysis_helpers import FOUR, SONAR, G, N, arm, origins, printed_records, with_peak, with_step
from synthetic import fill, record

from analysis.claims import CLAIMS, judged
from analysis.claims.evidence import DISAGREES, FAILS, HOLDS, HOLDS_FORECAST, NOT_MEASURED, STATUSES

BY_NAME = {c.name: c for c in CLAIMS}


def verdicts(found) -> dict:
    return {claim.name: verdict for claim, verdict in judged(found)}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    return verdicts(origins(tmp_path_factory.mktemp("printed"), printed_records()))


# What the papers' tables hold enough numbers for; the rest needs numbers that only figures show.
FROM_TABLES = [
    "memory",
    "memory_exact",
    "no_clip_memory",
    "speed",
    "speed_sonicmoe",
    "loss",
    "matches_all_memory",
    "matches_all_speed",
    "per_expert_slow",
    "per_expert_memory",
    "saving_gb",
    "olmoe_as_fast",
    "granite_faster",
    "granite_faster_scattermoe",
    "scattermoe_memory",
    "downstream",
    "downstream_methods",
    "clip_kernels",
    "granite_idle",
    "call_cost",
    "bitwise",
    "bitwise_granularity",
    "bitwise_all",
    "run_to_run",
    "clip_weights",
    "clip_loss",
    "bf16_shares",
    "gc_memory",
    "gc_time",
    "eight_bit",
    "cap_46",
    "cap_30",
    "cap_46_standard",
    "cap_46_sonar",
    "cap_46_all",
    "cap_30_standard",
    "cap_30_sonar",
    "cap_30_sonar_gc",
    "cap_30_all",
    "absolute_peaks",
    "tokens_a_step",
    "eight_bit_slower",
    "eight_bit_quality",
    "accumulation_one",
    "accumulation",
    "update_cost",
    "accumulation_saving",
]


@pytest.mark.parametrize("name", FROM_TABLES)
def test_the_papers_own_numbers_satisfy_its_sentences(printed, name: str):
    assert printed[name].status == HOLDS, printed[name]
    assert "paper" in printed[name].evidence and "measured" in printed[name].evidence


def test_what_the_tables_do_not_hold_is_not_measured(printed):
    sonar = {c.name for c in CLAIMS if c.paper == "sonar"}
    assert {n for n in sonar if printed[n].status != HOLDS} == sonar - set(FROM_TABLES) - {"same_order"}
    assert all(printed[n].status == NOT_MEASURED for n in sonar - set(FROM_TABLES) - {"same_order"})


@pytest.mark.parametrize(
    ("name", "method", "change"),
    [
        ("memory", SONAR, lambda r: with_peak(r, 50.0)),
        ("speed", SONAR, lambda r: with_step(r, 142.0)),
        ("no_clip_memory", N, lambda r: with_peak(r, 55.0)),
        ("loss", SONAR, lambda r: r["loss"].update(heldout=1.27) or r),
        ("matches_all_memory", "optimizer_in_backward", lambda r: with_peak(r, 40.0)),
        ("clip_loss", N, lambda r: r["loss"].update(heldout=1.30) or r),
    ],
)
def test_one_other_number_breaks_a_claim(tmp_path: Path, name: str, method: str, change):
    made = printed_records()
    one = next(
        r for r in made
        if r["arm"]["experiment"] == "table1" and r["arm"]["method"] == method and r["arm"]["backend"] == "sonicmoe"
    )  # fmt: skip
    change(one)
    assert verdicts(origins(tmp_path, made))[name].status == FAILS


def test_one_differing_expert_weight_breaks_exactness(tmp_path: Path):
    made = record({"task": "compare_weights", "method": "sonar_vs_standard_no_expert_clip"}, "smoke", "table4")
    assert verdicts(origins(tmp_path / "a", [made]))["bitwise"].status == HOLDS
    made["compare"]["expert"] = {"differing": 1, "total": 1000}
    assert verdicts(origins(tmp_path / "b", [made]))["bitwise"].status == FAILS


def test_smoke_records_show_neither_speed_nor_absolute_memory_nor_quality(tmp_path: Path):
    fill_smoke = [record(axes, "smoke", experiment) for experiment, scale, axes in _arms() if scale == "smoke"]
    found = verdicts(origins(tmp_path, fill_smoke))
    shown = {n for n, v in found.items() if v.status != NOT_MEASURED and BY_NAME[n].paper == "sonar"}
    assert shown == {"one_layer", "calls", "same_order", "bitwise", "bitwise_granularity", "bitwise_all", "run_to_run"}
    assert all("tiny model" in found[n].evidence for n in shown)


def _arms():
    from synthetic import arms

    return [(e, s, {k: v for k, v in a.items() if k != "seed"}) for e, s, a in arms() if not e.startswith("mesh")]


def test_forecasts_show_memory_and_say_so_but_no_quality(tmp_path: Path):
    peaks = dict(zip(FOUR, (55.41, 55.41, 43.29, 43.50)))
    grid = [(m, b, o) for m in peaks for b in ("sonicmoe", "scattermoe") for o in ("olmoe", "granite")]
    made = [with_peak(arm(method=m, backend=b, model=o), peaks[m]) for m, b, o in grid]
    found = verdicts(origins(tmp_path, made))
    assert found["memory"].status == HOLDS_FORECAST and found["memory"].evidence == "forecast"
    assert found["loss"].status == NOT_MEASURED


@pytest.mark.parametrize("ms, says", [(80.0, HOLDS_FORECAST), (99.0, DISAGREES)])
def test_the_verdict_of_a_forecast_is_called_one_for_time_as_for_memory(tmp_path: Path, ms: float, says: str):
    grid = [(m, b, o) for m in (G, SONAR) for b in ("sonicmoe", "scattermoe") for o in ("olmoe", "granite")]
    made = [arm(method=m, backend=b, model=o) for m, b, o in grid]
    for one in made:
        step_ms = ms if one["arm"]["method"] == SONAR else 100.0
        one["time"] = {"source": "forecast", "median_s": None, "forecast": {"step_ms": step_ms}}
    assert verdicts(origins(tmp_path, made))["speed"].status == says


def test_a_measurement_counts_before_a_forecast(tmp_path: Path):
    made = [
        with_peak(arm(scale, method=m), gb)
        for scale, gbs in (("forecast", (55, 43)), ("paper", (60, 50)))
        for m, gb in zip((G, SONAR), gbs)
    ]
    assert "10.00 GB" in verdicts(origins(tmp_path, made + _granite()))["saving_gb"].figures


def _granite():
    return [with_peak(arm("paper", method=m, model="granite"), gb) for m, gb in ((G, 26.91), (SONAR, 21.14))]


def test_losses_of_random_weights_at_paper_scale_show_no_quality(tmp_path: Path):
    made = [r for r in printed_records() if r["arm"]["experiment"] == "table1"]
    for one in made:
        one["model"]["weights"] = "random"
    assert verdicts(origins(tmp_path, made))["loss"].status == NOT_MEASURED


def test_times_of_different_devices_are_not_compared(tmp_path: Path):
    made = [r for r in printed_records() if r["arm"]["experiment"] == "table1"]
    for one in made:
        if one["arm"]["method"] == SONAR:
            one["environment"]["device_name"] = "another card"
    found = verdicts(origins(tmp_path, made))
    assert found["speed"].status == NOT_MEASURED and "one device" in found["speed"].figures
    assert found["memory"].status == HOLDS


# -- MESH --------------------------------------------------------------------------------------------------------------

PAPERS_ORDER = {
    "mesh_adamw": 3.60, "direct": 3.72, "mesh": 3.652, "mesh_b": 3.649, "mesh_b_full": 3.6187, "mesh_b_full_vh": 3.6102,
    "direct_routed_adamw": 3.64, "direct_shared_adamw": 3.70, "direct_experts_sage": 3.80, "mesh_v_only": 3.73,
    "mesh_sign_only": 3.75, "mesh_factored_v": 3.74,
}  # fmt: skip
STATE = {"mesh_adamw": 0.883, "mesh_b_full": 0.430}


def nanowhale(scale: str, losses: dict[str, float]) -> list[dict]:
    made = []
    for optimizer, loss in losses.items():
        for seed in (42, 100, 512):
            one = record({"model": "nanowhale", "optimizer": optimizer}, scale, "mesh_table1", seed)
            one["loss"] = {"train": [], "heldout": loss + (seed - 42) * 1e-6}
            one["model"]["weights"] = "random"
            one["memory"] |= {
                "optimizer_state_bytes": int(STATE.get(optimizer, 0.3312) * 1e9),
                "hidden_buffer_bytes": 98_304_000,
            }
            made.append(one)
    return made


ORDER_CLAIMS = ["below_adamw", "close", "first_moment", "full_state", "routed", "sage_experts", "controls"]


@pytest.mark.parametrize("scale", ["paper", "smoke"])
def test_the_papers_order_holds_at_either_scale_and_a_tiny_model_says_so(tmp_path: Path, scale: str):
    found = verdicts(origins(tmp_path, nanowhale(scale, PAPERS_ORDER)))
    assert {n: found[n].status for n in ORDER_CLAIMS} == dict.fromkeys(ORDER_CLAIMS, HOLDS)
    assert all(("tiny model" in found[n].evidence) == (scale == "smoke") for n in ORDER_CLAIMS)
    quality = {n: found[n].status for n in ("loss_gap", "v_of_h")}
    assert set(quality.values()) == ({HOLDS} if scale == "paper" else {NOT_MEASURED})


def test_another_order_fails(tmp_path: Path):
    upside_down = {o: 8 - v for o, v in PAPERS_ORDER.items()}
    found = verdicts(origins(tmp_path, nanowhale("smoke", upside_down)))
    assert {found[n].status for n in ("below_adamw", "first_moment", "routed", "sage_experts", "controls")} == {FAILS}


def test_state_bytes_are_compared_to_three_decimals(tmp_path: Path):
    made = nanowhale("forecast", PAPERS_ORDER)
    found = verdicts(origins(tmp_path / "a", made))
    assert {found[n].status for n in ("state_bytes", "hidden_bytes", "state_saving")} == {HOLDS_FORECAST}
    for one in made:
        if one["arm"]["optimizer"] == "mesh":
            one["memory"]["optimizer_state_bytes"] += 1_000_000
    assert verdicts(origins(tmp_path / "b", made))["state_bytes"].status == DISAGREES


def test_every_claim_is_decided_without_an_error_whatever_is_recorded(tmp_path: Path):
    fill(tmp_path)
    found = judged(origins(tmp_path, []))
    assert len({c.name for c in CLAIMS}) == len(CLAIMS) == len(found) >= 60
    assert all(v.status in STATUSES and v.figures for _, v in found)
    assert all(v.status == NOT_MEASURED for _, v in judged([]))
