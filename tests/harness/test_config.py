"""The Hydra tree: every file composes, every mistake is one line and exit code 2, identities are stable."""

import dataclasses
from pathlib import Path

import processes
import pytest
from composing import composed, run_main

from sonar_repro.config.identity import arm_id, axes, fingerprint, parameter_count
from sonar_repro.config.schema import GROUPS, conf_dir, from_dict

CONF = conf_dir()
FILES = sorted(p.relative_to(CONF) for p in CONF.rglob("*.yaml"))
OPTIONS = [f for f in FILES if f.parent.name in GROUPS and f.parent.name != "experiment"]
EXPERIMENTS = sorted(f.stem for f in FILES if f.parent.name == "experiment")
SCALES = sorted(f.stem for f in FILES if f.parent.name == "scale")


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_every_option_composes_and_is_named_as_its_file(option, tmp_path):
    group = option.parent.name
    extra = []
    if str(option) == "data/own.yaml":
        (tmp_path / "own.jsonl").write_text('{"instruction": "a", "input": "", "output": "b"}\n')
        extra = [f"data.path={tmp_path / 'own.jsonl'}"]
    config = composed(f"{group}={option.stem}", *extra)
    if group != "data":
        assert getattr(config, group).name == option.stem


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_plans_at_every_scale(experiment, scale, capsys, tmp_path):
    code, out, err = run_main(
        capsys, f"+experiment={experiment}", f"scale={scale}", "dry_run=true", f"runs_dir={tmp_path}"
    )
    assert code == 0, err
    assert "nothing was run" in out
    assert not list(tmp_path.rglob("record.json"))


def test_table1_is_two_models_by_two_backends_by_four_methods(capsys, tmp_path):
    _, out, _ = run_main(capsys, "+experiment=table1", "dry_run=true", f"runs_dir={tmp_path}")
    methods = ("standard_global_clip", "standard_no_expert_clip", "optimizer_in_backward", "sonar")
    pairs = [(m, b) for m in ("olmoe", "granite") for b in ("grouped_mm", "eager")]
    names = [f"{m}-{b}-{k}-adamw-bs2-s42" for m, b in pairs for k in methods]
    assert all(name in out for name in names) and out.startswith("16 arms")


def test_an_override_narrows_a_sweep_without_duplicates(capsys, tmp_path):
    _, out, _ = run_main(
        capsys, "+experiment=table1", "model=olmoe", "method=sonar", "dry_run=true", f"runs_dir={tmp_path}"
    )
    assert out.startswith("2 arms")


