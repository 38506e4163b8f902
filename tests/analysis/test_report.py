"""The report: one file, nothing from outside, every table and figure, and why a number is missing."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from analysis_helpers import SONAR, G, arm, with_peak
from browser import chromium, look
from synthetic import fill, put

from analysis.figures import FIGURES
from analysis.run import write_report
from analysis.tables import TABLES
from sonar_repro.errors import UserError

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Outline(HTMLParser):
    """Checks that tags close in order, and collects ids, links and what is loaded."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.loads, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if tag == "a" else []
        self.loads += [found[k] for k in ("src", "href", "srcset", "data") if k in found and tag != "a"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)


def page(root: Path, out: Path) -> Outline:
    write_report(root, out)
    outline = Outline()
    outline.feed((out / "report.html").read_text(encoding="utf-8"))
    assert outline.open == []
    return outline


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    root, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("out")
    fill(root)
    return page(root, out), out


def test_the_page_loads_nothing_and_runs_nothing(full):
    outline, out = full
    assert outline.loads and all(x.startswith("data:") for x in outline.loads)
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text and not re.search(r"@import|url\(\s*['\"]?(?!data:)", text)


def test_every_table_and_figure_has_its_place_and_every_link_a_target(full):
    outline, _ = full
    assert {*TABLES, *FIGURES} <= set(outline.ids)
    assert len(outline.ids) == len(set(outline.ids))
    assert {link[1:] for link in outline.links} <= set(outline.ids)


def test_the_page_says_for_each_printed_number_ours_or_why_there_is_none(tmp_path: Path):
    put(tmp_path / "runs", with_peak(arm(method=G), 55.41))
    put(tmp_path / "runs", arm(method=SONAR) | {"status": "failed", "error": {"message": "it broke", "phase": "build"}})
    outline = page(tmp_path / "runs", tmp_path / "out")
    text = " ".join(outline.text)
    assert "55.41" in text and "failed in build: it broke" in text
    assert "python -m sonar_repro +experiment=table1 scale=forecast model=granite" in text
    assert re.search(r"Sonar-MoE: \d+ of 2\d\d", text)


def test_an_empty_runs_folder_gives_a_page_of_commands(tmp_path: Path):
    text = " ".join(page(tmp_path / "runs", tmp_path / "out").text)
    for spec in TABLES.values():
        assert f"+experiment={spec.experiment}" in text
    assert "holds" in text and "No records yet" in text


def test_damaged_and_refused_records_are_on_the_page_and_the_exit_code_says_so(tmp_path: Path):
    other = arm(method=SONAR)
    other["data"]["sha256"] = "f" * 64
    for made in (arm(method=G), other):
        put(tmp_path / "runs", made)
    put(tmp_path / "runs", arm(method="sonar_per_expert", experiment="table3")).write_text("{")
    assert write_report(tmp_path / "runs", tmp_path / "out") == 2
    text = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "saw different data" in text and "not JSON" in text


def test_names_from_records_cannot_change_the_page(tmp_path: Path):
    made = arm("smoke", "adhoc", method=SONAR)
    made["environment"]["device_name"] = "<script>alert(1)</script>"
    made["arm"]["model"] = "<b>&model"
    put(tmp_path / "runs", made)
    write_report(tmp_path / "runs", tmp_path / "out")
    text = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "<script" not in text and "<b>&model" not in text and "&lt;b&gt;&amp;model" in text


# -- the browser check (make check-report runs it on the real page) ----------------------------------------------------


def browser() -> bool:
    try:
        return bool(chromium())
    except UserError:
        return False


needs_chromium = pytest.mark.skipif(not browser(), reason="no Chromium on this machine")


def test_without_a_browser_the_check_says_how_to_get_one(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="apt-get install chromium"):
        chromium()


FAULTS = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><body><p>Text</p>
<div style="width:900px">wide</div><p style="font-size:7px">tiny</p><img src="http://127.0.0.1:9/x.png">
<script>console.error("first"); absent()</script>"""
FINE = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><body><p>Text</p>'


@needs_chromium
def test_the_check_finds_every_kind_of_fault_and_none_in_a_sound_page(tmp_path: Path):
    file = tmp_path / "report.html"
    file.write_text(FAULTS, encoding="utf-8")
    said = "; ".join(look(file, 390, tmp_path).faults)
    for part in ("908 px", "11 px", "do not show", "http://127.0.0.1:9/x.png", "first", "absent is not defined"):
        assert part in said, said
    file.write_text(FINE, encoding="utf-8")
    result = look(file, 390, tmp_path)
    assert result.faults == [] and result.picture.stat().st_size > 1_000
