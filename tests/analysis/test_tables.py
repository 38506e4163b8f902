"""Tables from records: values, changes, printed numbers, what may not stand beside them, and what is missing."""

import csv
import io
import re
from pathlib import Path

import pytest
from analysis_helpers import FOUR, SONAR, G, N, arm, origins, with_peak, with_step
from synthetic import record

from analysis.collection import Collection
from analysis.tables import TABLES, specs_for
from analysis.tables.build import build
from analysis.tables.render import csv as to_csv
from analysis.tables.render import latex, markdown
from analysis.tables.spec import Cell, Table, TableSpec
from sonar_repro.errors import UserError


def table(found: list[Collection], name: str = "table1", scale: str = "forecast") -> Table:
    return build(TABLES[name], scale, found)


def cell(made: Table, heading: str, *labels: str, block: int = 0) -> Cell:
    """The cell under a one-line heading in the first row that carries all the labels."""
    column = next(i for i, h in enumerate(made.blocks[block].headers) if h.text == heading)
    for row in made.blocks[block].rows:
        if set(labels) <= {c.text for c in row}:
            return row[column]
    raise AssertionError(f"no row {labels}")


def headings(made: Table) -> list[str]:
    return [h.text for h in made.blocks[0].headers]


GLOBAL, SONARS = "Standard (global clip)", "Sonar-MoE"


def test_table1_prints_value_change_printed_value_and_error(tmp_path: Path):
    made = [with_peak(arm(method=G), 55.41, 56.52), with_peak(arm(method=SONAR), 43.50, 44.37)]
    t = table(origins(tmp_path, made))
    assert cell(t, "Peak alloc. GB (Δ)", GLOBAL, "SonicMoE").text == "55.41"
    assert cell(t, "Peak alloc. GB (Δ)", SONARS, "SonicMoE").text == "43.50 (−21.5%)"
    assert cell(t, "Peak alloc.: paper (Δ)", SONARS, "SonicMoE").text == "43.57 (−21.6%)"
    assert cell(t, "Peak alloc.: error", SONARS, "SonicMoE").text == "−0.16%"
    assert cell(t, "Peak res.: paper", SONARS, "SonicMoE").text == "44.24"
    assert cell(t, "Peak res.: error", GLOBAL, "SonicMoE").text == "+0.18%"


def test_bold_is_the_lowest_memory_and_time_of_its_model_and_backend(tmp_path: Path):
    peaks, steps = dict(zip(FOUR, (55.4, 55.4, 43.2, 43.5))), dict(zip(FOUR, (140, 110, 112, 111)))
    made = [with_step(with_peak(arm(method=m), peaks[m]), steps[m]) for m in FOUR]
    made.append(with_peak(arm(method=SONAR, model="granite"), 20.0))
    t = table(origins(tmp_path, made))
    rows = [row for row in t.blocks[0].rows if row[0].text == "OLMoE-1B-7B" and row[1].text == "SonicMoE"]
    column = {h.text: i for i, h in enumerate(t.blocks[0].headers)}
    assert [row[column["Peak alloc. GB (Δ)"]].bold for row in rows] == [False, False, True, False]
    assert [row[column["Step ms (Δ)"]].bold for row in rows] == [False, True, False, False]
    alone = [row for row in t.blocks[0].rows if row[0].text == "Granite-3.1-3B"]
    assert not any(row[column["Peak alloc. GB (Δ)"]].bold for row in alone), (
        "one value alone is not the lowest of anything"
    )


def test_smoke_stands_beside_printed_changes_only_and_never_beside_printed_values(tmp_path: Path):
    made = [arm("smoke", method=m, backend=b) for m in FOUR for b in ("grouped_mm", "eager")]
    t = table(origins(tmp_path, made), scale="smoke")
    assert not [h for h in headings(t) if h.endswith(("paper", "paper (Δ)", "error"))]
    assert cell(t, "Peak alloc.: paper Δ", SONARS, "grouped_mm").text == "−21.6%"
    assert cell(t, "Peak alloc.: paper Δ", SONARS, "eager").text == "–"
    text = markdown(t)
    assert "43.57" not in text and "1.2577" not in text and "142.8" not in text