MISTAKES = [
    (["model=olmo"], ["model=olmo", "did you mean olmoe", "granite"]),
    (["gpu=h300"], ["gpu=h300", "did you mean h200", "conf/gpu/h300.yaml"]),
    (["scale=forecast", "host=laptop"], ["host=laptop", "choose one of amd_epyc", "measure_host FILE.json"]),
    (["stps=3"], ["stps", "did you mean steps"]),
    (["foo.bar=3"], ["foo"]),
    (["+foo=3"], ["foo"]),
    (["foo/x=3"], ["foo/x"]),
    (["batch_size=abc"], ["batch_size=abc", "Integer"]),
    (["batch_size=0"], ["batch_size=0", "at least 1"]),
    (["steps=-1"], ["steps=-1", "at least 1"]),
    (["warmup_steps=50"], ["warmup_steps=50", "steps=6"]),
    (["window_start=11"], ["window_start=11", "steps=6"]),
    (["learning_rate=-1"], ["learning_rate=-1"]),
    (["schedule=linear"], ["schedule=linear", "cosine"]),
    (["learning_rate=nan"], ["learning_rate=nan", "at least 0"]),
    (["method.max_grad_norm=nan"], ["method.max_grad_norm=nan"]),
    (["seed=99999999999999999999"], ["seed=", "below 2**32"]),
    (["stall_timeout_s=-1"], ["stall_timeout_s=-1", "positive"]),
    (["method.clip=foo"], ["method.clip=foo", "non_expert"]),
    (["method=standard_no_clip", "method.granularity=expert"], ["method=standard_no_clip", "in_backward=experts"]),
    (["method=sonar_exact_clip", "accumulation=4"], ["accumulation=4", "sonar_exact_clip", "accumulation=1"]),
    (["method=sonar_delayed_clip", "accumulation=4"], ["accumulation=4", "accumulation_mode=standard"]),
    (["method=sonar_tensor_clip", "accumulation=4", "accumulation_mode=fold"], ["accumulation=4", "update_each"]),
    (["method=sonar_fold", "accumulation=2", "optimizer=lion"], ["accumulation_mode=fold", "optimizer=lion"]),
    (["method=sonar_fold", "accumulation=2", "accumulation_mode=update_each"], ["sonar_fold", "update_each"]),
    (["optimizer.kind=foo"], ["optimizer.kind=foo", "adamw"]),
    (["parallel=ddp", "parallel.backend=nccl", "parallel.processes=2"], ["parallel.backend=nccl", "gloo"]),
    (["scale=forecast", "gpu.bandwidth_gb_s=-5"], ["gpu.bandwidth_gb_s=-5", "positive"]),
    (["scale=forecast", "gpu.bf16_tflops=nan"], ["gpu.bf16_tflops=nan"]),
    (["task.trace=/tmp/x.json"], ["task.trace=", "scale=forecast"]),
    (["scale=forecast", "task.trace=/no/such/folder/x.json"], ["task.trace=", "folder"]),
    (["scale=forecast", "+task.options.diagnosis=true"], ["task.options.diagnosis", "no values"]),
    (["scale.dtype=float16"], ["scale.dtype=float16", "bfloat16"]),
    (["method.max_grad_norm=0"], ["method.max_grad_norm=0", "method.clip=none"]),
    (["memory_cap_gb=-3"], ["memory_cap_gb=-3"]),
    (["method=optimizer_in_backward", "accumulation=2"], ["accumulation=2", "accumulation_mode=update_each"]),
    (["method=sonar", "accumulation=2", "accumulation_mode=standard"], ["accumulation_mode=standard", "update_each"]),
    (
        ["method=standard_global_clip", "accumulation=2", "accumulation_mode=fold"],
        ["accumulation_mode=fold", "standard"],
    ),
    (["data=own", "data.path=/nowhere/x.jsonl"], ["data.path=/nowhere/x.jsonl", "no such file"]),
    (["data.path=x.jsonl"], ["data.path=x.jsonl", "data=own"]),
    (["data.heldout_start=3"], ["data.heldout_start=3", "200"]),
    (["parallel.processes=2"], ["parallel.processes=2", "parallel=ddp"]),
    (["parallel=ddp", "parallel.processes=1"], ["parallel.processes=1", "parallel=ddp", "at least 2"]),
    (["parallel=ddp", "task.profile=true"], ["task.profile=True", "parallel=ddp"]),
    (["parallel=fsdp2", "method=sonar_per_expert"], ["method.granularity=expert", "parallel=fsdp2", "method=sonar"]),
    *(
        (["parallel=fsdp2", f"method=sonar_{name}_clip"], [f"method.clip={clip}", "parallel=fsdp2", "non_expert"])
        for name, clip in (("exact", "exact"), ("tensor", "tensor"), ("lagged", "lagged"), ("delayed", "kept"))
    ),
    (["parallel=fsdp2", "method=sonar_offload_clip"], ["method.clip=offloaded", "parallel=fsdp2"]),
    (
        ["parallel=fsdp2", "accumulation=2", "accumulation_mode=fold"],
        ["accumulation_mode=fold", "parallel=fsdp2", "update_each"],
    ),
    (["parallel=fsdp2", "optimizer=adamw8bit"], ["optimizer=adamw8bit", "parallel=fsdp2", "adamw, sgd or lion"]),
    (["parallel=fsdp2", "optimizer=mesh", "method=standard_no_clip"], ["optimizer=mesh", "parallel=fsdp2"]),
    (["parallel=fsdp2", "checkpoint_every=5"], ["checkpoint_every=5", "parallel=fsdp2", "checkpoint_every=0"]),
    (["outputs=held"], ["outputs=held", "kept"]),
    (["-m", "scale=smoke,forecast"], ["scale=smoke,forecast", "one scale a sweep"]),
    (["model=olmoe,granite"], ["model=olmoe,granite", "add -m"]),
    (["experiment=table1"], ["+experiment"]),
    (["+experiment=tableX"], ["tableX", "table1"]),
    (["data.path=a=b.jsonl"], ["quote"]),
    (["runs_dir=/proc/none"], ["runs_dir=/proc/none", "runs_dir=PATH"]),
]


