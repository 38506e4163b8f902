"""A plain loop on several processes, DDP or FSDP2: experts are updated inside backward on their averaged gradients.

torchrun --nproc-per-node 2 tests/methods/examples/data_parallel_loop.py ddp     (or fsdp2)
"""

import sys

import torch
import torch.distributed as dist
from transformers import OlmoeConfig, OlmoeForCausalLM

from sonar_repro import ScheduledOptimizer, data_parallel, make_factory


def main(mode: str = "ddp", method: str = "sonar", steps: int = 6) -> list[float]:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_experts=4, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = OlmoeForCausalLM(config).to(torch.bfloat16)
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        model = model.cuda()

    model = data_parallel(model, mode, method)  # instead of DistributedDataParallel(model) or fully_shard(model)
    optimizer = ScheduledOptimizer(model, make_factory("adamw", lr=1e-2, betas=(0.9, 0.95)), method, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 3))

    losses = []
    ids = torch.randint(2, 64, (2 * dist.get_world_size(), 16))  # the same on every rank
    mine = ids[dist.get_rank() :: dist.get_world_size()].to(next(model.parameters()).device)
    for _ in range(steps):
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        print(*optimizer.describe(), f"losses: {', '.join(f'{x:.4f}' for x in losses)}", sep="\n")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
