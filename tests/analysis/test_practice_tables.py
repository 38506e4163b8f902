"""The tables that are no copy of a paper's: fits, forecast against measured, forecast time, MESH's state, diagnosis."""

from pathlib import Path

import pytest
from analysis_helpers import FOUR, SONAR, G, arm, origins, with_peak, with_step
from synthetic import record

from analysis.claims import judged
from analysis.conf import cards
from analysis.tables import TABLES
from analysis.tables.build import build
from analysis.tables.mechanisms import crossing


def rows(made) -> list[list[str]]:
    return [[c.text for c in row] for block in made.blocks for row in block.rows]


def column(made, heading: str, label: str = "Method") -> dict[str, str]:
    """The texts under one heading by those under another, over all blocks."""
    found = {}
    for block in made.blocks:
        place = {h.text: i for i, h in enumerate(block.headers)}
        found |= {row[place[label]].text: row[place[heading]].text for row in block.rows}
    return found


def test_fits_names_the_smallest_card_that_holds_the_reserved_peak(tmp_path: Path):
    small, large = cards()[0], cards()[-1]
    made = [with_peak(arm("forecast", "fits", method=SONAR), 1.0, small.usable_gb)]
    made.append(with_peak(arm("forecast", "fits", method=G), 1.0, small.usable_gb + 0.001))
    made.append(with_peak(arm("forecast", "fits", method="optimizer_in_backward"), 1.0, large.usable_gb + 1))
    t = build(TABLES["fits"], "forecast", origins(tmp_path, made))
    card = column(t, "Smallest card")
    assert card["Sonar-MoE"] == f"{small.title} (borderline)"
    assert card["Standard (global clip)"] == next(c.title for c in cards() if c.usable_gb > small.usable_gb)
    assert card["Optimizer-in-backward (all)"] == "none listed"
    assert all(c.title in " ".join(t.notes) for c in cards())


def test_forecast_is_held_against_measured_memory_and_time_of_the_same_card_only(tmp_path: Path):
    forecast = with_step(with_peak(arm("forecast", method=SONAR), 43.5, 44.0), 100.0)
    forecast["arm"]["gpu"] = "rtx_pro_6000"
    made = [forecast]
    for device in ("NVIDIA RTX PRO 6000 Blackwell Workstation", "NVIDIA H200"):
        one = with_step(with_peak(arm("paper", method=SONAR), 43.57, 44.24), 125.0)
        one["environment"]["device_name"] = device
        one["arm_id"] += device[-4:]
        made.append(one)
    found = {row[0]: row for row in rows(build(TABLES["forecast_measured"], "paper", origins(tmp_path, made)))}
    same, other = found["NVIDIA RTX PRO 6000 Blackwell Workstation"], found["NVIDIA H200"]
    assert same[4:7] == other[4:7] == ["43.57", "43.50", "−0.16%"]
    assert same[10:] == ["125.0", "100.0", "−20.00%"] and other[10:] == ["125.0", "–", "–"]


def test_forecast_time_is_compared_as_changes_in_points_and_by_order(tmp_path: Path):
    printed = dict(zip(FOUR, (142.8, 115.9, 114.4, 116.1)))
    made = [with_step(arm(method=m), 2 * ms) for m, ms in printed.items()]
    t = build(TABLES["forecast_time"], "forecast", origins(tmp_path, made))
    change = next(n for n in t.notes if n.startswith("Δ step time"))
    assert "3 printed numbers compared" in change and "3 of 3 within 3.0 points" in change
    assert any(n.startswith("Absolute step time") and "largest +100.0%" in n for n in t.notes)
    assert any("order of the four methods is the paper's" in n for n in t.notes)
    made = [with_step(arm(method=m), 300 - ms) for m, ms in printed.items()]
    t = build(TABLES["forecast_time"], "forecast", origins(tmp_path, made))
    assert any("the paper Optimizer-in-backward (all) < Standard (no expert clip)" in n for n in t.notes)