def test_the_bound_and_the_cap_are_shown_at_smoke_scale(tmp_path: Path):
    made = arm("smoke", method=SONAR)
    made["model"] |= {"parameters": 1000, "expert_parameters": 900, "layers": 8}
    t = table(origins(tmp_path, [made, arm("smoke", method=G)]), scale="smoke")
    assert cell(t, "Bound %", SONARS, "grouped_mm").text == f"−{100 * 0.9 * (1 - 1 / 8) / 4:.1f}"
    assert cell(t, "Bound %", GLOBAL, "grouped_mm").text == "–"
    assert any("capped at 64 tokens" in n for n in t.notes) and any("f(1−1/L)/4" in n for n in t.notes)


def test_losses_of_random_weights_never_stand_beside_a_printed_one(tmp_path: Path):
    trained, random = arm("paper", method=G), arm("paper", method=SONAR)
    random["model"]["weights"] = "random"
    t = table(origins(tmp_path, [trained, random]), scale="paper")
    assert cell(t, "Held-out loss: paper", GLOBAL, "SonicMoE").text == "1.2577"
    assert cell(t, "Held-out loss: paper", SONARS, "SonicMoE").text == "–"
    assert cell(t, "Held-out loss: error", SONARS, "SonicMoE").text == "–"
    assert any("Random weights" in t.footnotes[n - 1] for n in cell(t, "Held-out loss", SONARS, "SonicMoE").marks)


def test_gb_is_said_once_and_every_source_is_named(tmp_path: Path):
    t = table(origins(tmp_path, [arm(method=G)]))
    assert sum("1e9 bytes" in n for n in t.notes) == 1
    assert any("forecast" in n and "published" in n for n in t.notes)


# -- what is missing or did not run ----------------------------------------------------------------------------------


def test_missing_arms_are_shown_and_their_commands_cover_exactly_them(tmp_path: Path):
    made = [arm(method=m) for m in FOUR] + [arm(method=m, backend="scattermoe") for m in (G, N)]
    t = table(origins(tmp_path, made))
    assert cell(t, "Peak alloc. GB (Δ)", SONARS, "ScatterMoE").text == "missing"
    base = "python -m sonar_repro +experiment=table1 scale=forecast"
    assert set(t.commands) == {
        f"{base} model=granite",
        f"{base} model=olmoe backend=scattermoe method=optimizer_in_backward,sonar",
    }


def test_nothing_recorded_gives_one_command_for_the_whole_experiment(tmp_path: Path):
    assert table(origins(tmp_path, []), scale="smoke").commands == ["python -m sonar_repro +experiment=table1"]
    assert table(origins(tmp_path, []), scale="paper").commands == [
        "python -m sonar_repro +experiment=table1 scale=paper"
    ]


@pytest.mark.parametrize("status", ["oom", "failed", "crashed", "unsupported"])
def test_an_arm_that_did_not_run_keeps_its_row_with_the_reason(tmp_path: Path, status: str):
    bad = arm(method=SONAR) | {"status": status, "error": {"type": "X", "message": "no\nroom", "phase": "load"}}
    t = table(origins(tmp_path, [arm(method=G), bad]))
    shown = cell(t, "Peak alloc. GB (Δ)", SONARS, "SonicMoE")
    assert shown.text == status and t.footnotes[shown.marks[0] - 1] == f"{status} in load: no"
    assert cell(t, "Peak alloc.: paper (Δ)", SONARS, "SonicMoE").text == "43.57 (−21.6%)"


def test_a_failed_arm_is_not_hidden_by_another_experiments_record(tmp_path: Path):
    failed = arm(method=SONAR) | {"status": "failed", "error": {"type": "X", "message": "boom"}}
    made = [arm(method=G), failed, arm(method=SONAR, experiment="table3")]
    assert cell(table(origins(tmp_path, made)), "Peak alloc. GB (Δ)", SONARS, "SonicMoE").text == "failed"


def test_arms_outside_the_grid_and_further_overrides_get_rows_of_their_own(tmp_path: Path):
    more = arm(method=SONAR, batch_size=4)
    other = with_peak(arm(method=SONAR), 99.0)
    other["arm_id"] += "-0a1b2c"
    t = table(origins(tmp_path, [with_peak(arm(method=SONAR), 43.5), arm(method=G), more, other]))
    assert cell(t, "Peak alloc. GB (Δ)", SONARS, "SonicMoE").text.startswith("43.50")
    assert cell(t, "Peak alloc. GB (Δ)", "Sonar-MoE [batch_size=4]")
    further = cell(t, "Method", "Sonar-MoE *")
    assert (
        cell(t, "Peak alloc. GB (Δ)", "Sonar-MoE *").text == "99.00" and "0a1b2c" in t.footnotes[further.marks[0] - 1]
    )


