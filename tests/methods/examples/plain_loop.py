"""A plain PyTorch loop: experts are updated inside backward, the rest is clipped and stepped by ``optimizer.step()``.

python tests/methods/examples/plain_loop.py
"""

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from sonar_repro import ScheduledOptimizer, make_factory


def main(method: str = "sonar", steps: int = 6) -> list[float]:
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_experts=4, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = OlmoeForCausalLM(config).to(torch.bfloat16)

    optimizer = ScheduledOptimizer(model, make_factory("adamw", lr=1e-2, betas=(0.9, 0.95)), method, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 3))
    print(*optimizer.describe(), sep="\n")

    losses = []
    ids = torch.randint(2, 64, (2, 16))
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in optimizer.backward_passes():  # once; twice for sonar_exact_clip
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        report = optimizer.last_clip
        norm = "not measured" if report.norm is None else f"{report.norm.item():.3f}"
        print(f"step {optimizer.steps}: loss {losses[-1]:.4f}, norm ({report.scope}) {norm}")
    return losses


if __name__ == "__main__":
    main()
