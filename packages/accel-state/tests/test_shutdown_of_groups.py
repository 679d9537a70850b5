"""A process that ends takes the threads of its process groups along before its interpreter goes."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest

from accel_testing.processes import Finished, run_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")

SCRIPT = """
import atexit, os, threading, time

def name_of(thread):
    try:
        with open(f"/proc/self/task/{thread}/comm") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return "tcpstore or another that has just ended"

def foreign():
    threads = {int(name) for name in os.listdir("/proc/self/task")} - {t.native_id for t in threading.enumerate()}
    return {t for t in threads if "tcpstore" not in name_of(t)}

def at_the_end():
    if leave_a_mark:
        open(gone, "w").close()
    # The system lists a thread a little longer than others have to wait for its end.
    limit = time.monotonic() + 60
    while foreign() - before and time.monotonic() < limit:
        time.sleep(0.01)
    os.write(1, f"group threads: {len(during)} then {len(foreign() - before)}\\n".encode())

leave_a_mark = False
atexit.register(at_the_end)  # hooks run in reverse order: this one after all others
import torch
from accel_state import PartialState

before = foreign()
state = PartialState(cpu=True, timeout=60)
transport = state._process.transport
total = torch.ones(1)
transport.all_reduce(total).wait()
during = foreign() - before
"""

FAILING = """
import signal
# The launcher ends this process when the other one has gone, which may be before it is seen here.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
gone = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gone")
state.wait_for_everyone()
if state.process_index == 1:
    leave_a_mark = True
    transport.all_reduce(total)
    raise RuntimeError("failed on purpose")
limit = time.monotonic() + 150
while not os.path.exists(gone) and time.monotonic() < limit:
    time.sleep(0.1)
os.write(1, b"the other one has gone" if os.path.exists(gone) else b"the other one hangs")
"""


def launch(folder: Path, script: str) -> Finished:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(path)]
    return run_command(command, env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})


def test_no_thread_of_a_group_is_left_when_the_interpreter_ends(tmp_path: Path) -> None:
    done = launch(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    # gloo of torch 2.9 tells of its connections in pieces, and may have begun a line.
    counts = re.findall(r"group threads: (\d+) then (\d+)\n", done.stdout)
    assert len(counts) == 2, done.stdout
    assert all(int(during) > 0 and int(left) == 0 for during, left in counts), done.stdout


def test_a_collective_that_another_process_never_joins_does_not_keep_a_failed_process_alive(tmp_path: Path) -> None:
    done = launch(tmp_path, SCRIPT + FAILING)
    assert "the other one has gone" in done.stdout, done.stderr
