"""Arms that another arm needs first: the two sides of a comparison, the training behind an evaluated checkpoint."""

from __future__ import annotations

import copy
import difflib

from omegaconf import OmegaConf

from ..config.schema import START, Config, MethodConfig, TaskConfig, conf_dir
from ..errors import UserError
from ..records import MODEL_FOLDER, WEIGHTS_FILE


def load_method(name: str, key: str) -> MethodConfig:
    """conf/method/<name>.yaml as a dataclass. Raises UserError naming ``key`` for an unknown method."""
    path = conf_dir() / "method" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"{key}={name}: no such method{hint}; choose one of {', '.join(known)}")
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(MethodConfig), OmegaConf.load(path)))


def prerequisites(config: Config) -> dict[str, Config]:
    """The arms to run before this one, by role; {} for most. Raises UserError for a malformed task.

    ``compare_weights``: ``task.pair=[A,B]``, each a training arm that keeps its weights; the same method twice is two
    repeats of one arm. ``downstream``: ``task.of=METHOD``, a training arm that saves its model; ``start`` needs none.
    """
    task = config.task
    if task.name == "compare_weights":
        if len(task.pair) != 2:
            raise UserError(f"task.pair={task.pair}: give two methods, as task.pair=[sonar,standard_no_expert_clip]")
        a, b = (_training(config, name, "task.pair") for name in task.pair)
        if task.pair[0] == task.pair[1]:
            b.repeat = a.repeat + 1
        a.keep_weights = b.keep_weights = True
        return {"a": a, "b": b}
    if task.name == "downstream":
        if not task.of:
            raise UserError(f"task.of={task.of}: name the method whose checkpoint is evaluated, or {START}")
        if task.of != START:
            side = _training(config, task.of, "task.of")
            side.save_model = True
            return {"trained": side}
    return {}


def check_weights(config: Config) -> None:
    """Raise UserError for a task that reads weights at a scale that has none."""
    if config.task.name in ("compare_weights", "downstream") and config.scale.device == "fake":
        raise UserError(
            f"scale={config.scale.name}: has shapes and no weights, and task={config.task.name} reads weights; "
            "use scale=smoke or scale=paper"
        )


def _training(config: Config, method: str, key: str) -> Config:
    side = copy.deepcopy(config)
    side.method = load_method(method, key)
    side.task = TaskConfig()
    return side


def delivered(config: Config, folder) -> bool:
    """Whether a prerequisite's folder still holds what it was run for."""
    if config.keep_weights and not (folder / WEIGHTS_FILE).is_file():
        return False
    return not config.save_model or (folder / MODEL_FOLDER / "config.json").is_file()
