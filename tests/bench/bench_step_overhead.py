"""A harness step against the same step in a hand-written loop: same model, method and batch, interleaved."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

PAIRS = 40


def run() -> list[dict]:
    """Ratio of medians, harness over hand-written, for the standard method (target: at most 1.02)."""
    import torch

    from sonar_repro.harness.compose import compose
    from sonar_repro.harness.worker import Reporter
    from sonar_repro.instruments.timer import StepTimer
    from sonar_repro.training.build import make_scheduler
    from sonar_repro.training.train import Training

    config = compose("method=standard_global_clip", "threads=1", "steps=100000")
    torch.set_num_threads(1)
    arm = Training(config, Reporter(None, Path(tempfile.mkdtemp())))
    arm.device, arm.experts = torch.device("cpu"), "grouped_mm"
    arm.load_data()
    arm.build()
    arm.timer = StepTimer(arm.device)
    model = arm.make_model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    scheduler = make_scheduler(config, optimizer)  # the same rates: routing, and with it time, follows the weights
    batch = next(arm.stream())
    inputs = batch.model_inputs(arm.device)

    def by_hand() -> None:
        optimizer.zero_grad()
        model(**inputs, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    def harness() -> None:
        arm.one_step(1, [batch])

    times: dict[str, list[float]] = {"harness": [], "by_hand": []}
    for pair in range(PAIRS + 3):
        for name, function in (("harness", harness), ("by_hand", by_hand))[:: 1 if pair % 2 else -1]:
            start = time.process_time()
            function()
            if pair >= 3:
                times[name].append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["harness"] / medians["by_hand"]
    paired = statistics.median(h / b for h, b in zip(times["harness"], times["by_hand"]))
    return [
        {
            "ratio_of_medians": ratio,
            "median_of_paired_ratios": paired,
            "target": 1.02,
            "by_hand_cpu_s": medians["by_hand"],
        }
    ]
