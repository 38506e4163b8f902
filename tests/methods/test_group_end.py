"""A script on two gloo ranks ends, however it leaves its process group and its model. See endings.py."""

import contextlib
import subprocess
import sys

import pytest
from processes import LIMIT_S, SUPPORT, free_port, rank_environment, started

pytestmark = pytest.mark.slow

# way -> exit code. The group: destroyed, or never; the model: freed on return, in a cycle, or kept to the very end.
WAYS = {
    "ddp": 0,
    "ddp_kept": 0,
    "ddp_cycle": 0,
    "ddp_late": 0,
    "ddp_never": 0,
    "ddp_never_kept": 0,
    "ddp_raises": 1,
    "ddp_raises_exit_kept": 3,
    "own_ddp": 0,
    "own_ddp_kept_never": 0,
    "every_tensor_kept": 0,
    "fsdp2": 0,
    "fsdp2_kept_never": 0,
    "fsdp2_raises": 1,
}


@pytest.mark.parametrize("way", WAYS)
def test_both_ranks_end(way):
    port = free_port()
    command = [sys.executable, str(SUPPORT / "endings.py"), way]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(started(command, rank_environment(r, 2, port), **pipes)) for r in (0, 1)]
        for rank in ranks:
            said, _ = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == WAYS[way], said
            assert ("main returned" in said) == (WAYS[way] == 0), said
            assert "the loop failed" in said or WAYS[way] != 1
