"""In-backward steps against the tutorial pattern (one optimizer a tensor in a plain hook) and the standard step."""

from __future__ import annotations

import statistics
import time

PAIRS = 20


def run() -> list[dict]:
    """Median paired ratios of one-thread CPU time on a model of smoke scale, and the time to attach to 64 layers."""
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM

    from sonar_repro import Schedule, ScheduledOptimizer, make_factory
    from sonar_repro.training.process import keep_freed_pages

    torch.set_num_threads(1)
    keep_freed_pages()  # as an arm's process does
    factory = make_factory("adamw", lr=1e-4)

    def build(layers: int) -> torch.nn.Module:
        torch.manual_seed(0)
        config = OlmoeConfig(
            vocab_size=2048, hidden_size=256, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=4, num_experts=64 if layers == 8 else 4, num_experts_per_tok=4, pad_token_id=0,
            eos_token_id=1,
        )  # fmt: skip
        return OlmoeForCausalLM._from_config(config, experts_implementation="grouped_mm", dtype=torch.bfloat16).train()

    batch = torch.randint(0, 2048, (2, 64), generator=torch.Generator().manual_seed(0))

    def ours(method: str, max_grad_norm: float | None = 1.0):
        model = build(8)
        optimizer = ScheduledOptimizer(model, factory, Schedule.named(method), max_grad_norm=max_grad_norm)

        def step() -> None:
            optimizer.zero_grad()
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
            optimizer.step()

        return step

    def tutorial():
        model = build(8)
        inner = {
            p: torch.optim.AdamW([p], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
            for p in model.parameters()
        }

        def hook(p: torch.nn.Parameter) -> None:
            inner[p].step()
            inner[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)

        def step() -> None:
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()

        return step

    contestants = {
        "all": ours("optimizer_in_backward"),
        "sonar": ours("sonar"),
        "sonar_no_clip": ours("sonar", None),
        "standard": ours("standard_no_clip"),
        "standard_no_expert_clip": ours("standard_no_expert_clip"),
        "tutorial": tutorial(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(PAIRS + 2):
        for name, step in contestants.items():
            start = time.process_time()
            step()
            if repeat >= 2:
                seconds[name].append(time.process_time() - start)
    rows = []
    pairs = (  # each beside what clips as much as it does
        ("all", "tutorial"),
        ("all", "standard"),
        ("sonar_no_clip", "standard"),
        ("sonar", "standard_no_expert_clip"),
    )
    for over, under in pairs:
        ratio = statistics.median(a / b for a, b in zip(seconds[over], seconds[under]))
        rows.append({"step": f"{over} / {under}", "paired_ratio": ratio, "target": 1.0})
    deep = build(64)
    start = time.perf_counter()
    ScheduledOptimizer(deep, factory, "sonar")
    return [*rows, {"attach_64_layers_s": time.perf_counter() - start, "target_s": 1.0}]
