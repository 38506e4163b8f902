"""Typed configuration: one dataclass a Hydra group, cross-field checks, arm ids and fingerprints. Imports no torch.

The root schema is registered in Hydra's ConfigStore as ``base_config``, so an unknown key or a wrong type is an error
of composition. :func:`resolve` turns a composed config into a :class:`Config` and checks what one field
alone cannot know.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .data.spec import DataSpec
from .errors import UserError


@dataclass
class ScaleConfig:
    """How large an arm is: lengths, data sizes, dtype, and where it runs (smoke | forecast | paper)."""

    name: str = "smoke"
    steps: int = 10
    warmup_steps: int = 3
    window_start: int = 4
    learning_rate: float = 1e-3
    final_lr_fraction: float = 0.1
    max_length: int = 64
    train_examples: int = 200
    heldout_start: int = 600
    heldout_count: int = 64
    dtype: str = "bfloat16"
    weights: str = "random"
    device: str = "auto"
    backends: str = "grouped_mm,eager"  # what Table 1 sweeps
    main_backend: str = "grouped_mm"  # what the other tables use
    checkpoint_every: int = 0


@dataclass
class ModelConfig:
    """A transformers architecture: its full-size fields, the overrides that make it tiny, and where its weights are."""

    name: str = "olmoe"
    model_type: str = "olmoe"
    hub_id: str | None = None
    revision: str | None = None
    architecture: dict[str, Any] = field(default_factory=dict)
    smoke: dict[str, Any] = field(default_factory=dict)
    weights: str = "random"  # random | pretrained
    config: str | None = None  # a local config.json or folder, or a hub id, in place of the architecture
    path: str | None = None  # a local checkpoint folder in place of the hub id
    attention: str = "sdpa"  # transformers' attention implementation: sdpa | eager | ...
    tokenizer: str | None = None  # where hub_id has none: a hub id or folder
    parameters: dict[str, int] = field(
        default_factory=dict
    )  # trainable, by size: full | smoke (tested against a build)


@dataclass
class BackendConfig:
    """An expert kernel behind transformers' ExpertsInterface."""

    name: str = "grouped_mm"