def test_a_users_own_experiment_gets_a_plain_table(tmp_path: Path):
    found = origins(tmp_path, [arm("smoke", "my_sweep", method="sonar", batch_size=b) for b in (2, 8)])
    spec = next(s for s in specs_for(found) if s.name == "my_sweep")
    t = build(spec, "smoke", found)
    assert [row[2].text for row in t.blocks[0].rows] == ["Sonar-MoE", "Sonar-MoE [batch_size=8]"] and not t.commands


def test_a_row_that_repeats_another_does_not_belong_to_a_papers_table(tmp_path: Path):
    """As on a fresh clone: an arm that differs in an axis that no column shows."""
    again = arm(method=SONAR, accumulation_mode="update_each")
    again["arm_id"] += "-again"
    t = table(origins(tmp_path, [arm(method=G), arm(method=SONAR), again]))
    labels = [tuple(c.text for c in row[:3]) for row in t.blocks[0].rows]
    assert len(labels) == len(set(labels)) == 16 and len(t.raw) == 16
    assert any("Not shown" in note and again["arm_id"] in note for note in t.notes)


@pytest.mark.parametrize("axis, values", [("accumulation_mode", ("standard", "fold")), ("outputs", ("kept", "dropped")),
                                          ("gpu", ("h100", "l40s")), ("data", ("own", "alpaca"))])  # fmt: skip
def test_in_a_table_of_the_users_own_the_axis_that_differs_becomes_a_label(tmp_path: Path, axis: str, values):
    made = [arm("smoke", "my_sweep", method=SONAR, **{axis: v}) for v in values]
    for one, value in zip(made, values):
        one["arm_id"] += f"-{value}"
    found = origins(tmp_path, made)
    t = build(next(s for s in specs_for(found) if s.name == "my_sweep"), "smoke", found)
    assert sorted(row[2].text for row in t.blocks[0].rows) == sorted(f"Sonar-MoE [{axis}={v}]" for v in values)


def test_two_arms_with_further_overrides_are_told_apart(tmp_path: Path):
    made = [arm(method=SONAR) for _ in range(2)]
    for one, digest in zip(made, ("-0a1b2c", "-3d4e5f")):
        one["arm_id"] += digest
    t = table(origins(tmp_path, [arm(method=SONAR), *made]))
    shown = [row[2].text for row in t.blocks[0].rows if "*" in row[2].text]
    assert len(set(shown)) == 2 and all("0a1b2c" in s or "3d4e5f" in s for s in shown)


@pytest.mark.parametrize("name", ["kernel_time", "fits_map", "batch_size"])
def test_an_experiment_with_the_name_of_a_table_takes_nobodys_place(tmp_path: Path, name: str):
    found = origins(tmp_path, [arm("smoke", name, method=SONAR)])
    specs = {s.name: s for s in specs_for(found)}
    assert all(specs[n] is s for n, s in TABLES.items())
    assert any(s.experiment == name for s in specs.values() if s not in TABLES.values())


def diverged(**axes) -> dict:
    made = arm("paper", **axes) | {"status": "diverged"}
    return made | {"error": {"type": "Diverged", "message": "diverged at step 5: the loss is not finite"}}


def test_a_run_that_diverged_is_named_with_its_step_and_counted_in_means(tmp_path: Path):
    made = [arm("paper", method=SONAR), diverged(method=G)]
    t = table(origins(tmp_path / "a", made), scale="paper")
    assert cell(t, "Peak alloc. GB (Δ)", GLOBAL, "SonicMoE").text == "diverged at step 5"
    made = [with_step(arm("paper", seed=s, method=G), ms) for s, ms in ((42, 100), (43, 110))]
    t = table(origins(tmp_path / "b", [*made, diverged(method=G, seed=44), diverged(method=G, seed=45)]), scale="paper")
    shown = cell(t, "Step ms (Δ)", GLOBAL, "SonicMoE")
    assert shown.text == "105.0 ± 7.1 (2 of 4)"
    assert sum("diverged at step 5" in t.footnotes[n - 1] for n in shown.marks) == 2
    alone = [arm("paper", method=G), diverged(method=G, seed=43)]
    t = table(origins(tmp_path / "c", alone), scale="paper")
    assert cell(t, "Step ms (Δ)", GLOBAL, "SonicMoE").text.endswith("(1 of 2)")


