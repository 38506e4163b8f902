"""Tasks that end badly on purpose; the runner is given them as ``task.name=fault_tasks:NAME``."""

import os
import signal
import sys
import time


def ok(config, report):
    report.phase("work")
    report.section("loss", {"train": [1.0, float("nan")], "heldout": float("inf")})
    print("a line for the log")


def raises(config, report):
    report.phase("work")
    report.section("model", {"name": "known before the fault"})
    raise RuntimeError("boom\nsecond line")


def out_of_memory(config, report):
    report.step(7, 10, loss=1.0)
    raise MemoryError("asked for too much")


def user_error(config, report):
    from sonar_repro.errors import UserError

    raise UserError("data.path=x: is not there; give another")


def unsupported(config, report):
    from sonar_repro.errors import Unsupported

    raise Unsupported("backend=x: cannot run here")


def killed(config, report):
    report.phase("deep inside")
    os.kill(os.getpid(), signal.SIGKILL)


def exits(config, report):
    sys.stdout.flush()
    os._exit(3)


def stalls(config, report):
    report.phase("waiting")
    time.sleep(600)


def sleeps(config, report):
    report.phase("sleeping")
    (report.arm_dir / "child.pid").write_text(str(os.getpid()))
    time.sleep(600)


def counts_runs(config, report):
    with open(report.arm_dir / "runs.txt", "a") as file:
        file.write("ran\n")


def fails_on_rank_1(config, report):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise RuntimeError("rank 1 is unwell")
    dist.barrier()


def names_its_card(config, report):
    """Holds its card for a moment, so that two arms at once must have different ones."""
    report.section("model", {"card": os.environ.get("CUDA_VISIBLE_DEVICES")})
    started = time.monotonic()
    time.sleep(1.0)
    report.section("counts", {"started": started, "ended": time.monotonic()})


def stops_and_resumes(config, report):
    """Training that stops before its last step on every rank, and goes on from its checkpoint."""
    import torch.distributed as dist

    from sonar_repro.training.train import Training

    class Stopped(Exception):
        pass

    cut = Training(config, report)
    one_step = cut.one_step

    def stop(step, batches):
        if step == config.steps:
            raise Stopped
        one_step(step, batches)

    cut.one_step = stop
    try:
        cut.run()
    except Stopped:
        dist.barrier()  # rank 0's checkpoint is whole
    Training(config, report).run()
