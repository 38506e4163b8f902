"""In-backward steps against other loops on one model (interleaved, one thread, CPU time), and the time to attach."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

PAIRS = 25
HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.0}


def _model(layers: int, hidden: int, experts: int):
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        vocab_size=2048, hidden_size=hidden, intermediate_size=hidden // 2, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, num_experts=experts, num_experts_per_tok=8, pad_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return OlmoeForCausalLM._from_config(config, experts_implementation="grouped_mm").train()
    finally:
        torch.set_default_dtype(torch.float32)


def _ours(method: str, inputs: dict) -> Callable[[], None]:
    from sonar_repro import ScheduledOptimizer, make_factory
    from sonar_repro.tasks.step import training_step

    model = _model(4, 256, 64)
    optimizer = ScheduledOptimizer(model, make_factory("adamw", **HYPER), method)
    return lambda: training_step(model, optimizer, None, [inputs])


def _one_optimizer_a_tensor(inputs: dict) -> Callable[[], None]:
    """torchtune's and the PyTorch tutorial's pattern, on the expert tensors; the rest is clipped and stepped."""
    import torch

    model = _model(4, 256, 64)
    experts = [p for p in model.parameters() if p.ndim == 3]
    rest = [p for p in model.parameters() if p.ndim != 3]
    optimizers = {p: torch.optim.AdamW([p], fused=True, **HYPER) for p in experts}
    end = torch.optim.AdamW(rest, fused=True, **HYPER)

    def hook(parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in experts:
        p.register_post_accumulate_grad_hook(hook)

    def step() -> None:
        end.zero_grad()
        model(**inputs, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        end.step()

    return step


def _plain(inputs: dict) -> Callable[[], None]:
    """One fused AdamW, nothing clipped."""
    import torch

    model = _model(4, 256, 64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)

    def step() -> None:
        optimizer.zero_grad()
        model(**inputs, use_cache=False).loss.backward()
        optimizer.step()

    return step


def _compare(what: str, ours: Callable[[], None], other: Callable[[], None], target: float | None) -> dict:
    times: dict[str, list[float]] = {"ours": [], "other": []}
    for pair in range(PAIRS + 2):
        for name, step in (("ours", ours), ("other", other))[:: 1 if pair % 2 else -1]:
            start = time.process_time()
            step()
            if pair >= 2:
                times[name].append(time.process_time() - start)
    paired = statistics.median(a / b for a, b in zip(times["ours"], times["other"]))
    return {
        "what": what,
        "median_of_paired_ratios": paired,
        "target": target,
        "step_cpu_s": statistics.median(times["ours"]),
    }


def _attach(method: str) -> dict:
    from sonar_repro import ScheduledOptimizer, make_factory

    model = _model(64, 64, 64)
    ScheduledOptimizer(model, make_factory("adamw", **HYPER), "standard_no_clip")  # imports and the fused probe
    start = time.perf_counter()
    ScheduledOptimizer(model, make_factory("adamw", **HYPER), method)
    return {"what": f"attach {method} to 64 layers", "seconds": time.perf_counter() - start, "target": 1.0}


def run() -> list[dict]:
    """The in-backward step costs no more than per-tensor hooks and the unclipped standard step; attaching under 1 s."""
    import torch

    torch.set_num_threads(1)
    ids = torch.randint(2, 2048, (2, 64), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    rows = [
        _compare("sonar / one optimizer a tensor", _ours("sonar", inputs), _one_optimizer_a_tensor(inputs), 1.0),
        _compare("sonar / plain loop without clipping", _ours("sonar", inputs), _plain(inputs), 1.0),
    ]
    for method, other in (
        ("sonar_exact_clip", "standard_global_clip"),
        ("sonar_offload_clip", "standard_global_clip"),
        ("sonar_tensor_clip", "sonar"),
        ("sonar_lagged_clip", "sonar"),
        ("sonar_per_expert", "sonar"),
    ):
        rows.append(_compare(f"{method} / {other}", _ours(method, inputs), _ours(other, inputs), None))
    return [*rows, _attach("sonar"), _attach("optimizer_in_backward")]