@pytest.mark.parametrize(("argv", "words"), MISTAKES, ids=lambda v: " ".join(v) if isinstance(v, list) else None)
def test_a_mistake_is_one_line_and_exit_code_2(argv, words, capsys, tmp_path):
    runs = [] if any("runs_dir" in a for a in argv) else [f"runs_dir={tmp_path}"]
    code, out, err = run_main(capsys, *argv, *runs)
    assert code == 2
    assert out == "" and err.count("\n") == 1 and err.startswith("error: "), err
    for word in words:
        assert word in err
    assert not list(tmp_path.rglob("record.json"))


def test_one_bad_arm_stops_a_sweep_before_the_first_starts(capsys, tmp_path):
    code, _, err = run_main(
        capsys, "-m", "method=sonar,optimizer_in_backward", "accumulation=1,2", f"runs_dir={tmp_path}"
    )
    assert code == 2 and "accumulation=2" in err
    assert not list(tmp_path.rglob("record.json"))


def test_paper_scale_without_a_gpu_names_the_other_scales(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("sonar_repro.machine.cuda_device_count", lambda: 0)
    code, _, err = run_main(capsys, "scale=paper", f"runs_dir={tmp_path}")
    assert code == 2 and "scale=smoke" in err and "scale=forecast" in err


def test_a_full_disk_is_refused_before_weights_are_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 10**6})())
    code, _, err = run_main(capsys, "save_model=true", f"runs_dir={tmp_path}")
    assert code == 2 and "0.0 GB free" in err and "runs_dir=PATH" in err


def test_defaults_of_the_schema_survive_a_round_trip():
    config = composed("+experiment=table6", "scale=forecast")
    assert from_dict(dataclasses.asdict(config)) == config


def test_identity_ignores_names_and_paths_and_nothing_that_computes(tmp_path):
    base = composed()
    same = composed("runs_dir=/tmp/x", "force=true", "experiment_name=other", "checkpoint_every=2", "threads=1")
    assert fingerprint(base) == fingerprint(same)
    changes = "steps=11 seed=43 learning_rate=0.1 method=standard_no_clip optimizer.hyper.eps=1e-6 repeat=2 "
    changes += "scale.dtype=float32 model.smoke.num_hidden_layers=2 deterministic=true data.max_length=32"
    changes = changes.split()
    prints = [fingerprint(composed(c)) for c in changes]
    assert len({fingerprint(base), *prints}) == len(changes) + 1


def test_a_users_file_counts_by_content_not_by_path(tmp_path):
    row = '{"instruction": "a", "input": "", "output": "b"}\n'
    for name, text in (("a.jsonl", row), ("b.jsonl", row), ("c.jsonl", row * 2)):
        (tmp_path / name).write_text(text)
    a, b, c = (fingerprint(composed("data=own", f"data.path={tmp_path / n}.jsonl")) for n in "abc")
    assert a == b != c


