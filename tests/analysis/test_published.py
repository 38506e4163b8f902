"""The published numbers as data: complete, self-consistent, and found by axes."""

import pytest

from analysis.metrics import METRICS, metric
from analysis.published import FILES, paper

SONAR = paper("sonar")


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        ("Table 1", 16),
        ("Table 2", 3),
        ("Table 3", 4),
        ("Table 4", 5),
        ("Table 5", 2),
        ("Table 6", 9 + 7),
        ("Table 7", 3),
        ("Table 8", 12),
    ],
)
def test_every_table_has_all_its_rows(source: str, rows: int):
    assert sum(r.source == source for r in SONAR.rows) == rows


def test_printed_changes_follow_from_printed_values():
    """Table 1 prints absolute values and changes: each change follows from its own block's values.

    0.05 is the rounding of the change, as much again comes from values printed to 0.1 ms.
    """
    checked = 0
    for row in (r for r in SONAR.rows if r.source == "Table 1" and r.changes_pct):
        base = SONAR.find("Table 1", {**row.axes, "method": "standard_global_clip"})
        for name, printed in row.changes_pct.items():
            computed = 100 * (row.values[name] - base.values[name]) / base.values[name]
            assert computed == pytest.approx(printed, abs=0.1), (row.stated, name)
            checked += 1
    assert checked == 24


def test_reused_rows_agree_between_tables():
    """Tables 3 and 7 take rows of Table 1: the same arm has the same printed values."""
    for source in ("Table 3", "Table 7"):
        for row in (r for r in SONAR.rows if r.source == source):
            first = SONAR.find("Table 1", row.axes)
            for name in set(row.values) & set(first.values if first else ()):
                assert row.values[name] == first.values[name]


def test_tables_and_text_agree():
    """Savings, slowdowns and costs in the text follow from the tables (printed to one digit, or rounded to a whole)."""
    g, n, s = ({"model": "olmoe", "method": m} for m in ("standard_global_clip", "standard_no_expert_clip", "sonar"))
    table1 = {k: SONAR.find("Table 1", a).values for k, a in (("g", g), ("s", s))}
    assert SONAR.statement("saving_olmoe").value == pytest.approx(
        table1["g"]["peak_allocated_gb"] - table1["s"]["peak_allocated_gb"], abs=0.05
    )
    for a in (2, 4, 8):
        step = {
            k: SONAR.find("Table 8", {**axes, "accumulation": a}).values["step_ms"]
            for k, axes in (("g", g), ("n", n), ("s", s))
        }
        assert SONAR.statement(f"slowdown_A{a}").value == pytest.approx(
            100 * (step["s"] - step["g"]) / step["g"], abs=0.6
        )
        assert SONAR.statement(f"update_cost_A{a}").value == pytest.approx((step["s"] - step["n"]) / (a - 1), abs=0.6)
    steps = [
        SONAR.find("Table 3", {"model": "olmoe", "method": m}).values["step_ms"] for m in ("sonar", "sonar_per_expert")
    ]
    assert SONAR.statement("per_call_olmoe").value == pytest.approx(1e3 * (steps[1] - steps[0]) / (2048 - 32), abs=0.5)


@pytest.mark.parametrize("name", FILES)
def test_every_printed_metric_is_registered_and_has_a_unit_and_a_direction(name: str):
    book = paper(name)
    printed = {k for row in book.rows for k in row.values} | {s.metric for s in book.statements}
    assert all(metric(m).name == m for m in printed)
    assert all(METRICS[m].direction in ("lower", "higher", "none") for m in printed & set(METRICS))


def test_defaults_fill_what_a_row_does_not_say():
    row = SONAR.find("Table 6", {"model": "olmoe", "method": "sonar", "optimizer": "adamw8bit", "checkpointing": True})
    assert row.values["peak_allocated_gb"] == 29.61
    assert SONAR.find("Table 6", {"model": "olmoe", "method": "sonar", "batch_size": 4}) is None
    assert SONAR.find("Table 6", {"model": "olmoe", "method": "sonar", "memory_cap_gb": 46}).status == "ok"
    eight_bit = {"model": "olmoe", "optimizer": "adamw8bit", "memory_cap_gb": 30.5}
    assert SONAR.find("Table 6", {**eight_bit, "method": "optimizer_in_backward"}).status == "oom"


def test_mesh_holds_what_the_prose_prints():
    mesh = paper("mesh")
    state = {"mesh_adamw": 0.883, "direct": 0.331, "mesh": 0.331, "mesh_b": 0.331, "mesh_b_full": 0.430}
    for optimizer, printed in state.items():
        table = "Table 2" if optimizer == "mesh_b_full" else "Table 1"
        assert mesh.find(table, {"model": "nanowhale", "optimizer": optimizer}).values["optimizer_state_gb"] == printed
    full = mesh.find("Table 2", {"model": "nanowhale", "optimizer": "mesh_b_full", "seed": 42})
    assert full.values == {"optimizer_state_gb": 0.430, "heldout_loss": 3.6187}
    assert mesh.statement("state_saving").value == -62.5 == pytest.approx(100 * (0.331 - 0.883) / 0.883, abs=0.05)