def test_sensitivity_shows_how_a_change_moves_with_each_constant(tmp_path: Path):
    base, sonar = arm(method=G), arm(method=SONAR)
    base["time"]["forecast"] = {"sensitivity": {"bandwidth": {"low": 150.0, "high": 100.0}}}
    sonar["time"]["forecast"] = {"sensitivity": {"bandwidth": {"low": 120.0, "high": 90.0}}}
    t = build(TABLES["forecast_sensitivity"], "forecast", origins(tmp_path, [base, sonar]))
    assert len(t.blocks[0].groups) == len({tuple(r[:2]) for r in rows(t)}), "no block of rows twice"
    assert rows(t) == [["OLMoE-1B-7B", "SonicMoE", "Sonar-MoE", "−20.0% / −10.0%"]]


def with_forecast(made: dict, ms: float, curve: dict | None = None, **cards: float) -> dict:
    """The record with a forecast step time only, on its own card and on others (synthetic)."""
    made["time"] = {"source": "forecast", "median_s": None, "forecast": {"step_ms": ms, "host": "made up"}}
    made["time"]["forecast"]["cards"] = {c: {"step_ms": v, "filled": {"step_ms": 2 * v}} for c, v in cards.items()}
    if curve:
        made["time"]["forecast"]["host_curve"] = [{"host_speed": x, "step_ms": y} for x, y in curve.items()]
    return made


def test_fits_shows_the_step_time_on_the_card_that_holds_it(tmp_path: Path):
    small = cards()[0]
    fitting = with_forecast(arm("forecast", "fits", method=SONAR), 100.0, **{small.name: 300.0})
    made = [with_peak(fitting, 1.0, small.usable_gb), arm("forecast", "fits", method=G)]
    with_peak(with_forecast(made[1], 100.0), 1.0, 10_000.0)["time"]["forecast"]["filled"] = {"step_ms": 120.0}
    t = build(TABLES["fits"], "forecast", origins(tmp_path, made))
    assert column(t, "Step ms there") == {"Sonar-MoE": f"600.0 ({small.short})", "Standard (global clip)": "–"}
    assert column(t, "Step ms on it")["Standard (global clip)"] == "120.0"
    assert next(r for r in t.raw if r["method"] == SONAR)["step_ms"] == 600.0


def test_fits_shows_shape_room_and_the_card_that_was_asked_for(tmp_path: Path):
    asked = next(c for c in cards() if c.name == "l40s")
    made = []
    for method, gb in ((SONAR, 10.0), (G, asked.usable_gb + 5), ("optimizer_in_backward", asked.usable_gb - 0.1)):
        one = with_forecast(arm("forecast", "fits", method=method, gpu="l40s", batch_size=4), 100.0)
        one["time"]["forecast"]["filled"] = {"step_ms": 251.0}
        one["data"]["max_length"] = 512
        made.append(with_peak(one, 1.0, gb))
    t = build(TABLES["fits"], "forecast", origins(tmp_path, made))
    where = column(t, "Card asked for")
    assert where["Sonar-MoE"] == f"L40S: {asked.usable_gb - 10:.1f} GB left"
    assert where["Standard (global clip)"] == "L40S: short by 5.0 GB"
    assert where["Optimizer-in-backward (all)"] == "L40S: 0.1 GB left (borderline)"
    assert set(column(t, "Batch").values()) == {"4"} and set(column(t, "Length").values()) == {"512"}
    assert set(column(t, "Step ms on it").values()) == {"251.0"}
    row = next(r for r in t.raw if r["method"] == SONAR)
    assert (row["batch_size"], row["length"], row["asked_card"]) == (4, 512, "l40s")
    assert row["asked_room_gb"] == pytest.approx(asked.usable_gb - 10)


def test_a_measured_card_is_held_against_the_forecast_of_that_card(tmp_path: Path):
    """A synthetic measurement: nothing here was run on a GPU."""
    forecast = with_peak(with_forecast(arm("forecast", method=SONAR), 100.0, h200=60.0), 43.5, 44.0)
    forecast["arm"]["gpu"] = "rtx_pro_6000"
    one = with_step(with_peak(arm("paper", method=SONAR), 43.57, 44.24), 50.0)
    one["environment"]["device_name"] = "NVIDIA H200"
    found = rows(build(TABLES["forecast_measured"], "paper", origins(tmp_path, [forecast, one])))
    assert [row[10:] for row in found] == [["50.0", "60.0", "+20.00%"]]