def test_the_clipping_table_has_its_baseline_from_the_papers_arms(tmp_path: Path):
    made = [arm(method=G), arm("forecast", "clipping", method="sonar_exact_clip")]
    t = table(origins(tmp_path, made), "clipping")
    assert "%" in cell(t, "Peak alloc. GB (Δ)", "Sonar-MoE (exact clip)").text


def test_latex_fits_its_page_and_does_not_number_its_caption(tmp_path: Path):
    made = [arm(method=m, backend=b) for m in FOUR for b in ("sonicmoe", "scattermoe")]
    text = latex(table(origins(tmp_path, made)))
    assert r"\begin{sidewaystable}" in text and r"\begin{adjustbox}{max width=\linewidth}" in text
    assert r"\caption{memory, step time" in text and "Table 1" not in text.split(r"\caption{")[1].split("}")[0]
    narrow = latex(table(origins(tmp_path, [arm("paper", "table7", method=G)]), "table7", "paper"))
    assert r"\begin{table}[t]" in narrow and "sideways" not in narrow.split("\n", 1)[1]


# -- fair comparisons ------------------------------------------------------------------------------------------------


def test_different_data_in_one_comparison_is_refused_by_name(tmp_path: Path):
    other = arm(method=SONAR)
    other["data"]["sha256"] = "f" * 64
    t = table(origins(tmp_path, [arm(method=G), other]))
    assert not t.blocks and "saw different data" in t.refused and "\n" not in t.refused
    assert arm(method=G)["arm_id"] in t.refused and other["arm_id"] in t.refused


def test_different_data_in_different_comparisons_is_fine(tmp_path: Path):
    other = arm(method=SONAR, model="granite")
    other["data"]["sha256"] = "f" * 64
    assert table(origins(tmp_path, [arm(method=G), other])).refused is None


def test_another_schema_in_a_comparison_is_refused_by_name(tmp_path: Path):
    t = table(origins(tmp_path, [arm(method=G), arm(method=SONAR) | {"schema_version": "2.0"}]))
    assert "schema 2.0" in t.refused and arm(method=SONAR)["arm_id"] in t.refused


def test_step_times_of_different_devices_are_not_compared(tmp_path: Path):
    other = arm("paper", method=SONAR)
    other["environment"]["device_name"] = "another card"
    t = table(origins(tmp_path, [arm("paper", method=G), other]), scale="paper")
    assert "%" not in cell(t, "Step ms (Δ)", SONARS, "SonicMoE").text
    assert "%" in cell(t, "Peak alloc. GB (Δ)", SONARS, "SonicMoE").text
    assert any("another device" in f for f in t.footnotes)


@pytest.mark.parametrize("experiment", ["table4", "adhoc", "table8", "my_sweep"])
def test_records_of_shorter_or_unknown_runs_do_not_stand_in(tmp_path: Path, experiment: str):
    made = [arm("paper", method=G), arm("paper", experiment, method=SONAR)]
    assert cell(table(origins(tmp_path, made), scale="paper"), "Step ms (Δ)", SONARS, "SonicMoE").text == "–"
    assert (
        cell(table(origins(tmp_path, made), scale="paper"), "Peak alloc. GB (Δ)", SONARS, "SonicMoE").text == "missing"
    )


def test_tables_of_one_family_share_their_arms_and_prefer_their_own(tmp_path: Path):
    made = [with_peak(arm(method=SONAR), 43.5), with_peak(arm(method="sonar_per_expert", experiment="table3"), 43.6)]
    t = table(origins(tmp_path, made), "table3")
    assert cell(t, "Peak alloc. GB (Δ)", "batched").text == "43.50"
    more = with_peak(arm(method=SONAR, experiment="table3"), 43.1)
    assert cell(table(origins(tmp_path, [more]), "table3"), "Peak alloc. GB (Δ)", "batched").text == "43.10"


def test_reference_records_are_labelled_come_after_and_never_mix_with_own(tmp_path: Path):
    origins(tmp_path, [with_peak(arm(method=G), 10.0)])
    t = table(origins(tmp_path, [with_peak(arm(method=SONAR), 5.0)], label="card"))
    assert [b.title for b in t.blocks] == ["your runs", "reference: card"]
    assert cell(t, "Peak alloc. GB (Δ)", SONARS, "SonicMoE").text == "missing"
    assert cell(t, "Peak alloc. GB (Δ)", SONARS, block=1).text == "5.00", (
        "no change against a baseline of another origin"
    )


