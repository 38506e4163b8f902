"""Printed tables: nothing wider than the terminal, nothing lost, and numbers as the field writes them."""

import io
from pathlib import Path

import pytest
from analysis_helpers import FOUR, arm, origins
from rich.console import Console

from analysis import format as fmt
from analysis.tables import TABLES
from analysis.tables.build import build
from analysis.tables.spec import Block, Cell, Header, Table
from analysis.tables.terminal import panels, terminal


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("scale", ["smoke", "forecast", "paper"])
def test_no_table_line_is_wider_than_the_terminal_and_every_cell_is_printed(tmp_path: Path, width: int, scale: str):
    made = [arm(scale, method=m, backend=b) for m in FOUR for b in ("grouped_mm", "sonicmoe")]
    t = build(TABLES["table1"], scale, origins(tmp_path, made))
    out = io.StringIO()
    terminal(t, Console(file=out, width=width, highlight=False))
    lines = out.getvalue().splitlines()
    commands = [line for line in lines if "python -m" in line]  # to be copied: never folded
    assert max(len(line) for line in lines if line not in commands) <= width
    for row in t.blocks[0].rows:
        assert all(c.text in out.getvalue() for c in row)


def test_a_block_without_groups_is_printed_whole():
    table = Table("made_up", "A table", "smoke")
    table.blocks.append(Block(None, [Header("Name"), Header("Value", kind="ours")]))
    table.blocks[0].rows += [[Cell("first", kind="label"), Cell("1")], [Cell("second", kind="label"), Cell("2")]]
    out = io.StringIO()
    terminal(table, Console(file=out, width=80, highlight=False))
    assert "first" in out.getvalue() and "second" in out.getvalue()


def test_a_metric_keeps_its_printed_value_and_error_beside_it(tmp_path: Path):
    t = build(TABLES["table1"], "forecast", origins(tmp_path, [arm(method=m) for m in FOUR]))
    block = t.blocks[0]
    for columns in panels(block, 60):
        kinds = [block.headers[i].kind for i in columns]
        assert kinds[0] == "label" and "ours" in kinds
        for i in columns:
            if block.headers[i].kind in ("published", "error"):
                assert i - 1 in columns
    shown = [i for columns in panels(block, 60) for i in columns if block.headers[i].kind != "label"]
    assert sorted(shown) == [i for i, h in enumerate(block.headers) if h.kind != "label"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fmt.fixed(-1.25, 1), "−1.2"),
        (fmt.fixed(-0.001, 2), "0.00"),
        (fmt.fixed(12345.6, 0), "12,346"),
        (fmt.fixed(None, 2), "–"),
        (fmt.percent(-21.57), "−21.6%"),
        (fmt.percent(0.04), "0.0%"),
        (fmt.percent(3.0), "+3.0%"),
        (fmt.signed(0.0024, 4), "+0.0024"),
        (fmt.spread(1.2577, 0.0016, 3, 4), "1.2577 ± 0.0016 (3)"),
        (fmt.spread(1.2577, None, 1, 4), "1.2577"),
        (fmt.count(3_040_000_000), "3.04B"),
        (fmt.count(91_500_000), "91.5M"),
        (fmt.count(0), "0"),
    ],
)
def test_numbers_are_written_as_the_field_writes_them(text: str, expected: str):
    assert text == expected


@pytest.mark.parametrize(
    ("values", "least", "expected"), [([55.4, 43.5], 2, 2), ([0.43], 2, 3), ([0.00264], 2, 5), ([0, None], 2, 2)]
)
def test_small_values_keep_three_significant_digits(values, least: int, expected: int):
    assert fmt.decimals_for(values, least) == expected
