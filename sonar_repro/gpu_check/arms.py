"""What the check runs: stages of arms, each arm a list of Hydra overrides, in the order of what matters most."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

METHODS = ("standard_global_clip", "sonar", "standard_no_expert_clip", "optimizer_in_backward")
PAIRS = (  # Table 4 of Sonar-MoE
    ("standard_no_expert_clip", "standard_no_expert_clip"),
    ("sonar", "standard_no_expert_clip"),
    ("sonar_per_expert", "sonar"),
    ("optimizer_in_backward", "standard_no_clip"),
    ("standard_global_clip", "standard_no_expert_clip"),
)
CAPS_GB = (46.0, 30.5)  # Table 6
WEIGHTS_DISK = 20_000_000_000  # seven files of two OLMoE layers in bf16
#: Packed text: every batch is full, as in a forecast. Instructions: lengths as they come.
PACKED = ("data=text_smoke", "data.train_examples=128", "data.heldout_count=4")
DRAWN = ("data=embedded_instructions", "data.train_examples=128", "data.heldout_start=600", "data.heldout_count=4")
#: The tiny OLMoE of a dry run: the same code on a CPU.
DRY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "num_attention_heads": 4}
DRY |= {"num_key_value_heads": 4, "vocab_size": 2048, "pad_token_id": 0, "eos_token_id": 1}


@dataclass(frozen=True)
class Planned:
    """One arm: its stage, a short name, its overrides, and why it cannot run here (if so)."""

    stage: str
    name: str
    overrides: tuple[str, ...]
    why_not: str | None = None


@dataclass
class Stage:
    """Arms of one purpose. Timed stages run one arm at a time; others side by side."""

    name: str
    title: str
    arms: list[Planned] = field(default_factory=list)
    workers: int = 1
    expected_s: float = 40.0
    forecast: bool = True


@dataclass(frozen=True)
class Setting:
    """What the command line chose."""

    dry: bool = False
    layers: int | None = None
    steps: int = 30  # timed
    untimed: int = 10

    @property
    def full(self) -> bool:
        return not self.dry and self.layers is None

    def base(self) -> list[str]:
        """Overrides of every arm: full size, random weights, no network, no checkpoints on disk."""
        untimed, timed = (2, 3) if self.dry else (self.untimed, self.steps)
        common = [
            "scale=paper",
            "model=olmoe",
            "model.weights=random",
            "checkpoint_every=0",
            "experiment_name=gpu_check",
        ]
        common += [f"steps={untimed + timed}", "warmup_steps=2", f"window_start={untimed + 1}", "stall_timeout_s=150"]
        if self.dry:
            common += ["scale.device=cpu", "scale.max_length=32", "threads=1"]
        return common + self.sizes(DRY["num_hidden_layers"] if self.dry else self.layers)

    def sizes(self, layers: int | None) -> list[str]:
        """Overrides of the architecture with this many layers; [] for the full model."""
        sizes: dict[str, Any] = dict(DRY) if self.dry else {}
        if layers is not None:
            sizes["num_hidden_layers"] = layers
        return [f"model.architecture.{key}={value}" for key, value in sizes.items()]


def stages(setting: Setting, backend_reason: Callable[[str], str | None], free_disk: int) -> list[Stage]:
    """All stages that can be planned before anything ran (caps of a smaller model are planned by what it measured).

    Args:
        backend_reason: why an expert kernel cannot run here, or None.
        free_disk: bytes where records and the weights to compare are kept.
    """
    base = (*setting.base(), *PACKED)
    has_8bit = None if importlib.util.find_spec("bitsandbytes") else "bitsandbytes is not installed"

    def arm(stage: str, name: str, *overrides: str, why: str | None = None, data: tuple[str, ...] = ()) -> Planned:
        return Planned(stage, name, (*setting.base(), *(data or PACKED), *overrides), why)

    plan = [Stage("table1", "Table 1's methods on grouped_mm")]
    plan[0].arms = [arm("table1", m, "backend=grouped_mm", f"method={m}") for m in METHODS]
    plan.append(Stage("per_expert", "one optimizer call an expert"))
    plan[-1].arms = [arm("per_expert", "sonar_per_expert", "backend=grouped_mm", "method=sonar_per_expert")]
    for backend in ("scattermoe", "sonicmoe"):
        reason = backend_reason(backend)
        plan.append(Stage(backend, f"Table 1's methods on {backend}", expected_s=60.0))
        plan[-1].arms = [arm(backend, m, f"backend={backend}", f"method={m}", why=reason) for m in METHODS]
    plan.append(Stage("eight_bit", "8-bit AdamW"))
    for method in ("standard_no_expert_clip", "sonar"):
        eight = ("backend=grouped_mm", f"method={method}", "optimizer=adamw8bit")
        plan[-1].arms.append(arm("eight_bit", method, *eight, why=has_8bit))
    plan.append(Stage("caps", "two allocator caps", workers=1 if setting.dry else 2))
    if setting.full:
        plan[-1].arms = caps(base, zip(CAPS_GB, ("adamw", "adamw8bit" if has_8bit is None else "adamw")))
    room = None if setting.dry or free_disk >= WEIGHTS_DISK else f"{free_disk / 1e9:.0f} GB of disk are free, not 20"
    plan.append(table4(setting, base, room))
    extra = Stage("lengths", "lengths as they come")
    extra.arms = [
        arm("lengths", m, "backend=grouped_mm", f"method={m}", data=DRAWN) for m in ("standard_global_clip", "sonar")
    ]
    repeat = Stage("repeat", "the same arm again", forecast=False)
    repeat.arms = [arm("repeat", "sonar", "backend=grouped_mm", "method=sonar", "repeat=2")]
    return [*plan, extra, repeat]


def caps(base: tuple[str, ...], limits: Any) -> list[Planned]:
    """Both sides of each cap (in units of 1e9 bytes, with an optimizer): the standard schedule and Sonar."""
    arms = []
    for cap, optimizer in limits:
        for method in ("standard_no_expert_clip", "sonar"):
            few = ("steps=6", "warmup_steps=2", "window_start=4")
            overrides = ("backend=grouped_mm", f"method={method}", f"optimizer={optimizer}", f"memory_cap_gb={cap:g}")
            arms.append(Planned("caps", f"{method} {optimizer} under {cap:.4g} GB", (*base, *few, *overrides)))
    return arms


def table4(setting: Setting, base: tuple[str, ...], why: str | None = None) -> Stage:
    """Weights after three deterministic steps, compared element by element, on few layers."""
    stage = Stage("table4", "weights that differ (Table 4)", workers=1 if setting.dry else 4, forecast=False)
    three = ("steps=3", "warmup_steps=0", "window_start=1", "learning_rate=1e-4", "schedule=constant")
    layers = setting.sizes(1 if setting.dry else 2)
    for a, b in PAIRS:
        pair = ("task=compare_weights", f"task.pair=[{a},{b}]", "deterministic=true", "backend=grouped_mm")
        stage.arms.append(Planned("table4", f"{a} vs {b}", (*base, *three, *layers, *pair), why))
    return stage