def test_mechanisms_derive_costs_from_steps_and_find_the_host_that_would_fit(tmp_path: Path):
    steps = {("olmoe", "sonar"): 116.1, ("olmoe", "sonar_per_expert"): 116.1 + 2.016 * 11.7}
    steps |= {("granite", "sonar"): 84.4, ("granite", "sonar_per_expert"): 84.4 + 2.496 * 30}
    made = [with_forecast(arm("forecast", "table3", model=m, method=k), ms) for (m, k), ms in steps.items()]
    for method, ms in (("standard_no_expert_clip", 200.0), (SONAR, 237.0), (G, 225.0)):
        made.append(with_forecast(arm("forecast", "table8", method=method, accumulation=2), ms))
    for method, curve in ((G, {1.0: 100.0, 2.0: 100.0}), ("standard_no_expert_clip", {1.0: 90.0, 2.0: 80.0})):
        made.append(with_forecast(arm("forecast", model="granite", method=method), curve[1.0], curve))
    t = build(TABLES["forecast_mechanisms"], "forecast", origins(tmp_path, made))
    found = {row[1]: row for row in rows(t) if len(row) == 6}
    assert found["OLMoE-1B-7B: an extra optimizer call"][3:] == ["11.7", "11.7", "0.0"]
    assert found["Granite-3.1-3B: an extra optimizer call"][3:] == ["30.0", "24.5", "+5.5"]
    assert found["A = 2: an extra update"][3:] == ["37.0", "37.5", "−0.5"]
    assert found["A = 2: Sonar against global clip"][3] == "5.3"
    host = next(row for row in rows(t) if row[0] == "SonicMoE, Standard (no expert clip)")
    assert host[1] == "−10.0%" and host[-2:] == ["−12.4%", "×1.24"]  # −10% at 1, −20% at 2: −12.4% at 1.24
    assert crossing([(1, 5.0), (2, 0.0), (4, 5.0)], 2.5) == [1.5, 3.0] and crossing([(1, 5.0), (2, 4.0)], 0) == []


def test_an_order_within_the_papers_own_noise_is_said_to_be_the_papers(tmp_path: Path):
    printed = dict(zip(FOUR, (160.2, 133.3, 131.0, 133.2)))
    made = [with_step(arm(method=m, backend="scattermoe"), ms + (m == SONAR)) for m, ms in printed.items()]
    t = build(TABLES["forecast_time"], "forecast", origins(tmp_path, made))
    assert any(
        "but for 133.2 and 133.3 ms, which differ by less than its own same-seed noise (1.4%)" in n for n in t.notes
    )


def nanowhale(optimizer: str, experiment: str = "mesh_table1", **sections) -> dict:
    return record({"model": "nanowhale", "optimizer": optimizer}, "smoke", experiment, 42, **sections)


def test_mesh_state_lists_each_role_once_an_optimizer(tmp_path: Path):
    roles = [
        {
            "role": "routed",
            "rule": "mesh",
            "tensors": 16,
            "parameters": 19_660_800,
            "state_bytes": 0,
            "state": "H (buffer)",
        },
        {"role": "vocabulary", "rule": "sage", "tensors": 2, "parameters": 82_739_200, "state_bytes": 330_957_840},
    ]
    t = build(TABLES["mesh_state"], "smoke", origins(tmp_path, [nanowhale("mesh", roles=roles)]))
    assert [b.title for b in t.blocks] == ["MESH"]
    assert rows(t) == [
        ["routed", "mesh", "16", "19,660,800", "0.00", "H (buffer)"],
        ["vocabulary", "sage", "2", "82,739,200", "330.96", "–"],
    ]


