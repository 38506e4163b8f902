"""Weight comparisons (Table 4): the five comparisons end to end, their files, the counting, and what is refused."""

import json

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import save_file

from sonar_repro import records
from sonar_repro.__main__ import main
from sonar_repro.errors import UserError
from sonar_repro.harness.prerequisites import prerequisites
from sonar_repro.records import WEIGHTS_FILE
from sonar_repro.tasks.compare_weights import compare, run

TINY = ["model.smoke.num_hidden_layers=2", "model.smoke.hidden_size=64", "model.smoke.intermediate_size=32"]
TINY += ["data.train_examples=8", "data.heldout_count=2", "threads=1"]
EQUAL = [
    "standard_no_expert_clip_vs_standard_no_expert_clip",
    "sonar_vs_standard_no_expert_clip",
    "sonar_per_expert_vs_sonar",
    "optimizer_in_backward_vs_standard_no_clip",
]
DIFFERENT = "standard_global_clip_vs_standard_no_expert_clip"


def command(runs, *more):
    GlobalHydra.instance().clear()
    return main(["+experiment=table4", f"runs_dir={runs}", *TINY, *more])


def recorded(runs):
    found = [records.load(path) for path in sorted(runs.rglob("record.json"))]
    return {(r["arm"]["task"], r["arm"]["method"], r["arm"]["repeat"]): r for r in found}


def test_the_five_comparisons_of_table_4(tmp_path, capsys):
    """The first four are exactly 0 on a CPU, expert and other weights (the paper has 0 and run-to-run noise)."""
    assert command(tmp_path) == 0, capsys.readouterr().err
    found = recorded(tmp_path)
    trained = {key: r for key, r in found.items() if key[0] == "train"}
    assert len(trained) == 7 and len(found) == 12  # each side is an arm of its own, run once; the baseline twice
    assert ("train", "standard_no_expert_clip", 2) in trained
    for record in trained.values():
        config = record["config"]
        assert (config["steps"], config["learning_rate"], config["schedule"]) == (3, 1e-4, "constant")
        assert record["environment"]["deterministic"] is True
        changed = record["weights"]
        assert changed["expert"]["changed"] > 0.1 * changed["expert"]["total"]  # large enough to be visible in bf16
    for label in EQUAL:
        counts = found["compare_weights", label, 1]["compare"]
        assert counts["expert"]["differing"] == counts["other"]["differing"] == 0, label
    record = found["compare_weights", DIFFERENT, 1]
    counts, model = record["compare"], record["model"]
    assert counts["expert"]["differing"] > 0 and counts["other"]["differing"] > 0
    assert counts["expert"]["total"] == model["expert_parameters"]
    assert counts["other"]["total"] == model["other_parameters"]
    # The record names both sides, and the sides are the arms of those names.
    sides = [records.load(tmp_path / "table4/smoke" / counts[role] / "record.json") for role in "ab"]
    assert [side["arm"]["method"] for side in sides] == ["standard_global_clip", "standard_no_expert_clip"]
    same = found["compare_weights", EQUAL[0], 1]["compare"]
    assert same["a"] != same["b"]
    assert "deterministic algorithms: on" in record["notes"]
    assert not list(tmp_path.rglob(WEIGHTS_FILE))  # the weight files went afterwards

    # Kept on request: the sides run again, since their files are gone; the comparison stands.
    assert command(tmp_path, "task.pair=[sonar,standard_no_expert_clip]", "keep_weights=true", "force=true") == 0
    kept = {path.parent.name for path in tmp_path.rglob(WEIGHTS_FILE)}
    counts = recorded(tmp_path)["compare_weights", EQUAL[1], 1]["compare"]
    assert kept == {counts["a"], counts["b"]}
    assert counts["expert"]["differing"] == counts["other"]["differing"] == 0