def test_references_alone_are_shown_with_the_command_for_own_runs(tmp_path: Path):
    t = table(origins(tmp_path, [arm(method=SONAR)], label="card"))
    assert [b.title for b in t.blocks] == ["reference: card"]
    assert t.commands == ["python -m sonar_repro +experiment=table1 scale=forecast"]


# -- seeds and versions ----------------------------------------------------------------------------------------------


def test_seeds_give_mean_deviation_and_count_and_changes_use_common_seeds(tmp_path: Path):
    made = [with_step(arm("paper", seed=s, method=G), v) for s, v in ((42, 100), (43, 110))]
    made += [with_step(arm("paper", seed=s, method=SONAR), v) for s, v in ((43, 88), (44, 300))]
    t = table(origins(tmp_path, made), scale="paper")
    assert cell(t, "Step ms (Δ)", GLOBAL, "SonicMoE").text == "105.0 ± 7.1 (2)"  # √((5² + 5²) / 1) = 7.07
    assert cell(t, "Step ms (Δ)", SONARS, "SonicMoE").text.endswith("(−20.0%)")  # 88 against 110, seed 43 alone
    assert any("Seeds 42, 43, 44" in n for n in t.notes)


def test_same_seed_repeats_are_reported_as_noise(tmp_path: Path):
    again = with_step(arm("paper", method=G), 101)
    again["arm"]["repeat"] = 2
    again["arm_id"] += "-r2"
    t = table(origins(tmp_path, [with_step(arm("paper", method=G), 100), again]), scale="paper")
    assert cell(t, "Step ms (Δ)", GLOBAL, "SonicMoE").text == "100.0"
    assert any("1.0% in step time" in n and "1.4%" in n for n in t.notes)


def test_other_code_versions_are_a_footnote_not_a_refusal(tmp_path: Path):
    other = arm(method=SONAR)
    other["environment"]["git_commit"] = "0123456789abcdef"
    t = table(origins(tmp_path, [arm(method=G), other]))
    assert t.refused is None and any("more than one commit" in n and "0123456789ab" in n for n in t.notes)


# -- the other tables ------------------------------------------------------------------------------------------------


def test_table3_derives_the_cost_of_an_extra_call(tmp_path: Path):
    batched, single = (
        with_step(arm(method=m, experiment="table3"), ms) for m, ms in ((SONAR, 116.1), ("sonar_per_expert", 139.7))
    )
    batched["counts"] |= {"optimizer_calls_per_step": 33, "hook_firings_per_step": 32}
    single["counts"] |= {"optimizer_calls_per_step": 2049, "hook_firings_per_step": 32}
    t = table(origins(tmp_path, [batched, single]), "table3")
    assert [cell(t, "Calls", h).text for h in ("batched", "per-expert")] == ["32", "2,048"]
    assert any("costs 11.7 µs (+23.6 ms over 2,016 calls) (paper: 12.0 µs)" in n for n in t.notes)


def test_table4_shows_counts_of_weights(tmp_path: Path):
    made = record(
        {"task": "compare_weights", "method": "standard_global_clip_vs_standard_no_expert_clip"}, "paper", "table4"
    )
    made["compare"] = {
        "expert": {"differing": 3_040_000_000, "total": 6_442_450_944},
        "other": {"differing": 7, "total": 100},
    }
    t = table(origins(tmp_path, [made]), "table4", "paper")
    shown = cell(t, "Expert weights that differ", "Standard: global clip vs. no expert clip")
    assert shown.text == "3.04B" and cell(t, "Other weights that differ: paper", shown.text).text == "91.5M"
    assert t.commands == ["python -m sonar_repro +experiment=table4 scale=paper"]


def test_table6_marks_caps_within_the_stated_error_as_borderline(tmp_path: Path):
    sonar = {"method": SONAR, "optimizer": "adamw8bit", "experiment": "table6"}
    made = [with_peak(arm(**sonar), 29.9, 30.4), arm(**sonar, memory_cap_gb=46), arm(**sonar, memory_cap_gb=30.5)]
    standard = {**sonar, "method": G}
    made += [with_peak(arm(**standard), 41.8, 43.0), arm(**standard, memory_cap_gb=30.5) | {"status": "oom"}]
    t = table(origins(tmp_path, made), "table6")
    column = {h.text: i for i, h in enumerate(t.blocks[0].headers)}
    found = {row[1].text: row for row in t.blocks[0].rows if row[0].text == "8-bit AdamW" and row[2].text == "no"}
    assert found[SONARS][column["30.5 GB"]].text == "✓ (borderline)"
    assert found[SONARS][column["Runs under 46 GB"]].text == "✓"
    assert found[GLOBAL][column["30.5 GB"]].text == "OOM" and found[GLOBAL][column["30.5: paper"]].text == "OOM"