def test_mesh_diagnosis_shows_every_number_of_the_record(tmp_path: Path):
    diagnosis = {"tokens": {"min": 12, "max": 900}, "effective_sample_size": 0.734561, "per_expert": [1, 2], "ok": True}
    made = nanowhale("direct", "mesh_diagnosis", diagnosis=diagnosis)
    made["loss"]["heldout"] = 4.25
    t = build(TABLES["mesh_diagnosis"], "smoke", origins(tmp_path / "one", [made]))
    expected = [["evaluation loss", "4.25"], ["tokens: min", "12"], ["tokens: max", "900"]]
    assert rows(t) == [*expected, ["effective sample size", "0.7346"], ["ok", "True"]]
    other = record({"model": "nanowhale", "optimizer": "direct"}, "smoke", "mesh_diagnosis", 100)
    other |= {"diagnosis": {**diagnosis, "effective_sample_size": 0.75, "tokens": {"min": 16, "max": 900}}}
    other["loss"]["heldout"] = 4.75
    t = build(TABLES["mesh_diagnosis"], "smoke", origins(tmp_path / "two", [made, other]))
    expected = [["evaluation loss", "4.5 ± 0.35"], ["tokens: min", "14 ± 2.8"], ["tokens: max", "900"]]
    assert rows(t) == [*expected, ["effective sample size", "0.7423 ± 0.011"], ["ok", "True"]]


@pytest.mark.parametrize(
    "idle, fused, mesh, status",
    [(0.0, 4.79, 4.7, "holds"), (0.05, 4.79, 4.7, "fails"), (0.0, 4.7, 4.7, "fails"), (0.0, 4.8, 4.9, "not measured")],
)
def test_what_is_ruled_out_needs_a_gap_to_explain(tmp_path: Path, idle, fused, mesh, status):
    diagnosis = {"load": {"idle": idle}, "gate": {"effective_share_of_tokens": 0.97}}
    diagnosis["semantic"] = {"information_of_token_id": 0.2, "shuffled": 0.004}
    made = []
    for optimizer, loss in (("direct", 4.8), ("direct_fused", fused), ("mesh", mesh)):
        made.append(nanowhale(optimizer, "mesh_diagnosis", diagnosis=diagnosis))
        made[-1]["loss"]["heldout"] = loss
    assert {c.name: v.status for c, v in judged(origins(tmp_path, made))}["ruled_out"] == status


def test_hidden_momentum_diagnostics_and_roles_feed_their_claims(tmp_path: Path):
    good = {"prepare_calls_per_step": 1.0, "cosine": 0.9999999, "relative_error": 0.9e-8}
    found = origins(tmp_path / "a", [nanowhale("mesh", hidden_momentum=good)])
    assert {c.name: v.status for c, v in judged(found)}["lifecycle"] == "holds"
    for error in (1e-6, 1.4e-7):
        far = {**good, "relative_error": error}
        found = origins(tmp_path / f"{error}", [nanowhale("mesh", hidden_momentum=far)])
        assert {c.name: v.status for c, v in judged(found)}["lifecycle"] == "fails", "not near 1e-8"
    lost = {**good, "cosine": 0.43}  # what a zero_grad between prepare and backward does
    found = origins(tmp_path / "b", [nanowhale("mesh", hidden_momentum=lost)])
    assert {c.name: v.status for c, v in judged(found)}["lifecycle"] == "fails"


@pytest.mark.parametrize("adamw, says", [(4.5, "closes 50% of the gap"), (5.5, "no gap for the ablations to close")])
def test_a_share_of_the_gap_is_said_only_where_adamw_is_ahead(tmp_path: Path, adamw: float, says: str):
    made = []
    for optimizer, loss in (("mesh_adamw", adamw), ("direct", 5.0), ("direct_routed_adamw", 4.75)):
        made.append(nanowhale(optimizer, "mesh_table3"))
        made[-1]["loss"]["heldout"] = loss
    notes = build(TABLES["mesh_table3"], "smoke", origins(tmp_path, made)).notes
    assert sum(says in note for note in notes) == 1 and sum("gap" in note for note in notes) == 1


def test_own_fits_stand_beside_the_reference_rows_of_the_same_model(tmp_path: Path):
    own = arm("forecast", "fits", model="mine", method=SONAR)
    committed = [arm("forecast", "fits", model=m, method=SONAR) for m in ("mine", "olmoe")]
    found = origins(tmp_path, [own])
    origins(tmp_path, committed, label="forecast")
    found = origins(tmp_path, [])
    t = build(TABLES["fits"], "forecast", found)
    assert [r["model"] for r in t.raw] == ["mine", "mine", "olmoe"]
    assert [b.title for b in t.blocks] == ["your runs", "reference: forecast"]
