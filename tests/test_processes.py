"""The tests' own helper: nothing that a test started is left behind, whatever session it went to."""

import subprocess
import sys

import processes
import pytest

# A parent that starts a child in a session of its own, as torchrun does, says its pid, and then ends, or never does.
STARTS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("parent_s", ["0", "1000"])
def test_what_a_child_started_ends_with_the_block(parent_s):
    with processes.started([sys.executable, "-c", STARTS, parent_s], stdout=subprocess.PIPE, text=True) as parent:
        grandchild = int(parent.stdout.readline())
        if parent_s == "0":
            parent.wait()
        assert processes.alive(grandchild)
    assert not processes.alive(parent.pid) and processes.within_limit(lambda: not processes.alive(grandchild), 60)


def test_a_time_limit_ends_all_and_is_an_error():
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        processes.python("-c", STARTS, "1000", timeout=5)
    grandchild = int(caught.value.stdout or 0)
    assert grandchild and processes.within_limit(lambda: not processes.alive(grandchild), 60)


def test_a_rank_that_hangs_is_ended():
    with pytest.raises(AssertionError, match="a rank hangs after 5"):
        processes.spawn(_never_ends, (), timeout_s=5)


def _never_ends(rank: int) -> None:
    import time

    time.sleep(1000)