@dataclass
class MethodConfig:
    """When each parameter is updated and what is clipped: three knobs make the six methods."""

    name: str = "sonar"
    in_backward: str = "experts"  # none | experts | all
    granularity: str = "tensor"  # tensor | expert
    clip: str = "non_expert"  # all | non_expert | none, and what methods/ adds
    max_grad_norm: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerConfig:
    """The update rule; ``hyper`` goes to the factory as it is."""

    name: str = "adamw"
    kind: str = "adamw"
    hyper: dict[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None  # null: the scale's
    warmup_steps: int | None = None
    final_lr_fraction: float | None = None  # null: the scale's


@dataclass
class DatasetConfig:
    """What kind of data: the file in conf/data is chosen by dataset and scale together."""

    name: str = "instructions"


@dataclass
class DataConfig:
    """One data source, named for what it is."""

    name: str = "embedded_instructions"
    kind: str = "instructions"  # instructions | text
    source: str = "embedded"  # embedded | hub | path | synthetic
    path: str | None = None
    hub_id: str | None = None
    revision: str | None = None
    subset: str | None = None
    train_examples: int | None = 0  # null: all of a local text
    heldout_start: int | None = 0
    heldout_count: int = 0
    max_length: int = 64


@dataclass
class TaskConfig:
    """What is done with the arm."""

    name: str = "train"
    timeline: bool = False
    profile: bool = False
    pair: list[str] = field(default_factory=list)  # compare_weights: the two methods
    of: str | None = None  # downstream: the method whose checkpoint is evaluated, or start
    inputs: dict[str, str] = field(default_factory=dict)  # filled by the runner: folders of the arms it ran first
    trace: str | None = None  # forecast: a Chrome trace of the step's schedule is written here
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class GpuConfig:
    """A card: what a run may allocate on it, with the source of each figure."""

    name: str = "rtx_pro_6000"
    title: str = ""
    memory_gb: float = 0.0  # 1e9 bytes, as the vendor's runtime reports it
    context_gb: float = 0.0  # CUDA context and libraries, outside PyTorch's allocator
    bandwidth_gb_s: float | None = None
    bf16_tflops: float | None = None  # dense, fp32 accumulation
    fp32_tflops: float | None = None  # outside the matrix units
    compute_capability: int = 12  # major version: it decides cuBLAS's workspace
    source: str = ""


@dataclass
class ParallelConfig:
    """How many processes share one arm."""

    name: str = "none"  # none | ddp
    processes: int = 1
    backend: str = "auto"  # gloo | nccl | auto


@dataclass
class Config:
    """One arm, whole."""

    scale: ScaleConfig = field(default_factory=ScaleConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    experiment_name: str = "adhoc"
    batch_size: int = 2
    accumulation: int = 1
    accumulation_mode: str | None = None
    checkpointing: bool = False
    memory_cap_gb: float | None = None
    host: str = "amd_epyc"  # forecast: measured host costs, a name in timing/hosts or a file of yours
    seed: int = 42
    repeat: int = 1  # the same arm again, for run-to-run noise
    deterministic: bool = False
    outputs: str = "dropped"  # dropped: only the loss is kept; kept: as `outputs = model(**batch)` in a script
    autocast: str | None = None  # forward and loss in this dtype, weights in scale.dtype (mixed precision)
    steps: int = 10
    warmup_steps: int = 3
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-4
    schedule: str = "cosine"
    window_start: int = 4
    checkpoint_every: int = 0
    save_model: bool = False
    keep_weights: bool = False
    runs_dir: str = "runs"
    force: bool = False
    dry_run: bool = False
    force_memory: bool = False
    threads: int = 2
    stall_timeout_s: float = 1800.0
    by_scale: dict[str, Any] = field(default_factory=dict)  # an experiment's per-scale values, for interpolation


GROUPS = ("scale", "model", "backend", "method", "optimizer", "dataset", "data", "task", "gpu", "parallel")
AXES = (*GROUPS, "batch_size", "accumulation", "accumulation_mode", "checkpointing", "memory_cap_gb", "seed", "repeat")
# Neither changes what an arm computes, so neither is part of its identity.
NOT_IDENTITY = ("experiment_name", "runs_dir", "force", "dry_run", "force_memory", "threads", "stall_timeout_s")
NOT_IDENTITY += ("checkpoint_every", "save_model", "keep_weights", "by_scale", "dataset")


def _first(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)


def register() -> None:
    """Register the schema, the sweeper's config and the resolvers; safe to call twice."""
    from hydra.core.config_store import ConfigStore

    OmegaConf.register_new_resolver("first", _first, replace=True)
    OmegaConf.register_new_resolver("share", lambda share, whole: round(share * whole), replace=True)
    OmegaConf.register_new_resolver("final_lr", lambda lr, share: lr * share, replace=True)
    store = ConfigStore.instance()
    store.store(name="base_config", node=Config)
    sweeper = {"_target_": "hydra_plugins.sonar_repro.ArmSweeper", "max_batch_size": None, "params": None}
    store.store(group="hydra/sweeper", name="arms", node=sweeper, provider="sonar_repro")


def conf_dir() -> Path:
    """The Hydra tree: inside the package in a wheel, beside it in a checkout."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "conf"


def resolve(cfg: DictConfig) -> Config:
    """Interpolate, convert to dataclasses and check across fields. Raises UserError naming the dotted key."""
    plain = OmegaConf.masked_copy(cfg, [k for k in cfg if k != "hydra"])
    config: Config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    if config.model.config:
        config.model = _own_model(config.model)
    check(config)
    return config


def _own_model(model: ModelConfig) -> ModelConfig:
    """A user's own configuration is named after its folder or hub id, and takes nothing from the model group."""
    path = Path(str(model.config))
    name = path.parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else path.name
    own = "".join(c if c.isalnum() or c in "._" else "_" for c in name) or "own"
    return ModelConfig(name=own, model_type="own", weights="random", config=model.config, attention=model.attention)


def from_dict(data: dict[str, Any]) -> Config:
    """Inverse of ``dataclasses.asdict`` (how a config reaches a child process or comes back from a record)."""
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), data))


def _bad(key: str, value: Any, allowed: str) -> UserError:
    return UserError(f"{key}={value}: {allowed}")


