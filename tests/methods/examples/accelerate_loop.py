"""Accelerate: gradient accumulation, its scheduler wrapper, save_state and load_state.

python tests/methods/examples/accelerate_loop.py
"""

import tempfile

import torch
from accelerate import Accelerator
from transformers import OlmoeConfig, OlmoeForCausalLM

from sonar_repro import ScheduledOptimizer, make_factory


def make_model() -> OlmoeForCausalLM:
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_experts=4, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return OlmoeForCausalLM(config).to(torch.bfloat16)


def main(folder: str | None = None, steps: int = 6, save_at: int | None = None, resume: bool = False):
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = make_model()
    # two micro-batches a step: say that experts are updated at each (the paper's Sonar), or use "fold"
    optimizer = ScheduledOptimizer(
        model, make_factory("adamw", lr=1e-2), "sonar", accumulation=2, accumulation_mode="update_each"
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 3))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if resume:
        accelerator.load_state(folder)
    data = torch.randint(2, 64, (2, 2, 12), generator=torch.Generator().manual_seed(1)).repeat(steps, 1, 1)
    done = 2 * optimizer.optimizer.steps
    losses = []
    for ids in data[done:]:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)  # divides by the accumulation steps
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if save_at is not None and optimizer.optimizer.steps == save_at and accelerator.sync_gradients:
            accelerator.save_state(folder)
            break
    print("losses:", ", ".join(f"{x:.4f}" for x in losses))
    return model, optimizer, losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        main(path, save_at=3)
        main(path, resume=True)
