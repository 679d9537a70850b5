"""The collective in which a process waits, from torch's flight recorder: of real groups, and of the entries of NCCL."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state.watch import flight_recorder
from accel_state.watch.flight_recorder import pending_collective
from accel_testing.processes import run_command

WAITS = """
import json, os, sys, threading, time
import torch
import torch.distributed as dist
from accel_state.watch.flight_recorder import pending_collective

here, there = sys.argv[1:]
store = dist.FileStore(here, 2)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
seen = []


def look():
    while not seen or not seen[-1]:
        seen.append(pending_collective())
        time.sleep(0.01)
    # The other process comes now.
    open(there, "w").close()


dist.all_reduce(torch.ones(1))
if rank == 0:
    # The recorder learns a little later that a collective is over.
    while pending_collective():
        time.sleep(0.01)
    looking = threading.Thread(target=look)
    looking.start()
else:
    while not os.path.exists(there):
        time.sleep(0.01)
dist.broadcast(torch.ones(1), src=1)
if rank == 0:
    looking.join()
    while pending_collective():
        time.sleep(0.01)
    print(seen[-1], flush=True)
dist.barrier()
"""


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.skipif(not dist.is_available() or sys.platform != "linux", reason="needs gloo")
def test_a_collective_is_pending_until_the_other_process_comes(tmp_path: Any) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    launch = "for rank in 0 1; do RANK=$rank {0} {1} {2}/store {2}/comes & done; wait -n && wait -n"
    environment = {"TORCH_FR_BUFFER_SIZE": "100", "GLOO_SOCKET_IFNAME": "lo"}
    command = ["bash", "-c", launch.format(sys.executable, script, tmp_path)]
    done = run_command(command, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "gloo:broadcast of default_pg (number 2)"


def test_without_a_group_nothing_is_pending() -> None:
    assert pending_collective() == ""


def test_the_function_of_the_installed_torch_takes_these_arguments() -> None:
    distributed: Any = torch._C._distributed_c10d
    (dump,) = (getattr(distributed, name) for name in flight_recorder._DUMPS if hasattr(distributed, name))
    found = json.loads(dump(includeCollectives=True, onlyActive=True))
    # Without entries there is no list of them.
    assert isinstance(found.get("entries", []), list)


def entry(name: str, state: str, retired: bool = False) -> dict[str, Any]:
    group = ["0", "default_pg"]
    return {
        "profiling_name": name,
        "state": state,
        "retired": retired,
        "process_group": group,
        "collective_seq_id": 7,
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"entries": [entry("nccl:all_reduce", "started")]}, "nccl:all_reduce of default_pg (number 7)"),
        ({"entries": [entry("nccl:all_reduce", "scheduled")]}, ""),
        ({"entries": [entry("nccl:all_reduce", "completed")]}, ""),
        ({"entries": [entry("nccl:all_reduce", "started", retired=True)]}, ""),
        ({"entries": [entry("gloo:gather", "scheduled")]}, "gloo:gather of default_pg (number 7)"),
        ({"entries": [{"state": "started"}]}, ""),
        ({"entries": 3}, ""),
        ([], ""),
    ],
    ids=["starts", "is queued on the device", "is over", "retired", "gloo", "without fields", "no list", "no object"],
)
def test_only_a_collective_that_has_started_counts(
    monkeypatch: pytest.MonkeyPatch, content: Any, expected: str
) -> None:
    """NCCL cannot run here, so these are entries as it writes them."""

    def dump(**options: bool) -> bytes:
        return json.dumps(content).encode()

    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_fr_trace_json=dump))
    assert pending_collective() == expected
