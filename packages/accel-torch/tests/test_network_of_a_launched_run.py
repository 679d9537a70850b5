"""A run on one machine listens on the loopback interface alone, and strangers who reach its store cannot end it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from accel_state.exit_codes import RESUME
from accel_testing.processes import run_command

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the sockets of Linux"),
    pytest.mark.usefixtures("preloaded_python"),
]

SCRIPT = str(Path(__file__).with_name("watched_script.py"))
PATIENT = 250.0
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


class Run:
    """A launched run of two processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "accel_cli.main", "launch", "--cpu", "--num_processes=2", SCRIPT, str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.places: list[dict[str, Any]] = [json.loads(self.wait_for(f"place_{rank}")) for rank in range(2)]

    def wait_for(self, name: str) -> str:
        until = time.monotonic() + PATIENT
        while not (self.folder / name).exists():
            assert self.launcher.poll() is None, (name, self.launcher.communicate()[1])
            assert time.monotonic() < until, name
            time.sleep(0.05)
        return (self.folder / name).read_text()

    def end(self) -> str:
        """What it wrote to standard error."""
        return self.launcher.communicate(timeout=PATIENT)[1]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    launched = Run(tmp_path)
    yield launched
    if launched.launcher.poll() is None:
        launched.launcher.kill()
        launched.launcher.communicate()


def listening(pid: int) -> list[str]:
    """Addresses on which a process listens, in hexadecimal digits."""
    inodes = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
        found += [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return found


def test_a_run_is_out_of_reach_of_other_hosts_and_ends_when_its_own_process_is_asked_to(run: Run) -> None:
    port, scope = int(run.places[0]["port"]), run.places[0]["scope"]
    for place in run.places:
        assert all(address in LOOPBACK for address in listening(place["pid"]))
    assert len(listening(run.places[0]["pid"])) >= 2, "the store, and gloo"
    # A port that is open on all interfaces answers on each address of the loopback network.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
    stranger = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    stranger.set(f"attempt0/{scope}/accel/preemption/asked", "")
    for rank in range(2):
        run.wait_for(f"reported_{rank}")
        # It trains on: what it reports is followed by steps.
        run.wait_for(f"went_on_{rank}")
    assert not (run.folder / "checkpoints").exists()

    os.kill(run.places[1]["pid"], signal.SIGTERM)
    reports = run.end()
    assert run.launcher.returncode == RESUME, reports
    assert (run.folder / "checkpoints" / "checkpoint_0").is_dir()


@pytest.mark.parametrize("when", ["before", "afterwards"])
def test_scripts_that_make_process_groups_by_themselves(when: str) -> None:
    script = str(Path(__file__).with_name("own_groups_script.py"))
    command = [sys.executable, "-m", "accel_cli.main", "launch", "--cpu", "--num_processes=2", script, when]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_command(command, timeout=PATIENT, env=environment)
    assert done.returncode == 0, done.stderr
