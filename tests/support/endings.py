"""How a script on two gloo ranks may end; ``python endings.py WAY``, one process per rank, started by test_group_end.

Rank 0 leaves while an all-reduce is under way whose tensor no Python name holds: gloo's thread frees it, for which it
needs the interpreter lock, while the group is taken down. Rank 1 answers two seconds later, so that this is certain.
"""

import sys
import time

import torch
import torch.distributed as dist

if "late" in sys.argv[1]:  # functions of torch.distributed.nn then have the group as a default, and hold it for good
    dist.init_process_group("gloo")
import torch.distributed.nn.functional

from sonar_repro import ScheduledOptimizer, data_parallel, make_factory

KEPT = []  # lives until the interpreter is taken down


def wrapped(way: str):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    if "own_ddp" in way:  # the wrapper is not data_parallel's
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif "every_tensor" not in way:
        return data_parallel(model, "fsdp2" if "fsdp2" in way else "ddp", "standard_no_clip")
    method = "optimizer_in_backward" if "every_tensor" in way else "standard_no_clip"
    model = model if "own_ddp" in way else data_parallel(model, "ddp", method)
    KEPT.append(ScheduledOptimizer(model, make_factory("sgd", lr=0.1), method))
    if "kept" not in way:
        KEPT.clear()
    return model


def leave_a_collective_under_way() -> None:
    if dist.get_rank() == 1:
        time.sleep(2)
    dist.all_reduce(torch.ones(3), async_op=True)


def main(way: str) -> None:
    model = wrapped(way)
    model(torch.ones(2, 4)).sum().backward()
    if "kept" in way:
        KEPT.append(model)
    if "cycle" in way:
        model.itself = [model]
    dist.barrier()
    leave_a_collective_under_way()
    if "raises" in way:
        raise SystemExit(3) if "exit" in way else ValueError("the loop failed")
    if "never" not in way:
        dist.destroy_process_group()


if __name__ == "__main__":
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    main(sys.argv[1])
    print("main returned")