CHOICES = {
    "schedule": ("cosine", "constant"),
    "autocast": (None, "bfloat16"),
    "outputs": ("dropped", "kept"),
    "accumulation_mode": (None, "standard", "update_each", "fold"),
    "scale.name": ("smoke", "forecast", "paper"),
    "scale.dtype": ("bfloat16", "float32"),
    "scale.device": ("auto", "cpu", "cuda", "fake"),
    "model.weights": ("random", "pretrained"),
    "method.in_backward": ("none", "experts", "all"),
    "method.granularity": ("tensor", "expert"),
    "data.kind": ("instructions", "text"),
    "data.source": ("embedded", "hub", "path", "synthetic"),
    "parallel.name": ("none", "ddp"),
    "parallel.backend": ("auto", "gloo", "nccl"),
}
AT_LEAST = {
    "batch_size": 1,
    "accumulation": 1,
    "steps": 1,
    "warmup_steps": 0,
    "window_start": 1,
    "checkpoint_every": 0,
    "seed": 0,
    "repeat": 1,
    "threads": 1,
    "parallel.processes": 1,
    "data.max_length": 2,
    "learning_rate": 0,
    "final_learning_rate": 0,
}


def _get(config: Config, dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def check(config: Config) -> None:
    """Refuse early, in one line (rule 2): ranges, choices, then the pairs of fields that must agree."""
    for key, allowed in CHOICES.items():
        value = _get(config, key)
        if value not in allowed:
            raise _bad(key, value, "choose one of " + ", ".join("null" if a is None else str(a) for a in allowed))
    for key, low in AT_LEAST.items():
        value = _get(config, key)
        if value < low:
            raise _bad(key, value, f"must be at least {low}")
    if config.warmup_steps > config.steps:
        raise _bad("warmup_steps", config.warmup_steps, f"longer than the run; use at most steps={config.steps}")
    if config.window_start > config.steps:
        raise _bad("window_start", config.window_start, f"no step would be timed; use at most steps={config.steps}")
    if config.method.max_grad_norm <= 0:
        raise _bad(
            "method.max_grad_norm",
            config.method.max_grad_norm,
            "must be positive; use method.clip=none to clip nothing",
        )
    if config.memory_cap_gb is not None and config.memory_cap_gb <= 0:
        raise _bad("memory_cap_gb", config.memory_cap_gb, "must be positive, in units of 1e9 bytes, or null")
    if config.scale.name == "forecast" and not host_file(config.host).is_file():
        known = ", ".join(sorted(path.stem for path in host_file("").parent.glob("*.json")))
        how = "python -m sonar_repro.timing.measure_host FILE.json measures this machine"
        raise _bad("host", config.host, f"unknown; choose one of {known}, or give a file ({how})")
    _check_accumulation(config)
    _check_data(config)
    _check_parallel(config)


def host_file(name: str) -> Path:
    """The file with a host's measured costs: a committed one by name, or one of your own by its path (``*.json``)."""
    return Path(name) if name.endswith(".json") else Path(__file__).parent / "timing" / "hosts" / f"{name}.json"


KEEPS_GRADIENTS = ("kept", "offloaded")  # clip rules whose gradients wait, on the card or on the host


def _check_accumulation(config: Config) -> None:
    """CASES "Updates inside backward" 1: refused before a model is built, unless the method declares it."""
    mode, method = config.accumulation_mode, config.method
    if method.in_backward == "none":
        if mode not in (None, "standard"):
            raise _bad("accumulation_mode", mode, f"method={method.name} keeps its gradients; use standard")
    elif mode == "standard" and method.clip not in KEEPS_GRADIENTS:
        raise _bad(
            "accumulation_mode", mode, f"method={method.name} frees gradients in backward; use update_each or fold"
        )
    elif method.in_backward == "all" and config.accumulation > 1 and mode is None:
        raise _bad(
            "accumulation",
            config.accumulation,
            f"method={method.name} cannot accumulate: it updates at every micro-batch; "
            "say accumulation_mode=update_each or use a standard method",
        )


def _check_data(config: Config) -> None:
    data = config.data
    if data.source == "path":
        if not data.path:
            raise _bad("data.path", data.path, "name a JSONL file with instruction, input and output")
        if not Path(data.path).is_file():
            raise _bad("data.path", data.path, "no such file; give a JSONL file with instruction, input and output")
    elif data.path and data.source != "hub":
        raise _bad("data.path", data.path, "choose data=own with it (python -m sonar_repro data=own data.path=FILE)")
    if data.source != "synthetic":
        if data.train_examples is not None and data.train_examples < config.batch_size:
            too_few = f"fewer than one batch of batch_size={config.batch_size}"
            raise _bad("data.train_examples", data.train_examples, too_few)
        DataSpec.of(data)


def _check_parallel(config: Config) -> None:
    name, processes = config.parallel.name, config.parallel.processes
    if name == "none" and processes != 1:
        raise _bad("parallel.processes", processes, "choose parallel=ddp with it")
    if name != "none" and config.method.in_backward != "none":
        raise _bad(
            "parallel",
            name,
            f"method={config.method.name} would use gradients before they are averaged; use a standard_* method",
        )
    if name != "none" and config.scale.device == "fake":
        raise _bad("parallel", name, "a forecast is of one process; leave it out")


def accumulation_mode(config: Config) -> str:
    """The mode in force: what was asked, or what the method does by itself."""
    if config.accumulation_mode is not None:
        return config.accumulation_mode
    if config.accumulation == 1:
        return "standard"
    return "standard" if config.method.in_backward == "none" else "update_each"


def fingerprint(config: Config) -> str:
    """sha256 over everything that decides what an arm computes; files count by their content, not their path."""
    data = dataclasses.asdict(config)
    for key in NOT_IDENTITY:
        data.pop(key)
    for group in ("data", "model"):
        for key in ("path", "config"):
            if data[group].get(key):
                data[group][key] = content_digest(data[group][key])
    data["host"] = content_digest(str(host_file(config.host)))
    if config.scale.name != "forecast":
        data.pop("gpu")
        data.pop("host")
    data["task"].pop("inputs")
    data["task"].pop("trace")
    # The scale's own defaults are already in the top-level keys that they feed.
    data["scale"] = {"name": config.scale.name, "dtype": config.scale.dtype, "device": config.scale.device}
    data["accumulation_mode"] = accumulation_mode(config)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def content_digest(path: str) -> str:
    """sha256 of a file, or of a folder's config.json; the text itself for something that is no path (a hub id)."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    return hashlib.sha256(file.read_bytes() if file.is_file() else path.encode()).hexdigest()


def method_label(config: Config) -> str:
    """The method axis: of a comparison both sides, of an evaluation the method behind the checkpoint."""
    return "_vs_".join(config.task.pair) or config.task.of or config.method.name


def axes(config: Config) -> dict[str, Any]:
    """The record's ``arm``: every axis by name."""
    return {
        "experiment": config.experiment_name,
        "task": config.task.name,
        "scale": config.scale.name,
        "model": config.model.name,
        "backend": config.backend.name,
        "method": method_label(config),
        "optimizer": config.optimizer.name,
        "batch_size": config.batch_size,
        "accumulation": config.accumulation,
        "accumulation_mode": accumulation_mode(config),
        "checkpointing": config.checkpointing,
        "outputs": config.outputs,
        "memory_cap_gb": config.memory_cap_gb,
        "seed": config.seed,
        "repeat": config.repeat,
        "data": config.data.name,
        "parallel": config.parallel.name,
        "gpu": config.gpu.name if config.scale.name == "forecast" else None,
    }


def arm_id(config: Config, overrides: list[str] | None = None) -> str:
    """Folder name of an arm: its choices, its non-default axes, and six hex digits for any other override."""
    parts = [config.model.name, config.backend.name, method_label(config), config.optimizer.name]
    parts += [f"bs{config.batch_size}", f"s{config.seed}"]
    if config.task.name != "train":
        parts.insert(0, config.task.name)
    if config.accumulation > 1:
        parts.append(f"A{config.accumulation}")
        if config.accumulation_mode == "fold":
            parts.append("fold")
    if config.checkpointing:
        parts.append("gc")
    if config.memory_cap_gb is not None:
        parts.append(f"cap{config.memory_cap_gb:g}")
    if config.repeat > 1:
        parts.append(f"r{config.repeat}")
    if config.parallel.name != "none":
        parts.append(f"{config.parallel.name}{config.parallel.processes}")
    if any(_is_other(o) for o in overrides or []):
        parts.append(fingerprint(config)[:6])
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in "-".join(parts))


def _is_other(override: str) -> bool:
    """Whether an override changes the arm without being an axis that its id already shows."""
    key = override.lstrip("+~").split("=", 1)[0]
    shown = (*AXES, "experiment", "task.pair", "task.of", "task.trace")
    return key not in shown and key.split(".")[0] not in (*NOT_IDENTITY, "hydra")


def parameter_count(model: ModelConfig, scale: str) -> int | None:
    """Trainable parameters of a model at a scale, without building it; None for a user's own configuration."""
    if model.config or model.path:
        return None
    return model.parameters.get("smoke" if scale == "smoke" else "full")
