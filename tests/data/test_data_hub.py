"""The hub path without a network: a cache made by hand, offline mode, pinned revisions, no ``datasets`` at all."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import yaml
from data_sets import data_config

from sonar_repro.config.schema import conf_dir
from sonar_repro.data import check_available, fetch_dataset, load_corpus, sources
from sonar_repro.errors import UserError


def of_conf(name):
    """The hub set of a file in conf/data: every field that takes no value from the scale."""
    fields = yaml.safe_load((conf_dir() / "data" / f"{name}.yaml").read_text(encoding="utf-8"))
    return {key: value for key, value in fields.items() if not str(value).startswith("${")}


ALPACA, FINEWEB = of_conf("instructions_paper"), of_conf("text_paper")
ALPACA_ID, ALPACA_REVISION = ALPACA["hub_id"], ALPACA["revision"]


@pytest.fixture
def offline(monkeypatch, tmp_path):
    for name in ("HF_DATASETS_CACHE", "XDG_CACHE_HOME", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def in_subprocess(code, **environment):
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    roots = os.pathsep.join(map(str, (Path(__file__).parents[2], Path(__file__).parents[1] / "support")))
    environment = {**keep, "PYTHONPATH": roots, **environment}
    done = processes.python("-c", code, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_offline_and_missing_names_the_set_and_the_way_out(offline):
    for call in (check_available, fetch_dataset, load_corpus):
        with pytest.raises(UserError) as caught:
            call(data_config(**ALPACA))
        text = str(caught.value)
        assert "\n" not in text
        assert f"{ALPACA_ID} at revision {ALPACA_REVISION}" in text
        assert "python -m sonar_repro task=fetch model=olmoe" in text
        assert "data.path=FILE" in text


def test_offline_text_has_no_fetch_to_offer(offline):
    with pytest.raises(UserError, match="it is streamed, so allow the network"):
        check_available(data_config(**FINEWEB))
    assert "nothing to fetch" in fetch_dataset(data_config(**FINEWEB))


def test_a_cache_at_another_revision_does_not_count(offline, tmp_path):
    folder = tmp_path / "hf" / "datasets" / "tatsu-lab___alpaca" / "default" / "0.0.0"
    (folder / ("0" * 40)).mkdir(parents=True)
    with pytest.raises(UserError, match="not in the local cache"):
        check_available(data_config(**ALPACA))
    (folder / ALPACA_REVISION).mkdir()
    check_available(data_config(**ALPACA))


def test_names_in_the_cache_are_snake_case(offline, tmp_path):
    (tmp_path / "hf" / "datasets" / "Owner___my_data-set" / "default" / "0.0.0" / "abc").mkdir(parents=True)
    check_available(data_config(source="hub", hub_id="Owner/MyData-set", revision="abc"))


def test_another_revision_that_datasets_falls_back_to_is_refused(monkeypatch):
    # Without a network and outside offline mode, datasets takes the newest cached copy, whatever its revision.
    datasets = pytest.importorskip("datasets")
    stale = SimpleNamespace(cache_files=[{"filename": f"/cache/default/0.0.0/{'0' * 40}/alpaca-train.arrow"}])
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stale)
    with pytest.raises(UserError, match=f"the cache holds another revision .{'0' * 40}"):
        sources.load_hub(data_config(**ALPACA))


@pytest.mark.parametrize("error", [ConnectionError("no route\nmore"), ValueError("BuilderConfig 'x' not found.")])
def test_errors_of_the_hub_become_one_line(monkeypatch, error):
    datasets = pytest.importorskip("datasets")

    def fail(*_, **__):
        raise error

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=str(error).splitlines()[0]) as caught:
        sources.load_hub(data_config(**ALPACA))
    assert "\n" not in str(caught.value)


MAKE_CACHE = """
import json, pathlib, datasets
home = pathlib.Path({home!r})
rows = [dict(instruction=f"Say {{i}}.", input="", output=str(i), text="") for i in range(40)]
built = datasets.Dataset.from_list(rows)
folder = home / "datasets" / "tatsu-lab___alpaca" / "default" / "0.0.0" / {revision!r}
folder.mkdir(parents=True)
writer = datasets.arrow_writer.ArrowWriter(path=str(folder / "alpaca-train.arrow"), features=built.features)
for row in rows:
    writer.write(row)
count, size = writer.finalize()
split = datasets.SplitInfo(name="train", num_bytes=size, num_examples=count, dataset_name="alpaca")
splits = datasets.splits.SplitDict({{"train": split}}, dataset_name="alpaca")
info = datasets.DatasetInfo(features=built.features, builder_name="parquet", dataset_name="alpaca",
    config_name="default", version=datasets.Version("0.0.0"), splits=splits)
info.write_to_directory(str(folder))
"""

USE_CACHE = """
import json, sys
from data_sets import data_config
from sonar_repro.data import load_corpus, fetch_dataset
spec = data_config(**json.loads({spec!r}))
corpus = load_corpus(spec)
print(json.dumps([fetch_dataset(spec), [e.index for e in corpus.train], corpus.describe()["source"]["revision"]]))
"""


def test_a_cached_hub_set_is_read_offline_in_the_papers_order(tmp_path):
    datasets = pytest.importorskip("datasets")
    in_subprocess(MAKE_CACHE.format(home=str(tmp_path), revision=ALPACA_REVISION), HF_HOME=str(tmp_path))
    spec = json.dumps({**ALPACA, "train_examples": 8, "heldout_count": 4})
    output = in_subprocess(USE_CACHE.format(spec=spec), HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    said, train, revision = json.loads(output.splitlines()[-1])
    assert said == f"{ALPACA_ID} at revision {ALPACA_REVISION}: 40 rows in the cache"
    assert train == datasets.Dataset.from_dict({"row": range(40)}).shuffle(seed=42)["row"][:8]
    assert revision == ALPACA_REVISION


WITHOUT = """
import sys
sys.modules["datasets"] = None  # importing it now raises ImportError
from data_sets import data_config
from sonar_repro.data import load_corpus
from sonar_repro.errors import UserError
assert len(load_corpus(data_config(train_examples=8, heldout_count=2)).train) == 8
assert len(load_corpus(data_config(kind="text", train_examples=8, heldout_count=2)).train) == 8
try:
    load_corpus(data_config(source="hub", hub_id="tatsu-lab/alpaca", revision="x"))
except UserError as error:
    print(error)
"""


def test_embedded_sets_need_no_datasets_library():
    assert "pip install datasets" in in_subprocess(WITHOUT)


CHECK_ONLY = """
import sys
from data_sets import data_config
from sonar_repro.data.sources import check_available
check_available(data_config())
print(sorted({"torch", "transformers", "datasets", "tokenizers", "numpy"} & set(sys.modules)))
"""


def test_checking_a_config_imports_nothing_heavy():
    assert in_subprocess(CHECK_ONLY) == "[]"
