"""``task=downstream``: accuracy of an arm's own checkpoint with lm-evaluation-harness (Sonar-MoE §5.1, Table 2).

The harness is imported here and nowhere else, inside the arm's process. Smoke and paper scale run the same code; at
smoke scale the tasks are those of ``downstream_data``, which need no network.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import time
from pathlib import Path
from typing import Any

from .. import records
from ..config.schema import START, Config
from ..errors import Unsupported, UserError
from ..kernels.registry import ran_implementation
from ..models.build import DTYPES, load_pretrained, load_tokenizer
from ..records import MODEL_FOLDER
from ..training.build import describe_model
from ..training.process import environment
from ..training.train import Training
from . import missing_library

LOCAL_TASKS = Path(__file__).parent / "downstream_data"
BEAT_S = 1.0  # how often progress is told


def run(config: Config, report: Any) -> None:
    """Evaluate the checkpoint that ``task.of`` names and record value, standard error and size of each task.

    Raises:
        Unsupported: the harness is not installed.
        UserError: an unknown task or metric, or a task whose data cannot be had.
    """
    missing = missing_library(config)
    if missing:
        raise Unsupported(missing)
    arm = Training(config, report)
    arm.prepare()
    model, tokenizer = starting_model(arm) if config.task.of == START else trained_model(arm)
    report.section("model", describe_model(config, model))
    report.phase("tasks")
    tasks = load_tasks(config.task.options)
    report.phase("evaluate")
    results = evaluate(model, tokenizer, tasks, config, report)
    report.section("downstream", describe(results, config))


# ---- checkpoints --------------------------------------------------------------------------------------------------


def starting_model(arm: Training) -> tuple[Any, Any]:
    """The weights that every training arm of this configuration starts from, and their tokenizer."""
    arm.report.phase("data")
    arm.load_data()
    arm.report.phase("build")
    model = arm.make_model()
    arm.report.section("data", arm.corpus.describe())
    _describe_environment(arm, model, None)
    return model, arm.tokenizer


def trained_model(arm: Training) -> tuple[Any, Any]:
    """The model that the training arm saved, and its tokenizer, from its folder alone."""
    config = arm.config
    folder = Path(config.task.inputs["trained"])
    saved = dataclasses.replace(config.model, path=str(folder / MODEL_FOLDER), weights="pretrained")
    arm.report.phase("checkpoint")
    places = {"dtype": DTYPES[config.scale.dtype], "device": arm.device, "experts": arm.experts}
    model = load_pretrained(saved, attention=config.model.attention, **places)
    trained = records.load(folder / "record.json")
    arm.report.section("data", trained["data"])
    _describe_environment(arm, model, trained["environment"]["optimizer_class"])
    return model, load_tokenizer(saved)


def _describe_environment(arm: Training, model: Any, optimizer: str | None) -> None:
    attention = str(getattr(model.config, "_attn_implementation", None))
    label = optimizer or "none (before training)"
    facts = environment(arm.config, arm.device.type, ran_implementation(model), attention, label)
    arm.report.section("environment", facts)


def checkpoint_name(config: Config) -> str:
    """Where the evaluated weights are, relative to the runs folder; ``start`` for those before training."""
    if config.task.of == START:
        return START
    return "/".join((*Path(config.task.inputs["trained"]).parts[-3:], MODEL_FOLDER))


# ---- the harness --------------------------------------------------------------------------------------------------


def load_tasks(options: dict[str, Any]) -> list[Any]:
    """The harness's task and group objects, in the order of ``task.options.tasks``, with their number of examples.

    Raises UserError naming a task that is unknown, or whose data are neither here nor to be downloaded.
    """
    from lm_eval.tasks import TaskManager

    folders = [str(LOCAL_TASKS), *([str(options["include"])] if options["include"] else [])]
    names = [task["name"] for task in options["tasks"]]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if set(names) - set(manager.all_tasks):
        manager = TaskManager(include_path=folders)  # reads the harness's thousands of files: seconds
    loaded = []
    for name, asked in zip(names, options["tasks"]):
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"task.options.tasks: {name}: lm-evaluation-harness has no such task{hint}")
        try:
            found = manager.load([name])
        except OSError as error:
            raise UserError(
                f"task.options.tasks: {name}: its data are not here and cannot be downloaded "
                f"({str(error).splitlines()[0][:160]}); connect to the network once, they are then cached"
            ) from error
        whole = {**found["tasks"], **found.get("groups", {})}.get(name)
        if whole is None:
            raise UserError(f"task.options.tasks: {name}: is a tag; name its tasks: {', '.join(found['tasks'])}")
        for task in found["tasks"].values():
            task.set_config(key="num_fewshot", value=asked["fewshot"])
        loaded.append(whole)
    return loaded


def evaluate(model: Any, tokenizer: Any, tasks: list[Any], config: Config, report: Any) -> dict[str, Any]:
    """Run the harness on a model that is already loaded. Returns what ``simple_evaluate`` returns, without samples."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)  # the tasks are loaded: no need to index all of the harness's
    options = config.task.options
    settings = {name: options[name] for name in ("batch_size", "softmax_dtype")}
    settings["mixed_precision_dtype"] = config.autocast
    harness_model = HFLM(pretrained=model.eval(), tokenizer=tokenizer, **settings)
    handle = model.register_forward_pre_hook(_heartbeat(report))
    try:
        limit = options["limit"]
        return simple_evaluate(harness_model, tasks=tasks, task_manager=manager, limit=limit, log_samples=False)
    finally:
        handle.remove()


def _heartbeat(report: Any) -> Any:
    """A forward hook that tells the runner about progress: a long evaluation is no stalled one."""
    passes, last = 0, time.monotonic()

    def beat(*_: Any) -> None:
        nonlocal passes, last
        passes += 1
        if time.monotonic() - last > BEAT_S:
            last = time.monotonic()
            report.phase(f"evaluate, forward pass {passes}")

    return beat


def describe(results: dict[str, Any], config: Config) -> dict[str, Any]:
    """The record's ``downstream``: by task the metric, its value and standard error, examples shown, and questions."""
    options = config.task.options
    return {
        "tasks": {asked["name"]: _task_result(results, asked) for asked in options["tasks"]},
        "batch_size": options["batch_size"],
        "softmax_dtype": options["softmax_dtype"],
        "limit": options["limit"],
        "lm_eval": importlib.metadata.version("lm_eval"),
        "checkpoint": checkpoint_name(config),
        "weights": config.model.weights,
    }


def _task_result(results: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    name, metric = asked["name"], asked["metric"]
    found = results["results"][name]
    key = f"{metric},none"
    if key not in found:
        metrics = sorted({k.split(",")[0] for k in found if "," in k and "stderr" not in k})
        raise UserError(f"task.options.tasks: {name}: has no metric {metric}; choose one of {', '.join(metrics)}")
    stderr = found.get(f"{metric}_stderr,none")
    leaves = _leaves(results.get("group_subtasks", {}), name)
    return {
        "metric": metric,
        "value": float(found[key]),
        "stderr": float(stderr) if isinstance(stderr, (int, float)) else None,
        "fewshot": max(results["n-shot"][leaf] for leaf in leaves),
        "n": sum(results["n-samples"][leaf]["effective"] for leaf in leaves),
        "version": results["versions"].get(name),
    }


def _leaves(subtasks: dict[str, list[str]], name: str) -> list[str]:
    """The tasks under a group, itself for a task."""
    children = subtasks.get(name)
    return [leaf for child in children for leaf in _leaves(subtasks, child)] if children else [name]
