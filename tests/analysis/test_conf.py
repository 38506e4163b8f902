"""What analysis takes from conf/: the grid of every table, names of every option, and which experiments are alike."""

from pathlib import Path

import pytest
import yaml

from analysis import conf
from analysis.axes import display
from analysis.tables import TABLES
from analysis.tables.spec import TableSpec

GRIDS = {
    "table1": 16, "table2": 3, "table3": 4, "table4": 5, "table5": 2, "table6": 12, "table7": 4, "table8": 4,
    "kernel_time": 6, "batch_size": 15, "clipping": 7, "mesh_table1": 4, "mesh_table2": 7, "mesh_table3": 8,
    "mesh_table4": 7,
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n, t in TABLES.items() if isinstance(t, TableSpec)])
def test_every_table_has_the_rows_of_its_experiment_at_every_scale(name: str):
    spec = TABLES[name]
    for scale in spec.scales:
        assert len(spec.rows(scale)) == GRIDS[name]


def test_rows_differ_by_scale_as_the_scale_file_says():
    backends = {s: list(dict.fromkeys(r["backend"] for r in TABLES["table1"].rows(s))) for s in conf.SCALES}
    assert backends["smoke"] == ["grouped_mm", "eager"]
    assert backends["forecast"] == backends["paper"] == ["sonicmoe", "scattermoe"]
    assert conf.arms("table6", "smoke")["memory_cap_gb"] == [None]
    assert conf.arms("table6", "paper")["memory_cap_gb"] == [None, 46, 30.5]
    assert [conf.arms("mesh_table1", s)["batch_size"] for s in conf.SCALES] == [[16], [8], [8]]


@pytest.mark.parametrize("group", ["model", "backend", "method", "optimizer"])
def test_every_option_has_a_title(group: str):
    names = list(conf.options(group))
    assert names and all(conf.title(group, name) for name in names)
    assert display(group, "nosuch") == "nosuch"


def test_a_new_method_and_experiment_are_one_file_each(tmp_path: Path, monkeypatch):
    """A copy of conf/ with one method more: its name is printed, its colour is its own, its experiment has a grid."""
    import shutil

    from analysis.figures import style

    shutil.copytree(conf.folder(), tmp_path / "conf")
    (tmp_path / "conf/method/mine.yaml").write_text("name: mine\ntitle: My method\nin_backward: experts\n")
    sweep = {"hydra": {"sweeper": {"params": {"model": "olmoe,granite", "method": "sonar,mine"}}}}
    (tmp_path / "conf/experiment/my_sweep.yaml").write_text(yaml.safe_dump({"experiment_name": "my_sweep", **sweep}))
    monkeypatch.setattr(conf, "folder", lambda: tmp_path / "conf")
    caches = [conf.options, conf.experiment, conf.arms, conf.defaults, conf.settings, style.order]
    try:
        for cache in caches:
            cache.cache_clear()
        assert display("method", "mine") == "My method" and "mine" in style.order("method")
        assert conf.arms("my_sweep", "smoke")["method"] == ["sonar", "mine"]
        assert conf.arms("my_sweep", "smoke")["model"] == ["olmoe", "granite"]
    finally:
        monkeypatch.undo()
        for cache in caches:
            cache.cache_clear()


def test_experiments_that_run_their_arms_alike_may_show_each_others_records():
    def like_table1(scale: str) -> set[str]:
        return {e for e in conf.options("experiment") if conf.settings(e, scale) == conf.settings("table1", scale)}

    alike = {s: like_table1(s) for s in conf.SCALES}
    assert {"table2", "table3", "table5", "table7"} <= alike["paper"]
    assert not {"table4", "table6", "table8", "figure2", "figure3", "figure4", "fits"} & alike["paper"]
    assert {"table6", "table8", "figure2", "figure3", "figure4"} <= alike["forecast"], "a forecast has no length"
    assert not {"table4", "fits", "mesh_table1"} & alike["forecast"]
    assert conf.settings("my_sweep", "paper") is None


def test_per_scale_values_in_place_of_two_places_are_read():
    text = '${per_scale:{smoke: "42,43", forecast: 42, paper: "42,43,44"}}'
    assert [conf._items(conf._resolved(text, "table1", s)) for s in conf.SCALES] == [[42, 43], [42], [42, 43, 44]]