def test_the_same_method_twice_is_two_repeats_of_one_arm(tiny):
    twice = prerequisites(tiny("task=compare_weights", "task.pair=[sonar,sonar]"))
    assert [twice[role].repeat for role in "ab"] == [1, 2]
    apart = prerequisites(tiny("task=compare_weights", "task.pair=[sonar,standard_no_clip]"))
    assert [(apart[role].repeat, apart[role].method.name) for role in "ab"] == [(1, "sonar"), (1, "standard_no_clip")]
    assert all(side.keep_weights and side.task.name == "train" for side in (*twice.values(), *apart.values()))
    with pytest.raises(UserError, match="task.pair=.*two methods"):
        prerequisites(tiny("task=compare_weights", "task.pair=[sonar]"))
    with pytest.raises(UserError, match="task.pair=sonra.*did you mean sonar"):
        prerequisites(tiny("task=compare_weights", "task.pair=[sonra,sonar]"))


# ---- counting ------------------------------------------------------------------------------------------------------


def saved(path, experts=("e",), **tensors):
    save_file(tensors, path, metadata={"experts": json.dumps(list(experts))})
    return path


def test_elements_are_compared_by_their_bits(tmp_path):
    """Zeros of different sign differ; two NaN of the same bits do not; each element counts once, by its kind."""
    nan = float("nan")
    a = saved(
        tmp_path / "a",
        e=torch.tensor([[1.0, nan], [0.0, 3.0]], dtype=torch.bfloat16),
        w=torch.tensor([1.0, 2.0, 3.0]),
        b=torch.tensor([5.0]),
    )
    b = saved(
        tmp_path / "b",
        e=torch.tensor([[1.0, nan], [-0.0, 3.015625]], dtype=torch.bfloat16),
        w=torch.tensor([1.0, 2.0000002, 3.0]),
        b=torch.tensor([5.0]),
    )
    assert compare(a, b) == {"expert": {"differing": 2, "total": 4}, "other": {"differing": 1, "total": 4}}
    assert compare(a, a) == {"expert": {"differing": 0, "total": 4}, "other": {"differing": 0, "total": 4}}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"w": torch.zeros(3)}, r"w: \(2,\) .*\(3,\)"),
        ({"w": torch.zeros(2, dtype=torch.bfloat16)}, "w: .*float32.*bfloat16"),
        ({"w": torch.zeros(2), "x": torch.zeros(1)}, "x: in only one of"),
    ],
)
def test_files_of_different_tensors_are_refused_by_name(tmp_path, other, words):
    with pytest.raises(UserError, match=words):
        compare(saved(tmp_path / "a", w=torch.zeros(2)), saved(tmp_path / "b", **other))


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "values"), [("sha256", ("aaaa", "bbbb")), ("name", ("alpaca", "embedded_instructions"))]
)
def test_arms_of_different_data_are_refused_by_name(tiny, reporter, tmp_path, key, values):
    config = tiny("task=compare_weights", "task.pair=[sonar,standard_no_clip]")
    for role, value in zip("ab", values):
        record = dict.fromkeys((*records.REQUIRED, *records.SECTIONS)) | {"status": "ok", "arm_id": f"arm_{role}"}
        record |= {"schema_version": records.SCHEMA_VERSION, "data": {"name": "d", "sha256": "s"} | {key: value}}
        records.write(tmp_path / role / "record.json", record)
        saved(tmp_path / role / WEIGHTS_FILE, w=torch.zeros(2))
        config.task.inputs[role] = str(tmp_path / role)
    with pytest.raises(UserError) as caught:
        run(config, reporter())
    message = str(caught.value)
    assert message.startswith("task.pair=") and f"data {key} differs" in message
    assert all(word in message for word in (*values, "sonar", "standard_no_clip"))


def test_a_side_that_failed_fails_the_comparison_and_says_which(tmp_path, capsys):
    code = command(tmp_path, "task.pair=[sonar,standard_no_clip]", "memory_cap_gb=0.001")
    record = recorded(tmp_path)["compare_weights", "sonar_vs_standard_no_clip", 1]
    assert record["status"] == "oom" and code == 0  # out of memory is a result
    assert "needs olmoe-grouped_mm-sonar" in record["error"]["message"] and "oom" in record["error"]["message"]
    assert record.get("compare") is None