def test_table8_holds_a_method_a_column_and_the_slope(tmp_path: Path):
    steps = {(G, 1): 143.4, (N, 1): 117.3, (SONAR, 1): 116.4, (G, 4): 368.5, (N, 4): 341.7, (SONAR, 4): 451.7}
    made = [with_step(arm("paper", "table8", method=m, accumulation=a), ms) for (m, a), ms in steps.items()]
    t = table(origins(tmp_path, made), "table8", "paper")
    assert cell(t, "Sonar-MoE ms (Δ)", "4").text == "451.7 (+22.6%)"
    assert cell(t, "Sonar-MoE: paper (Δ)", "4").text == "451.7 (+23.0%)"
    assert any("A = 4" in n and "36.7 ms an extra update (paper: 37 ms)" in n for n in t.notes)
    assert "accumulation=2,8" in " ".join(t.commands)


def test_forecast_accuracy_states_median_and_largest_error(tmp_path: Path):
    made = [with_peak(arm(method=m), gb) for m, gb in ((G, 55.55 * 1.01), (N, 55.55 * 0.998), (SONAR, 43.57))]
    t = table(origins(tmp_path, made), "forecast_memory")
    peaks = next(n for n in t.notes if n.startswith("Peak allocated"))
    # Table 1: +1.00, −0.20, 0.00; Table 3: 0.00; Table 6: standard +1.00, Sonar +0.02; Table 8 at A = 1: +1.00, 0.00
    assert "8 printed numbers compared (3 distinct forecasts), median |error| 0.11%, largest +1.00%" in peaks
    savings = next(n for n in t.notes if n.startswith("Saving"))
    assert re.search(r"largest \+0\.5\d GB", savings)


# -- files -----------------------------------------------------------------------------------------------------------


SPECS = [(n, s) for n, t in TABLES.items() if isinstance(t, TableSpec) for s in t.scales]


@pytest.mark.parametrize(("name", "scale"), SPECS)
def test_every_table_renders_in_every_format(tmp_path: Path, name: str, scale: str):
    spec = TABLES[name]
    made = [
        record(axes, scale, spec.experiment)
        for axes in [{k: v for k, v in r.items() if k != "seed"} for r in spec.rows(scale)]
    ]
    t = table(origins(tmp_path, made), name, scale)
    lines = [line for line in markdown(t).splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    tex = latex(t)
    body = [line for line in tex.splitlines() if line.rstrip().endswith(r"\\")]
    spans = [sum(int(n) - 1 for n in re.findall(r"multicolumn\{(\d+)\}", line)) for line in body]
    assert len({len(re.findall(r"(?<!\\)&", line)) + more for line, more in zip(body, spans)}) == 1
    assert (
        r"\toprule" in tex
        and r"\bottomrule" in tex
        and tex.count("{") - tex.count(r"\{") == tex.count("}") - tex.count(r"\}")
    )
    assert not re.search(r"(?<!\\)[%#_](?!.*% )", re.sub(r"(?m)^%.*$|\\label\{[^}]*\}", "", tex)), "unescaped sign"
    assert tex.isascii()
    rows = list(csv.DictReader(io.StringIO(to_csv(t))))
    assert len(rows) == sum(len(b.rows) for b in t.blocks) and all(r["scale"] == scale for r in rows)


def test_csv_holds_plain_numbers_with_their_source(tmp_path: Path):
    made = [with_peak(arm(method=G), 55.41), with_peak(arm(method=SONAR), 43.5)]
    rows = list(csv.DictReader(io.StringIO(to_csv(table(origins(tmp_path, made))))))
    row = next(r for r in rows if r["method"] == SONAR and r["backend"] == "sonicmoe" and r["model"] == "olmoe")
    assert float(row["peak_allocated_gb"]) == 43.5 and row["peak_allocated_gb.source"] == "forecast"
    assert float(row["peak_allocated_gb.published"]) == 43.57
    assert float(row["peak_allocated_gb.change_pct"]) == pytest.approx(100 * (43.5 - 55.41) / 55.41)


def test_an_unknown_table_names_near_ones(tmp_path: Path):
    with pytest.raises(UserError, match="--table table11: unknown; choose .*table1"):
        specs_for([], "table11")