def test_a_users_own_model_config_is_one_arm_named_after_it(tmp_path, capsys):
    folder = tmp_path / "my-moe"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "olmoe"}')
    argv = [
        "+experiment=fits",
        "scale=forecast",
        "method=sonar",
        "optimizer=adamw",
        f"model.config={folder / 'config.json'}",
    ]
    _, out, _ = run_main(capsys, *argv, "dry_run=true", f"runs_dir={tmp_path}")
    assert out.startswith("1 arms") and "my_moe-grouped_mm-sonar-adamw" in out


def test_a_choice_that_the_id_has_no_part_for_makes_another_name():
    """Two arms that differ never share a folder."""
    plain = arm_id(composed("scale=forecast"), ["scale=forecast"])
    assert arm_id(composed("scale=forecast", "gpu=h100"), ["scale=forecast", "gpu=h100"]) == f"{plain}-h100"
    for override in ("dataset=text", "data=embedded_instructions"):
        assert arm_id(composed(override), [override]) != arm_id(composed(), [])
    caps = [arm_id(composed(f"memory_cap_gb={cap}")) for cap in (30.5, 30.5000001, 46)]
    assert len(set(caps)) == 3 and caps[2].endswith("cap46")


def test_at_one_micro_batch_the_mode_of_accumulation_is_none():
    assert fingerprint(composed("accumulation_mode=fold")) == fingerprint(composed())
    assert fingerprint(composed("accumulation_mode=fold", "accumulation=2")) != fingerprint(composed("accumulation=2"))


def test_arm_ids():
    assert arm_id(composed()) == "olmoe-grouped_mm-sonar-adamw-bs2-s42"
    config = composed("accumulation=4", "checkpointing=true", "memory_cap_gb=30.5", "seed=0", "repeat=2")
    assert arm_id(config) == "olmoe-grouped_mm-sonar-adamw-bs2-s0-A4-gc-cap30.5-r2"
    plain = composed("steps=11")
    assert arm_id(plain, ["steps=11", "model=olmoe", "runs_dir=x"]) == f"{arm_id(plain)}-{fingerprint(plain)[:6]}"
    assert arm_id(plain, ["model=olmoe", "+experiment=table1", "runs_dir=x", "force=true"]) == arm_id(plain)


def test_axes_name_what_outside_tools_rely_on():
    expected = (
        "experiment scale model backend method optimizer batch_size accumulation checkpointing memory_cap_gb seed"
    )
    assert set(expected.split()) <= set(axes(composed()))


@pytest.mark.parametrize("model", sorted(f.stem for f in FILES if f.parent.name == "model"))
@pytest.mark.parametrize("scale", ["smoke", "paper"])
def test_parameter_counts_in_the_files_are_those_of_the_built_models(model, scale):
    import torch
    from transformers import AutoModelForCausalLM

    from sonar_repro.models.build import architecture

    config = composed(f"model={model}", f"scale={scale}", "scale.device=auto")
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(architecture(config.model, scale))
    assert parameter_count(config.model, scale) == sum(p.numel() for p in built.parameters())


def test_help_and_config_errors_import_no_torch():
    code = (
        "import sys; from sonar_repro.__main__ import main\n"
        "try:\n    rc = main(sys.argv[1:])\nexcept SystemExit as e:\n    rc = e.code\n"
        "bad = [m for m in ('torch', 'transformers', 'datasets', 'pandas') if m in sys.modules]\n"
        "sys.exit(10 if bad else rc or 0)\n"
    )
    root = Path(__file__).parents[2]
    for argv, expected in ((["--help"], 0), (["model=olmo"], 2), (["+experiment=table1", "dry_run=true"], 0)):
        done = processes.python("-c", code, *argv, cwd=root)
        assert done.returncode == expected, (argv, done.stderr)


def test_help_is_what_hydra_would_print():
    """With an override Hydra itself prints it."""
    said = []
    for argv in (["--help"], ["-h"], ["--help", "seed=42"]):
        done = processes.python("-m", "sonar_repro", *argv, check=True)
        said.append(done.stdout)
    assert said[0] == said[1] == said[2] and "method: optimizer_in_backward, sonar" in said[0]
