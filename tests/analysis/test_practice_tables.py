"""The tables that are no copy of a paper's: fits, forecast against measured, forecast time, MESH's state, diagnosis."""

from pathlib import Path

import pytest
from analysis_helpers import FOUR, SONAR, G, arm, origins, with_peak, with_step

from analysis.cards import cards
from analysis.claims import judged
from analysis.synthetic import record
from analysis.tables import TABLES
from analysis.tables.build import build


def rows(made) -> list[list[str]]:
    return [[c.text for c in row] for block in made.blocks for row in block.rows]


def test_fits_names_the_smallest_card_that_holds_the_reserved_peak(tmp_path: Path):
    small, large = cards()[0], cards()[-1]
    made = [with_peak(arm("forecast", "fits", method=SONAR), 1.0, small.usable_gb)]
    made.append(with_peak(arm("forecast", "fits", method=G), 1.0, small.usable_gb + 0.001))
    made.append(with_peak(arm("forecast", "fits", method="optimizer_in_backward"), 1.0, large.usable_gb + 1))
    t = build(TABLES["fits"], "forecast", origins(tmp_path, made))
    card = {row[2]: row[5] for row in rows(t)}
    assert card["Sonar-MoE"] == small.title
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
    assert rows(t) == [["OLMoE-1B-7B", "SonicMoE", "Sonar-MoE", "−20.0% / −10.0%"]]


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
    good = {"prepare_calls_per_step": 1.0, "cosine": 0.9999999, "relative_error": 1.4e-7}
    found = origins(tmp_path / "a", [nanowhale("mesh", hidden_momentum=good)])
    assert {c.name: v.status for c, v in judged(found)}["lifecycle"] == "holds"
    lost = {**good, "cosine": 0.43}  # what a zero_grad between prepare and backward does
    found = origins(tmp_path / "b", [nanowhale("mesh", hidden_momentum=lost)])
    assert {c.name: v.status for c, v in judged(found)}["lifecycle"] == "fails"
