"""Loading a checkpoint in the hub's layout: every expert in its place, no second copy, nothing random."""

import json
import shutil
import weakref

import hub_layout
import pytest
import torch
import transformers.core_model_loading as core
from safetensors.torch import load_file, save_file

from sonar_repro.config.schema import Config, ModelConfig
from sonar_repro.errors import UserError
from sonar_repro.harness.plan import preflight
from sonar_repro.models import files
from sonar_repro.models.build import _one_tensor_at_a_time, load_pretrained, load_tokenizer, pretrained_architecture
from sonar_repro.tasks import fetch

KINDS = ("olmoe", "granitemoe")


def load(group: ModelConfig, experts: str = "grouped_mm", dtype=torch.bfloat16):
    return load_pretrained(group, dtype=dtype, device="cpu", experts=experts, attention="sdpa")


@pytest.fixture
def checkpoint(tmp_path):
    def make(kind="olmoe", **sizes):
        model = hub_layout.tiny_model(kind, **sizes)
        tensors = hub_layout.on_disk(model)
        return model, tensors, hub_layout.write(tmp_path / kind, model, tensors)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_every_expert_comes_back(kind, checkpoint):
    model, tensors, group = checkpoint(kind)
    loaded = load(group)
    wanted = dict(model.named_parameters())
    got = dict(loaded.named_parameters())
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == torch.bfloat16 and torch.equal(got[name], value), name
    # By the names on disk, independently of the model that was saved: gate rows first, then up rows.
    if kind == "olmoe":
        for layer in range(2):
            batched = got[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
            assert batched.shape == (hub_layout.EXPERTS, 2 * 16, 32)
            for e in range(hub_layout.EXPERTS):
                disk = [tensors[f"model.layers.{layer}.mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]
                assert torch.equal(batched[e], torch.cat(disk))
    assert loaded.config._experts_implementation == "grouped_mm"


def test_another_dtype_is_cast_once_on_the_way(checkpoint):
    model, _, group = checkpoint()
    loaded = load(group, dtype=torch.float32)
    for (name, got), (_, value) in zip(loaded.named_parameters(), model.named_parameters()):
        assert got.dtype == torch.float32 and torch.equal(got, value.float()), name


def test_a_loaded_model_computes_what_the_saved_one_did(checkpoint):
    model, _, group = checkpoint("granitemoe")
    ids = torch.arange(24).view(2, 12)
    loaded = load(group, experts="eager")
    model.set_experts_implementation("eager")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


def _peak_of_pieces(monkeypatch, action) -> int:
    """Largest number of bytes of per-expert tensors read from disk that were alive at once."""
    live, peak = [0], [0]
    materialize = core._materialize_copy

    def counted(*args, **kwargs):
        tensor = materialize(*args, **kwargs)
        live[0] += tensor.nbytes
        peak[0] = max(peak[0], live[0])
        size = tensor.nbytes
        weakref.finalize(tensor, lambda: live.__setitem__(0, live[0] - size))
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(core, "_materialize_copy", counted)
        action()
    return peak[0]


def test_no_second_copy_of_the_experts_is_alive(checkpoint, monkeypatch):
    """Pieces are merged one target tensor at a time: never more than one gate/up tensor's worth of them is alive.

    transformers' default reads ahead in threads and can hold the whole checkpoint in pieces; that is switched off.
    """
    model, tensors, group = checkpoint(layers=8, hidden=64, width=64)
    gate_up = max(p.nbytes for name, p in model.named_parameters() if "gate_up" in name)
    others = max(
        t.nbytes for name, t in tensors.items() if ".experts." not in name
    )  # not merged: they stay as they are
    kept = sum(t.nbytes for name, t in tensors.items() if ".experts." not in name)
    experts = sum(t.nbytes for name, t in tensors.items() if ".experts." in name)
    peak = _peak_of_pieces(monkeypatch, lambda: load(group))
    assert peak <= kept + gate_up + others
    assert gate_up < experts / 8  # the bound is far under a second copy


def test_the_switch_is_put_back(monkeypatch):
    import os

    for before in (None, "0"):
        monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
        if before:
            monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", before)
        with pytest.raises(KeyError), _one_tensor_at_a_time():
            assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "1"
            raise KeyError
        assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") == before


def _without(*names):
    return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


def _cut(name, rows):
    return lambda tensors: {**tensors, name: tensors[name][:rows]}


E0 = "model.layers.1.mlp.experts.3"
FAULTS = {
    "router": ("olmoe", _without("model.layers.0.mlp.gate.weight"), "lacks 1 weights, model.layers.0.mlp.gate.weight"),
    "head": ("olmoe", _without("lm_head.weight"), "lacks 1 weights, lm_head.weight"),
    "embedding": ("granitemoe", _without("model.embed_tokens.weight"), "lacks 2 weights, lm_head.weight first"),
    "experts of a layer": (
        "granitemoe",
        _without("model.layers.1.block_sparse_moe.input_linear.weight"),
        "gate_up_proj",
    ),
    "one projection": ("olmoe", _without(f"{E0}.gate_proj.weight"), "cannot be merged"),
    "one expert": (
        "olmoe",
        _without(*(f"{E0}.{p}_proj.weight" for p in ("gate", "up", "down"))),
        r"down_proj as \[11, 32, 16\]",
    ),
    "one expert's down": ("olmoe", _without(f"{E0}.down_proj.weight"), r"down_proj as \[11, 32, 16\]"),
    "cut expert": ("olmoe", _cut(f"{E0}.down_proj.weight", 8), "cannot be merged"),
    "cut norm": ("olmoe", _cut("model.norm.weight", 8), r"model.norm.weight as \[8\] and its config wants \[32\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_lacks_weights_is_refused(fault, tmp_path):
    """No weight is ever random: whatever is missing or cut, one line says so."""
    kind, damage, words = FAULTS[fault]
    model = hub_layout.tiny_model(kind)
    group = hub_layout.write(tmp_path / "damaged", model, damage(hub_layout.on_disk(model)))
    with pytest.raises(UserError, match=words) as caught:
        load(group)
    assert "\n" not in str(caught.value) and "complete checkpoint" in str(caught.value) or "fits" in str(caught.value)


def test_weights_that_the_model_does_not_have_are_named(checkpoint, capsys, tmp_path):
    model, tensors, _ = checkpoint()
    group = hub_layout.write(tmp_path / "more", model, {**tensors, "value_head.weight": torch.ones(2, 2)})
    load(group)
    assert "value_head.weight" in capsys.readouterr().out


def _remove(name):
    return lambda folder: (folder / name).unlink()


def _to_bin(folder):
    for file in folder.glob("model*"):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def _break_index(folder):
    (folder / files.INDEX).write_text("{}")


MISSING = {
    "config": (_remove("config.json"), "config.json is missing"),
    "shard": (_remove("model-00002-of-00003.safetensors"), "model-00002-of-00003.safetensors is missing"),
    "tokenizer": (_remove("tokenizer.json"), "tokenizer.json is missing"),
    "bin": (_to_bin, "only safetensors are read"),
    "index": (_break_index, "not an index of safetensors shards"),
    "all": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_folder_that_is_not_whole_names_the_file(what, checkpoint, tmp_path):
    damage, words = MISSING[what]
    _, _, group = checkpoint()
    damage(tmp_path / "olmoe")
    for call in (load, load_tokenizer, pretrained_architecture):
        with pytest.raises(UserError, match=words) as caught:
            call(group)
        assert "\n" not in str(caught.value)


def test_a_checkpoint_in_one_file_needs_no_index(checkpoint, tmp_path):
    model, tensors, group = checkpoint()
    folder = tmp_path / "olmoe"
    for file in [*folder.glob("model-*"), folder / files.INDEX]:
        file.unlink()
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / files.WEIGHTS, metadata={"format": "pt"})
    assert all(torch.equal(a, b) for a, b in zip(load(group).parameters(), model.parameters()))


def test_code_in_a_checkpoint_is_never_run(checkpoint, tmp_path):
    _, _, group = checkpoint()
    folder = tmp_path / "olmoe"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n")
    for call in (load, pretrained_architecture):
        with pytest.raises(UserError, match="cannot be loaded|no usable config"):
            call(group)
    assert not marker.exists()


def test_pretrained_needs_accelerate_and_says_so(checkpoint, monkeypatch):
    _, _, group = checkpoint()
    monkeypatch.setattr("sonar_repro.models.build.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install accelerate"):
        load(group)


# -- the hub's cache, offline ----------------------------------------------------------------------------------------

REVISION = "6d84c48581ece794365f2b8e9cfb043c68ade9c5"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache for this process, offline; ``fill`` puts a checkpoint folder into it at a revision."""
    import huggingface_hub.constants as constants

    home = tmp_path / "hub"
    home.mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for module in (constants, __import__("huggingface_hub.file_download", fromlist=["x"])):
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, str(home))

    def fill(folder, repo="allenai/OLMoE-1B-7B-0924", revision=REVISION):
        snapshot = home / f"models--{repo.replace('/', '--')}" / "snapshots" / revision
        snapshot.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder, snapshot)
        return snapshot

    return fill


def hub_group(**more):
    return ModelConfig(
        **{"name": "olmoe", "weights": "pretrained", "hub_id": "allenai/OLMoE-1B-7B-0924", "revision": REVISION, **more}
    )


def test_offline_a_missing_file_is_named_with_the_way_to_it(cache, checkpoint, tmp_path):
    with pytest.raises(UserError, match="config.json of allenai/OLMoE-1B-7B-0924 at revision 6d84c48581ec"):
        files.check_available(hub_group())
    checkpoint()
    snapshot = cache(tmp_path / "olmoe")
    files.check_available(hub_group())
    (snapshot / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match="model-00003-of-00003.safetensors .*task=fetch model=olmoe.*model.path=FOLDER"):
        files.check_available(hub_group())


def test_another_revision_in_the_cache_does_not_count(cache, checkpoint, tmp_path):
    checkpoint()
    cache(tmp_path / "olmoe", revision="0" * 40)
    with pytest.raises(UserError, match="not in the local cache"):
        files.check_available(hub_group())


def test_the_cached_checkpoint_is_loaded_offline(cache, checkpoint, tmp_path):
    model, _, _ = checkpoint()
    cache(tmp_path / "olmoe")
    group = hub_group()
    assert all(torch.equal(a, b) for a, b in zip(load(group).parameters(), model.parameters()))
    assert load_tokenizer(group).eos_token == "<|endoftext|>"
    assert pretrained_architecture(group).num_hidden_layers == 2


def test_random_weights_on_hub_data_need_the_tokenizer_alone(cache, checkpoint, tmp_path):
    checkpoint()
    snapshot = cache(tmp_path / "olmoe")
    for file in snapshot.glob("*.safetensors"):
        file.unlink()
    assert load_tokenizer(hub_group(weights="random")).eos_token == "<|endoftext|>"
    with pytest.raises(UserError, match="model-00001-of-00003.safetensors"):
        load_tokenizer(hub_group())


def test_preflight_refuses_a_missing_checkpoint_before_anything_starts(cache, tmp_path, monkeypatch):
    monkeypatch.setattr("sonar_repro.machine.cuda_device_count", lambda: 1)
    config = Config(runs_dir=str(tmp_path / "runs"), model=hub_group(weights="pretrained"))
    config.scale.device = "cuda"
    config.data.train_examples = 200
    with pytest.raises(UserError, match="config.json of allenai/OLMoE-1B-7B-0924"):
        preflight([config])


# -- task=fetch ------------------------------------------------------------------------------------------------------


def test_fetch_offline_is_one_line(cache):
    with pytest.raises(UserError, match="config.json .*offline mode is on .HF_HUB_OFFLINE.; unset it"):
        fetch.run(Config(model=hub_group()))


def test_fetch_of_what_is_there_says_where(cache, checkpoint, tmp_path, capsys, monkeypatch):
    checkpoint()
    snapshot = cache(tmp_path / "olmoe")
    monkeypatch.setattr(fetch, "fetch_dataset", lambda spec: f"{spec.hub_id}@{spec.revision[:6]}")
    fetch.run(Config(model=hub_group()))
    out = capsys.readouterr().out
    assert str(snapshot) in out
    assert "tatsu-lab/alpaca@dce01c" in out  # the paper's data, whatever scale the command names


def test_fetch_takes_safetensors_and_small_files_at_the_revision(cache, checkpoint, tmp_path, monkeypatch):
    checkpoint()
    asked = {}

    def download(repo, revision, allow_patterns):
        asked.update(repo=repo, revision=revision, patterns=allow_patterns)
        cache(tmp_path / "olmoe")

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert "is in the cache" in fetch.fetch_model(Config(model=hub_group()))
    assert asked["repo"] == "allenai/OLMoE-1B-7B-0924" and asked["revision"] == REVISION
    assert "*.safetensors" in asked["patterns"] and not any(".bin" in p or ".py" in p for p in asked["patterns"])


@pytest.mark.parametrize("error", [ConnectionError("no route\nmore"), ValueError("bad id"), TimeoutError()])
def test_a_failed_download_is_one_line(cache, monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(UserError, match="cannot be downloaded") as caught:
        fetch.fetch_model(Config(model=hub_group()))
    assert "\n" not in str(caught.value) and (str(error).splitlines() or ["TimeoutError"])[0] in str(caught.value)


def test_a_full_disk_is_told_before_the_download(cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5e9}))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("was started"))
    with pytest.raises(UserError, match="13.8 GB and .* 5.0 GB free; set HF_HOME"):
        fetch.fetch_model(Config(model=hub_group(parameters={"full": 6919161856})))


def test_models_without_a_checkpoint_have_nothing_to_fetch():
    assert "nothing to fetch" in fetch.fetch_model(Config(model=ModelConfig(name="own", hub_id=None)))
    with pytest.raises(UserError, match="has no checkpoint; use model.weights=random or model.path=FOLDER"):
        load(ModelConfig(name="own", hub_id=None))


def test_what_is_on_disk_is_really_one_tensor_an_expert(checkpoint, tmp_path):
    """The checkpoint of these tests has the hub's names (read from the repository's own index)."""
    checkpoint()
    names = {k for file in (tmp_path / "olmoe").glob("*.safetensors") for k in load_file(file)}
    assert "model.layers.0.mlp.experts.11.gate_proj.weight" in names
    assert not any("gate_up" in name for name in names)
