"""Downstream accuracy: the local tasks, the harness's numbers against our own, the checkpoint, and what is refused."""

import ast
import hashlib
import importlib.util
import json
import math
import re
import socket
from collections import Counter
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from safetensors import safe_open

from sonar_repro import records
from sonar_repro.__main__ import main
from sonar_repro.errors import UserError
from sonar_repro.harness.runner import make_arm
from sonar_repro.harness.runner import run as run_arm
from sonar_repro.tasks import downstream
from sonar_repro.training.train import Training

DATA = downstream.LOCAL_TASKS


def rows(name):
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


# ---- the local tasks -----------------------------------------------------------------------------------------------


SHA256 = {
    "local_arc.jsonl": "270d922ea95ceb6a5ab4a228056a39f8b953e84f129b87143dd9a48ddb68ad7b",
    "local_mmlu_chemistry_dev.jsonl": "6a2e05d94be3f9195c29d98ce4aa74d4783dc95ff246b65b007dedcc09f79ff2",
    "local_mmlu_chemistry_test.jsonl": "7f91efa21a0a639a37d22adaae60bb8ecd9ab4183a41dfd912670fba2a87c936",
    "local_mmlu_geography_dev.jsonl": "77d2de7f7805d6b5143a8c2f0bc3800c27446e08f3d355fc4dd176476ff483fd",
    "local_mmlu_geography_test.jsonl": "2983a8534781f19723524b7ea1b06d47102f51075760a3d9e1648f62481fb6c1",
}
SYMBOLS = "mercury Hg sulfur S lead Pb potassium K carbon C iodine I gold Au tin Sn nitrogen N tungsten W silicon Si"
CAPITALS = "India:New Delhi Canada:Ottawa Australia:Canberra Turkey:Ankara Nigeria:Abuja Brazil:Brasilia Morocco:Rabat"


def test_the_questions_are_those_that_recorded_accuracies_are_over():
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in DATA.glob("*.jsonl")}
    assert found == SHA256


def test_every_question_has_four_different_choices_and_a_true_answer():
    words = SYMBOLS.split()
    known = {f"What is the chemical symbol of {name}?": symbol for name, symbol in zip(words[::2], words[1::2])}
    capitals = dict(re.findall(r"(\w+):([\w ]+?)(?= \w+:|$)", CAPITALS))
    known |= {f"What is the capital of {country}?": city for country, city in capitals.items()}
    answers, asked = {}, 0
    for name in ("geography", "chemistry"):
        dev, test = rows(f"local_mmlu_{name}_dev.jsonl"), rows(f"local_mmlu_{name}_test.jsonl")
        assert len(dev) == 5 and not {r["question"] for r in dev} & {r["question"] for r in test}
        for row in (*dev, *test):
            answers[row["question"]] = row["choices"][row["answer"]]
            assert len(set(row["choices"])) == 4
        asked += len(test)
    assert len(known) == 18 and {question: answers[question] for question in known} == known
    assert len(set(answers.values())) == len(answers)  # no capital and no symbol twice
    science = rows("local_arc.jsonl")
    for row in science:
        assert row["choices"]["label"] == list("ABCD") and len(set(row["choices"]["text"])) == 4
    assert asked >= 50 and len(science) >= 50
    assert min(Counter(row["answerKey"] for row in science).values()) >= 8  # no letter gives the answers away


def test_known_answers_of_the_arc_like_questions():
    answers = {r["question"]: r["choices"]["text"]["ABCD".index(r["answerKey"])] for r in rows("local_arc.jsonl")}
    known = {
        "Who wrote 'Frankenstein'?": "Mary Shelley",
        "What is the opposite of 'brief'?": "lengthy",
        "What is the plural of 'tooth'?": "teeth",
    }
    found = {question: answers[question] for question in known if question in answers}
    assert found and found == {question: known[question] for question in found}


