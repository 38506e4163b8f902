"""The training task on real tensors: one arm from a built model to its record, at smoke and paper scale."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from ..config.identity import fingerprint
from ..config.schema import Config
from ..data import Batch, BatchStream, load_corpus, sequential_batches
from ..data import load_tokenizer as embedded_tokenizer
from ..errors import UserError
from ..instruments.kernels import profile_steps
from ..instruments.memory import CudaHistory, CudaMeter, TrackerMeter
from ..instruments.timeline import traced_step
from ..instruments.timer import StepTimer
from ..kernels import parity, require
from ..kernels.registry import ran_implementation
from ..machine import gpu_facts, shared_card
from ..models.build import (
    DTYPES,
    architecture,
    build_random,
    load_pretrained,
    load_tokenizer,
    pretrained_architecture,
)
from ..models.experts import find_expert_tensors
from ..optim.diagnosis import Diagnosis
from . import checkpoint
from . import ranks as distributed
from .build import (
    counts_of,
    describe_model,
    gradient_floor,
    hidden_momentum,
    make_optimizer,
    make_scheduler,
    roles_of,
    state_bytes,
    state_tensors,
)
from .evaluate import changed_weights, evaluate
from .process import device_of, environment, lift_memory_cap, prepare_process, set_memory_cap
from .step import training_step

PROFILED_STEPS = 5


def run(config: Config, report: Any) -> None:
    """Entry of ``task=train``. Hands the record's sections to ``report``; raises what ends the arm otherwise."""
    Training(config, report).run()


