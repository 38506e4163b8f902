"""Typed configuration: one dataclass a Hydra group, and from a composed config to a checked one. Imports no torch.

The root schema is registered in Hydra's ConfigStore as ``base_config``, so an unknown key or a wrong type is an error
of composition. :mod:`sonar_repro.harness.compose` turns a composed config into a checked :class:`Config`; what an arm
is called is in :mod:`sonar_repro.config.identity`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


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
    title: str = ""  # how tables print it
    short: str = ""  # in a narrow place
    model_type: str = "olmoe"
    hub_id: str | None = None
    revision: str | None = None
    architecture: dict[str, Any] = field(default_factory=dict)
    smoke: dict[str, Any] = field(default_factory=dict)
    weights: str = "random"  # random | pretrained
    config: str | None = None  # a local config.json or folder, or a hub id, in place of the architecture
    path: str | None = None  # a local checkpoint folder in place of the hub id
    attention: str | None = None  # sdpa | eager | ...; null: what transformers takes for the class (sdpa if it has it)
    tokenizer: str | None = None  # where hub_id has none: a hub id or folder
    parameters: dict[str, int] = field(
        default_factory=dict
    )  # trainable, by size: full | smoke (tested against a build)


@dataclass
class BackendConfig:
    """An expert kernel behind transformers' ExpertsInterface."""

    name: str = "grouped_mm"
    title: str = ""
    short: str = ""


@dataclass
class MethodConfig:
    """When each parameter is updated and what is clipped: three knobs make the six methods."""

    name: str = "sonar"
    title: str = ""
    short: str = ""
    in_backward: str = "experts"  # none | experts | all
    granularity: str = "tensor"  # tensor | expert
    clip: str = "non_expert"  # all | non_expert | none, and what methods/ adds
    max_grad_norm: float = 1.0
    accumulation_mode: str | None = None  # what accumulation_mode=null stands for, if not the usual
    on_nonfinite: str = "off"  # skip | raise | off: a gradient that is not finite; "off" is what the papers' code does
    nonfinite_check: str = "incoming"  # incoming | full: what is looked at for it
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerConfig:
    """The update rule; ``hyper`` goes to the factory as it is."""

    name: str = "adamw"
    title: str = ""
    short: str = ""
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
    """One data set and the part of it that is used, named for what it is (:mod:`sonar_repro.data.checks` checks it)."""

    name: str = "embedded_instructions"
    kind: str = "instructions"  # instructions: loss on the response | text: packed, loss on every token
    source: str = "embedded"  # embedded: in the package | hub | path | synthetic: a forecast's, no data
    path: str | None = None  # a JSONL, JSON or Parquet file; only with source=path
    hub_id: str | None = None
    revision: str | None = None  # a commit, so that the data cannot change unseen
    subset: str | None = None  # the hub's configuration name, if the set has several
    train_examples: int | None = 0  # instructions: the first N of the shuffled order; text: sequences, null for all
    heldout_start: int | None = 0  # position in the shuffled order; null: behind the training examples, text: first
    heldout_count: int = 0  # examples, or packed sequences
    max_length: int = 64  # tokens; instructions are cut there, text is packed to exactly that

    @property
    def heldout_range(self) -> tuple[int, int]:
        """Held-out positions ``[start, stop)`` in the shuffled order of an instruction set."""
        start = (self.train_examples or 0) if self.heldout_start is None else self.heldout_start
        return start, start + self.heldout_count

    @property
    def rows_needed(self) -> int:
        """Rows that an instruction set must have for this training and held-out selection."""
        return max(self.train_examples or 0, self.heldout_range[1] if self.heldout_count else 0)


START = "start"  # in place of a method's name: the weights before any training


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
    snapshot: str | None = None  # forecast: its allocations, for torch's memory viewer, are written here
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

    name: str = "none"  # none | ddp | fsdp2
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
FILES_ASIDE = ("trace", "snapshot")  # keys of task: files that a forecast writes beside its record
NOT_IDENTITY = ("experiment_name", "runs_dir", "force", "dry_run", "force_memory", "threads", "stall_timeout_s")
NOT_IDENTITY += ("checkpoint_every", "save_model", "keep_weights", "by_scale", "dataset")
TITLED = ("model", "backend", "method", "optimizer")  # groups whose title and short name only tables use


def conf_dir() -> Path:
    """The Hydra tree: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def from_dict(data: dict[str, Any]) -> Config:
    """Inverse of ``dataclasses.asdict`` (how a config reaches a child process or comes back from a record)."""
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), data))


def host_file(name: str) -> Path:
    """The file with a host's measured costs: a committed one by name, or one of your own by its path (``*.json``)."""
    return Path(name) if name.endswith(".json") else Path(__file__).parents[1] / "forecast" / "hosts" / f"{name}.json"