def test_prompts_and_scoring_are_those_of_the_harness():
    """Field by field the YAML of arc_easy (arc_challenge includes it) and of mmlu's subjects, data apart."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    theirs = Path(lm_eval.tasks.__file__).parent
    arc = load_yaml(theirs / "arc" / "arc_easy.yaml", resolve_func=False)
    mmlu = load_yaml(theirs / "mmlu" / "default" / "mmlu_anatomy.yaml", resolve_func=False)
    group = load_yaml(theirs / "mmlu" / "default" / "_mmlu.yaml", resolve_func=False)
    fields = ("output_type", "doc_to_text", "doc_to_target", "doc_to_choice", "metric_list", "test_split")
    ours = load_yaml(DATA / "local_arc.yaml", resolve_func=False)
    assert {name: ours[name] for name in fields} == {name: arc[name] for name in fields}
    ours = load_yaml(DATA / "local_mmlu_chemistry.yaml", resolve_func=False)
    fields = (*fields, "fewshot_split", "fewshot_config")
    assert {name: ours[name] for name in fields} == {name: mmlu[name] for name in fields}
    assert ours["description"] == mmlu["description"].replace("anatomy", "chemistry")
    weighted = load_yaml(DATA / "local_mmlu.yaml", resolve_func=False)["aggregate_metric_list"]
    assert weighted == [{"metric": "acc", "weight_by_size": True}]
    assert [entry["weight_by_size"] for entry in group["aggregate_metric_list"]] == [True]


# ---- the numbers ---------------------------------------------------------------------------------------------------


def log_likelihoods(model, tokenizer, context, choices):
    """log p(" " + choice | context) in float64, token by token, without padding or batching."""
    head = tokenizer(context)["input_ids"]
    sums = []
    for choice in choices:
        ids = tokenizer(context + " " + choice)["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
        sums.append(sum(logits[k - 1, ids[k]].item() for k in range(len(head), len(ids))))
    return sums


def multiple_choice(row, answered=False):
    letters = "".join(f"\n{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"]))
    return f"{row['question']}{letters}\nAnswer:" + (f" {'ABCD'[row['answer']]}\n\n" if answered else "")


def best(values):
    return max(range(len(values)), key=values.__getitem__)


def test_accuracies_and_standard_errors_are_those_computed_by_hand(tiny, reporter, monkeypatch):
    """An independent float64 evaluation of the same weights, prompts built here; and no connection is opened."""

    attempts = []

    def refuse(*arguments):
        attempts.append(arguments)  # the harness swallows what is raised here
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    report = reporter()
    config = tiny("task=downstream", "task.of=start", "scale.dtype=float32", "seed=7")
    downstream.run(config, report)
    assert attempts == []
    got = report.sections["downstream"]
    arm = Training(config, reporter("again"))
    arm.prepare()
    model, tokenizer = downstream.starting_model(arm)
    model.eval()

    right = []
    for row in rows("local_arc.jsonl"):
        texts = row["choices"]["text"]
        sums = log_likelihoods(model, tokenizer, f"Question: {row['question']}\nAnswer:", texts)
        right.append("ABCD"[best([s / len(text) for s, text in zip(sums, texts)])] == row["answerKey"])
    n, share = len(right), sum(right) / len(right)
    task = got["tasks"]["local_arc"]
    assert (task["metric"], task["fewshot"], task["n"]) == ("acc_norm", 0, n)
    assert task["value"] == pytest.approx(share, abs=1e-12)
    assert task["stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (n - 1)), rel=1e-9)

    hits, lengths = {}, []
    for name in ("geography", "chemistry"):
        head = f"The following are multiple choice questions (with answers) about {name}.\n\n"
        head += "".join(multiple_choice(row, answered=True) for row in rows(f"local_mmlu_{name}_dev.jsonl"))
        for row in rows(f"local_mmlu_{name}_test.jsonl"):
            context = head + multiple_choice(row)
            lengths.append(len(tokenizer(context + " A")["input_ids"]))
            hits.setdefault(name, []).append(best(log_likelihoods(model, tokenizer, context, "ABCD")) == row["answer"])
    every = [hit for found in hits.values() for hit in found]
    task = got["tasks"]["local_mmlu"]
    assert (task["metric"], task["fewshot"], task["n"]) == ("acc", 5, len(every))
    assert task["value"] == pytest.approx(sum(every) / len(every), abs=1e-12)
    # Pooled over subjects: squared standard errors of the means, each of its own spread.
    spread = {name: sum(found) / len(found) for name, found in hits.items()}
    variance = sum(
        (len(f) - 1) * (len(f) / (len(f) - 1)) * spread[name] * (1 - spread[name]) for name, f in hits.items()
    ) / (len(every) - len(hits))
    assert task["stderr"] == pytest.approx(math.sqrt(variance / len(every)), rel=1e-9)
    assert max(lengths) <= model.config.max_position_embeddings  # no prompt is cut
    assert 0 < share < 1 and len(set(every)) == 2  # the comparison could have failed


def test_the_harness_is_imported_only_inside_functions_and_only_here():
    package = Path(downstream.__file__).parents[1]
    users = {}
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] in ("lm_eval", "datasets") for name in names) and "downstream" in str(path):
                users.setdefault(path.name, []).append(node in tree.body)
            assert "downstream" in str(path) or not any(name.startswith("lm_eval") for name in names), path
    assert set(users) == {"downstream.py", "jsonl.py"} and not any(any(top) for top in users.values())


# ---- through the runner --------------------------------------------------------------------------------------------


def test_the_training_arm_runs_first_and_its_own_checkpoint_is_evaluated(tiny, reporter, tmp_path):
    config = tiny("task=downstream", "task.of=sonar", "+experiment=table2", f"runs_dir={tmp_path}", "steps=3")
    config.task.options["limit"] = 8
    arm = make_arm(config)
    record = run_arm(arm)
    assert record["status"] == "ok", record["error"]
    assert record["arm"]["method"] == "sonar" and record["arm"]["task"] == "downstream"
    trained = records.load(tmp_path / "table2/smoke/olmoe-grouped_mm-sonar-adamw-bs2-s42/record.json")
    assert trained["status"] == "ok" and trained["arm"]["task"] == "train" and trained["saved_model"] == "model"
    made = record["downstream"]
    assert made["checkpoint"] == "table2/smoke/olmoe-grouped_mm-sonar-adamw-bs2-s42/model"
    assert (made["batch_size"], made["limit"], made["weights"]) == (16, 8, "random")
    assert made["lm_eval"] == importlib.metadata.version("lm_eval")
    assert made["tasks"]["local_arc"]["n"] == 8 and made["tasks"]["local_mmlu"]["n"] == 16
    assert record["data"]["sha256"] == trained["data"]["sha256"]
    assert record["environment"]["experts_implementation"] == "grouped_mm"
    assert run_arm(arm)["outcome"] == "recorded"

    # The weights that are evaluated are the file's, bit for bit, and not those at the start.
    inside = Training(arm.config, reporter())
    inside.prepare()
    model, tokenizer = downstream.trained_model(inside)
    weights = dict(model.named_parameters())
    with safe_open(Path(arm.config.task.inputs["trained"]) / "model" / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    dense = set(weights) & set(stored)
    assert len(dense) == len(weights) - 4 and all(torch.equal(stored[name], weights[name]) for name in dense)
    for layer in (f"model.layers.{k}.mlp.experts" for k in range(2)):  # on disk one matrix an expert, as on the hub
        for e in range(64):
            gate, up, down = (stored[f"{layer}.{e}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            assert torch.equal(weights[f"{layer}.gate_up_proj"][e], torch.cat([gate, up]))
            assert torch.equal(weights[f"{layer}.down_proj"][e], down)
    start, _ = downstream.starting_model(inside)
    assert not all(torch.equal(p, weights[name]) for name, p in start.named_parameters())
    assert tokenizer("Who wrote it?")["input_ids"] == inside.tokenizer("Who wrote it?")["input_ids"]


def test_without_the_harness_the_arm_is_unsupported_before_anything_is_trained(tiny, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "lm_eval" else find(name, *rest)
    )
    config = tiny("task=downstream", "task.of=sonar", f"runs_dir={tmp_path}")
    record = run_arm(make_arm(config))
    assert record["status"] == "unsupported"
    assert "lm_eval" in record["error"]["message"] and "sonar_repro[eval]" in record["error"]["message"]
    assert len(list(tmp_path.rglob("record.json"))) == 1  # no training arm


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["+experiment=table2", "scale=forecast"], ["scale=forecast", "scale=smoke"]),
        (["+experiment=table4", "scale=forecast"], ["scale=forecast", "compare_weights"]),
        (["task=downstream"], ["task.of=None", "start"]),
        (["task=downstream", "task.of=sonnar"], ["task.of=sonnar", "did you mean sonar"]),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(argv, words, capsys, tmp_path):
    GlobalHydra.instance().clear()
    assert main([*argv, f"runs_dir={tmp_path}"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(word in err for word in words), err
    assert not list(tmp_path.rglob("record.json"))


OWN = """task: {name}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: "{{{{choices}}}}"
"""


def test_tasks_that_cannot_be_had_are_named(tmp_path, monkeypatch):
    import lm_eval.tasks

    # The harness's own index takes seconds to read, and what is in it is not the point here.
    monkeypatch.setattr(lm_eval.tasks, "__file__", str(tmp_path / "none.py"))
    whole = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **more: whole(**{**more, "include_defaults": False}))
    (tmp_path / "far.yaml").write_text(OWN.format(name="far_away") + "dataset_path: nobody/no_such_data\ntag: a_tag\n")
    options = {"include": str(tmp_path), "tasks": [{"name": "local_ark", "metric": "acc", "fewshot": 0}]}
    with pytest.raises(UserError, match="local_ark.*did you mean local_arc"):
        downstream.load_tasks(options)
    options["tasks"][0]["name"] = "far_away"
    with pytest.raises(UserError, match="far_away: its data are not here"):
        downstream.load_tasks(options)


def test_a_metric_that_a_task_lacks_is_named_with_those_it_has():
    results = {"results": {"t": {"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.1}}}
    with pytest.raises(UserError, match="t: has no metric acc_norm; choose one of acc$"):
        downstream._task_result(results, {"name": "t", "metric": "acc_norm", "fewshot": 0})


def test_a_nested_group_counts_the_questions_of_all_its_subjects():
    """mmlu is a group of four groups of subjects."""
    results = {
        "results": {"mmlu": {"acc,none": 0.5, "acc_stderr,none": "N/A"}},
        "group_subtasks": {"mmlu": ["mmlu_stem", "mmlu_other"], "mmlu_stem": ["a", "b"], "mmlu_other": ["c"]},
        "n-samples": {name: {"original": 90, "effective": n} for name, n in (("a", 10), ("b", 20), ("c", 30))},
        "n-shot": {"a": 5, "b": 5, "c": 5},
        "versions": {"mmlu": 2},
    }
    assert downstream._task_result(results, {"name": "mmlu", "metric": "acc", "fewshot": 5}) == {
        "metric": "acc",
        "value": 0.5,
        "stderr": None,
        "fewshot": 5,
        "n": 60,
        "version": 2,
    }
