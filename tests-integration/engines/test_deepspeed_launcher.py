"""DeepSpeed's own launcher, started by ours: what it would run on other machines, and what it runs on this one."""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

import pytest

from accel_state.settings.installed import importable
from accel_testing.launchers import LauncherSuite
from accel_testing.processes import Finished, run_command

pytestmark = [
    pytest.mark.skipif(not importable("deepspeed"), reason="needs deepspeed: nox -s engines-deepspeed"),
    pytest.mark.timeout(300),
]

HOSTS = "node1 slots=2\nnode2 slots=2\n"


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    """A folder with a hostfile, a script, and programs that say what they are told to reach machines for."""
    (tmp_path / "hosts").write_text(HOSTS)
    (tmp_path / "job.py").write_text(
        "import os, pathlib, sys\n"
        "told = [os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')]\n"
        "pathlib.Path(__file__).with_name('rank' + told[0]).write_text(' '.join(told + sys.argv[1:]))\n"
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("pdsh", "srun", "mpirun", "ssh", "sinfo", "ompi_info"):
        (programs / name).write_text(f'#!/bin/sh\necho "TOLD {name}" "$@"\ncat "${{DS_ENV_FILE:-/dev/null}}"\n')
        (programs / name).chmod(0o755)
    return tmp_path


def launch(machines: Path, *options: str) -> Finished:
    path = os.pathsep.join((str(machines / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    accel = str(Path(sys.executable).parent / "accel")
    command = [accel, "launch", "--use_deepspeed", "--num_machines", "2"]
    hosts = ["--deepspeed_hostfile", str(machines / "hosts"), "--main_process_ip", "127.0.0.1"]
    job = [str(machines / "job.py"), "--lr", "1"]
    return run_command([*command, *hosts, *options, *job], timeout=250, env={"PATH": path})


@pytest.mark.parametrize(
    ("launcher", "program", "words"),
    [
        ("pdsh", "pdsh", ["-w node1,node2", "--node_rank=%n", "--master_addr=127.0.0.1", "--no_local_rank"]),
        ("slurm", "srun", ["-n 4", "--nodes 2", "--gpus-per-node 2"]),
        ("openmpi", "mpirun", ["-n 4", "-hostfile"]),
    ],
)
def test_machines_are_reached(machines: Path, launcher: str, program: str, words: list[str]) -> None:
    done = launch(machines, "--num_processes", "4", "--deepspeed_multinode_launcher", launcher)
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stdout.splitlines() if line.startswith(f"TOLD {program} ")]
    for word in words:
        assert word in told
    assert f"script {machines / 'job.py'} --lr 1" in told
    assert "ACCELERATE_USE_DEEPSPEED=true" in done.stdout  # what the machines are told besides


def test_machines_are_left_out(machines: Path) -> None:
    done = launch(machines, "--deepspeed_exclusion_filter", "node1:1@node2:0")
    assert done.returncode == 0, done.stderr
    assert "-w node1,node2" in done.stdout
    worlds = {word.partition("=")[2] for word in done.stdout.split() if word.startswith("--world_info=")}
    assert [json.loads(base64.urlsafe_b64decode(world)) for world in worlds] == [{"node1": [0], "node2": [1]}]


def test_a_machine_starts_its_own_processes(machines: Path) -> None:
    done = launch(machines, "--num_processes", "4", "--machine_rank", "1", "--deepspeed_multinode_launcher", "nossh")
    assert done.returncode == 0, done.stderr
    said = {file.name: file.read_text() for file in machines.glob("rank*")}
    assert said == {"rank2": "2 0 4 --lr 1", "rank3": "3 1 4 --lr 1"}


class TestSuiteOnDeepSpeed(LauncherSuite):
    """DeepSpeed's launcher starts the processes of this machine; other machines would need ssh."""

    launcher = "deepspeed"
    options = (
        "--cpu",
        "--use_deepspeed",
        "--num_processes=2",
        "--deepspeed_hostfile=hosts",
        "--deepspeed_multinode_launcher=nossh",
        "--main_process_ip=127.0.0.1",
    )

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder with a hostfile; `deepspeed` is on the path."""
        (tmp_path / "hosts").write_text("localhost slots=2\n")
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        return tmp_path