class Training:
    """One arm on real tensors. The order of the phases is the order of the methods below."""

    def __init__(self, config: Config, report: Any) -> None:
        self.config, self.report = config, report
        self.fingerprint = fingerprint(config)
        self.autocast = DTYPES[config.autocast] if config.autocast else None
        self.held: list[Any] | None = [] if config.outputs == "kept" else None
        self.card: dict[str, Any] | None = None
        self.parity: dict[str, Any] | None = None
        self.history: CudaHistory | None = None
        self.cap: str | None = None
        self.diagnosis: Diagnosis | None = None
        self.skipped = 0
        self.train_losses: list[float | None] = []
        self.norms: list[float | None] = []

    def run(self) -> None:
        config, report = self.config, self.report
        self.prepare()
        report.phase("data")
        self.load_data()
        report.phase("parity")
        self.check_kernels()
        self.cap = set_memory_cap(config, self.device)
        if self.device.type == "cpu":
            report.phase("memory")
            self.measure_memory()
        report.phase("build")
        self.history = CudaHistory(report.arm_dir) if config.task.options.get("snapshot") else None
        meter = CudaMeter(self.device) if self.device.type == "cuda" else None
        try:
            if meter:
                meter.phase("load")
            self.build()
            self.train(meter)
        except Exception:
            self.record_unfinished(meter)
            raise
        self.finish(meter)

    def prepare(self) -> None:
        """Process settings, device and expert kernels."""
        prepare_process(self.config)
        self.device = device_of(self.config)
        self.experts = require(self.config.backend.name, self.device.type)

    def check_kernels(self) -> None:
        """Who else is on the card, before we are; then the backend against eager, before anything is measured."""
        config = self.config
        self.card = gpu_facts() if self.device.type == "cuda" else None
        shared = shared_card(self.card) if self.card else None
        if shared:
            self.report.note(shared)
        dtype, device = DTYPES[config.scale.dtype], self.device
        self.parity = parity.check(self.shape(), config.backend.name, self.experts, dtype=dtype, device=device)

    def record_unfinished(self, meter: CudaMeter | None) -> None:
        """What CUDA counted up to a fault, and the allocator's history if it was asked for."""
        with contextlib.suppress(RuntimeError):  # after a broken kernel every call fails: the first error is the one
            if meter:
                self.report.section("memory", {**meter.read(), "reason": "the run ended before its last step"})
            if self.history:
                self.report.section("memory_snapshot", self.history.save())

    def load_data(self) -> None:
        """Tokenizer and corpus: the model's own tokenizer with its weights or with hub data, else the embedded."""
        config = self.config
        if config.model.weights == "pretrained" or config.data.source == "hub":
            self.tokenizer = load_tokenizer(config.model)
        else:
            self.tokenizer = embedded_tokenizer(config.data.kind)
        self.corpus = load_corpus(config.data, tokenizer=self.tokenizer, seed=config.seed)

    def make_model(self) -> Any:
        """The starting model: hub weights, or random ones from the arm's seed (the same at every call)."""
        config = self.config
        device = torch.device("cpu") if config.parallel.name == "fsdp2" else self.device  # sharding moves it, in parts
        places = {"dtype": DTYPES[config.scale.dtype], "device": device, "experts": self.experts}
        if config.model.weights == "pretrained":
            model = load_pretrained(config.model, attention=config.model.attention, **places)
        else:
            model = build_random(self.shape(), attention=config.model.attention, seed=config.seed, **places)
        if config.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model.train()

    def shape(self) -> Any:
        """The transformers config of the arm's model; at smoke scale its vocabulary is the tokenizer's."""
        config = self.config
        if config.model.weights == "pretrained":
            return pretrained_architecture(config.model)
        smoke = config.scale.name == "smoke" and not config.model.config
        shape = architecture(config.model, config.scale.name, self.corpus.vocab_size if smoke else None)
        if shape.get_text_config().vocab_size < self.corpus.vocab_size:
            raise UserError(
                f"model={config.model.name}: its vocabulary of {shape.vocab_size} is smaller than the tokenizer's "
                f"{self.corpus.vocab_size}; choose another model or data"
            )
        return shape

    def build(self) -> None:
        config = self.config
        self.model = self.make_model()
        self.trained = distributed.wrap(self.model, config)
        self.optimizer = make_optimizer(config, self.trained)
        self.scheduler = make_scheduler(config, self.optimizer)
        if config.task.options.get("diagnosis"):
            self.diagnosis = Diagnosis(self.model, config.seed)
            self.report.note("times include the diagnosis: compare them with no other run's")
        self.describe()

    def describe(self) -> None:
        """The sections that are known before the first step: an arm that ends badly still tells what it was."""
        report, model = self.report, self.model
        report.section("model", describe_model(self.config, model))
        report.section("data", self.corpus.describe())
        ran = ran_implementation(model)
        attention = str(getattr(model.config, "_attn_implementation", None))
        described = self.optimizer.describe()
        facts = environment(self.config, self.device.type, ran, attention, described[0], self.card)
        report.section("environment", {**facts, "parity": self.parity})
        for line in described:
            print(line, flush=True)

    # -- memory on a CPU: separate, untimed steps on a model of their own ------------------------------------------

    def measure_memory(self) -> None:
        """Peaks by phase from our tracker: two steps on the run's longest batch, on a model that is then dropped."""
        config = self.config
        longest = self.longest_step()
        meter = TrackerMeter()
        with meter:
            meter.phase("load")
            self.model = self.make_model()
            floor = gradient_floor(self.model)
            trained = distributed.wrap(self.model, config)
            optimizer = make_optimizer(config, trained)
            scheduler = make_scheduler(config, optimizer)
            for phase in ("warmup", "measured"):
                meter.phase(phase)
                training_step(
                    trained,
                    optimizer,
                    scheduler,
                    inputs(longest, self.device),
                    config.accumulation,
                    self.autocast,
                    self.held,
                )
        memory = {**meter.read(), **floor, **state_bytes(optimizer)}
        memory["batch_shapes"] = [list(batch.input_ids.shape) for batch in longest]
        memory["steps"] = "2 untimed steps on the longest batch of the run; the second is measured"
        self.report.section("memory", memory)
        self.held = [] if config.outputs == "kept" else None
        del self.model, trained, optimizer, scheduler
        self.check_cap(memory)

    def check_cap(self, memory: dict[str, Any]) -> None:
        if self.cap == "tracker":
            cap = self.config.memory_cap_gb * 1e9
            for phase in ("load", "warmup", "measured"):
                peak = memory[phase]["peak_allocated_bytes"]
                if peak and peak > cap:
                    self.report.phase(phase)
                    raise MemoryError(
                        f"peak allocated {peak} bytes by the tracker, memory_cap_gb={self.config.memory_cap_gb:g}"
                    )

    def longest_step(self) -> list[Batch]:
        """The micro-batches of the run's step with the most padded tokens."""
        config = self.config
        stream = self.stream()
        steps = [[next(stream) for _ in range(config.accumulation)] for _ in range(config.steps)]
        return max(steps, key=lambda batches: sum(b.input_ids.numel() for b in batches))

    def stream(self, start: int = 0) -> BatchStream:
        group = {"rank": distributed.rank(), "world_size": distributed.world_size()}
        return BatchStream(self.corpus.train, self.config.batch_size, self.corpus.pad_id, start=start, **group)

    # -- the run ---------------------------------------------------------------------------------------------------

    def train(self, meter: CudaMeter | None) -> None:
        """Warm-up and timed steps. Collation, progress, checkpoints and reading losses are outside the timed part."""
        config, report = self.config, self.report
        self.first_step = checkpoint.resume(self) + 1
        stream = self.stream(start=(self.first_step - 1) * config.accumulation)
        self.timer = StepTimer(self.device)
        if meter:
            meter.phase("warmup")
        for step in range(self.first_step, config.steps + 1):
            measured = step >= max(config.window_start, self.first_step)
            if meter and step == max(config.window_start, self.first_step):
                self.end_history()
                meter.phase("measured")
            report.phase_name = f"{'measured' if measured else 'warmup'}, step {step}"
            self.one_step(step, [next(stream) for _ in range(config.accumulation)])
            peak = torch.cuda.max_memory_allocated() / 1e9 if meter else None
            milliseconds = self.timer.step_s[-1] * 1e3 if self.timer.step_s else None
            report.step(step, config.steps, loss=self.train_losses[-1], ms=milliseconds, peak_gb=peak)
            due = config.checkpoint_every and step % config.checkpoint_every == 0 and step < config.steps
            if due and distributed.rank() == 0:
                checkpoint.save(self, step)

    def end_history(self) -> None:
        """Write the allocator's history before the first timed step."""
        if self.history:
            self.report.section("memory_snapshot", self.history.save())

    def one_step(self, step: int, batches: list[Batch]) -> None:
        """One timed step. A step without a supervised token is skipped before forward and counted.

        In an accumulated step a micro-batch without one is left out; its share of the mean counts as zero.
        """
        usable = [batch for batch in batches if batch.supervised_tokens]
        if not usable:
            self.skipped += 1
            self.train_losses.append(None)
            self.norms.append(None)
            self.scheduler.step()
            return
        if self.diagnosis:
            self.diagnosis.begin_step()
        tokens = sum(batch.supervised_tokens for batch in usable) * distributed.world_size()
        with self.timer.step(tokens):
            losses = training_step(
                self.trained,
                self.optimizer,
                self.scheduler,
                inputs(usable, self.device),
                self.config.accumulation,
                self.autocast,
                self.held,
            )
        loss = distributed.mean(torch.stack(losses).float().mean())
        self.train_losses.append(loss if math.isfinite(loss) else None)
        norm = self.optimizer.last_clip.norm
        self.norms.append(None if norm is None else float(norm))

    def finish(self, meter: CudaMeter | None) -> None:
        """What is known after the last step: counts, time, memory, losses, weights."""
        config, report = self.config, self.report
        steps_run = len(self.timer.step_s)
        report.section("counts", counts_of(self.optimizer, steps_run, self.skipped, config.accumulation))
        time = self.timer.summary(config.window_start, self.first_step)
        report.section("time", time)
        report.sections["data"]["supervised_tokens_per_step"] = time["supervised_tokens_per_step"]
        if self.first_step > 1:
            report.note(f"resumed at step {self.first_step}: the timing window was restarted there")
            if self.diagnosis:
                report.note(f"the diagnosis is of the steps from {self.first_step} on")
        if meter:
            report.section("memory", {**meter.read(), **gradient_floor(self.model), **state_bytes(self.optimizer)})
            lift_memory_cap(self.cap, self.device)
        report.section("roles", roles_of(self.optimizer))
        if config.parallel.name == "fsdp2":  # what follows is rank 0's alone and needs whole weights
            self.model = self.trained = distributed.gathered(self.model, self.make_model()).to(self.device)
        distributed.check_ranks_agree(self.model)
        if distributed.rank() != 0:
            return  # one report an arm
        if (found := hidden_momentum(self.optimizer)) is not None:
            report.section("hidden_momentum", found)
        if self.diagnosis:
            report.section("diagnosis", self.diagnosis.summary())
            self.diagnosis.close()
        report.section("grad_norm", {"scope": self.optimizer.last_clip.scope, "values": self.norms})
        if config.task.profile:
            report.phase("profile")
            time["kernel_breakdown"] = self.profile()
        if config.task.timeline:
            report.phase("timeline")
            report.section("timeline", self.timeline())
        report.phase("evaluate")
        heldout = sequential_batches(self.corpus.heldout, config.batch_size, self.corpus.pad_id)
        report.section(
            "loss", {"train": self.train_losses, **evaluate(self.model, heldout, self.device, self.autocast)}
        )
        report.phase("weights")
        del self.optimizer, self.scheduler, self.held
        if config.save_model:
            checkpoint.save_model(self)
        if config.keep_weights:
            checkpoint.save_weights(self)
        names = {tensor.name for tensor in find_expert_tensors(self.model)}
        report.section("weights", changed_weights(self.model, self.make_model().named_parameters(), names))
        checkpoint.remove(self)

    def profile(self) -> dict[str, Any]:
        """Kernel time by kind (Figure 3) over the next batches."""
        accumulation = self.config.accumulation
        stream = self.stream(start=self.config.steps * accumulation)
        work = [[next(stream) for _ in range(accumulation)] for _ in range(1 + PROFILED_STEPS)]
        work = [batches for batches in work if all(batch.supervised_tokens for batch in batches)]
        return profile_steps(self.step_at_rate_zero, work, self.device)

    def timeline(self) -> dict[str, Any]:
        """Memory by owner over one more step on the longest batch (Figure 2)."""
        if self.held:
            self.held.clear()  # the last output of training, which the traced step must not find alive
        experts = [tensor.parameter for tensor in find_expert_tensors(self.model)]
        longest = self.longest_step()
        states = state_tensors(self.optimizer)
        return traced_step(self.model, experts, states, lambda: self.step_at_rate_zero(longest))

    def step_at_rate_zero(self, batches: list[Batch]) -> None:
        """A training step that moves no weight."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        arguments = (inputs(batches, self.device), self.config.accumulation, self.autocast, self.held)
        training_step(self.model, self.optimizer, None, *arguments)


def inputs(batches: list[Batch], device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Move micro-batches to the device one by one, as the step asks for them."""
    for batch in batches:
        yield batch.model_inputs(device)
