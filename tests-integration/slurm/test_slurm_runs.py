"""Runs on a real Slurm: two nodes train, exit codes come through, and interrupted runs end with the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from resumed_runs import STEPS, TRAIN, ended, losses, losses_on_one_machine, wait_until
from slurm.cluster import Cluster

from accel_testing.launchers import LauncherSuite

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def launch(folder: Path, *arguments: str, options: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Submit a job on two nodes, and wait for it in the background."""
    folder.mkdir(exist_ok=True)
    words = ["--launcher=slurm", "--nnodes=2", "--num_processes=2", "--cpu", "--slurm_option=--time=10", "--wait"]
    return subprocess.Popen(
        [sys.executable, "-m", "accel_cli.main", "launch", *words, *options, TRAIN, str(folder), *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def trained(folder: Path, steps: int) -> Callable[[], bool]:
    """Whether both processes have trained some steps."""
    return lambda: all(len(losses(folder, rank)) >= steps for rank in (0, 1))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    """The losses of both processes on one machine."""
    return losses_on_one_machine(tmp_path_factory.mktemp("undisturbed"))


def test_two_nodes_train_as_one_machine_does(tmp_path: Path, undisturbed: list[dict[int, str]]) -> None:
    code, told = ended(launch(tmp_path, str(STEPS), "0"))
    assert code == 0, told
    assert [losses(tmp_path, rank) for rank in (0, 1)] == undisturbed


def test_the_exit_code_of_a_process_comes_through(tmp_path: Path) -> None:
    code, told = ended(launch(tmp_path, str(STEPS), "0", "1", "5", "7"))
    assert code == 7, told


def test_a_run_whose_node_is_powered_off_is_queued_again_and_resumes(
    cluster: Cluster, tmp_path: Path, undisturbed: list[dict[int, str]]
) -> None:
    process = launch(tmp_path, str(STEPS), "0.5")
    wait_until(trained(tmp_path, 6))
    job = cluster.ask("squeue", "-h", "-o", "%i").split()[0]
    lost = cluster.nodes_of(job)[1]
    cluster.power_off(lost)
    try:
        code, told = ended(process)
    finally:
        cluster.power_on(lost)
        wait_until(lambda: cluster.idle() == 3)
    assert code == 0, told
    assert "Restarts=1" in cluster.ask("scontrol", "show", "job", job)
    assert [losses(tmp_path, rank) for rank in (0, 1)] == undisturbed
    assert len((tmp_path / "losses_0").read_text().splitlines()) < 2 * STEPS


def test_a_run_that_is_preempted_saves_and_resumes(
    cluster: Cluster, tmp_path: Path, undisturbed: list[dict[int, str]]
) -> None:
    process = launch(tmp_path, str(STEPS), "0.5", options=("--slurm_option=--exclusive", "--grace_period=50"))
    wait_until(trained(tmp_path, 6))
    before = len(losses(tmp_path, 0))
    command = ("sbatch", "--parsable", "-p", "high", "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    urgent = cluster.ask(*command).strip()
    code, told = ended(process)
    assert urgent.isdecimal()
    assert code == 0, told
    assert [losses(tmp_path, rank) for rank in (0, 1)] == undisturbed
    # It went on where it had saved, and trained no step twice.
    assert len((tmp_path / "losses_0").read_text().splitlines()) == STEPS > before


def test_a_run_that_is_signalled_before_its_time_limit_saves_and_resumes(
    cluster: Cluster, tmp_path: Path, undisturbed: list[dict[int, str]]
) -> None:
    process = launch(tmp_path, str(STEPS), "0.5")
    wait_until(trained(tmp_path, 6))
    job = cluster.ask("squeue", "-h", "-o", "%i").split()[0]
    # What --signal=B:USR1@120 does when the time comes.
    cluster.ask("scancel", "--signal=USR1", "--batch", job)
    code, told = ended(process)
    assert code == 0, told
    assert "Restarts=1" in cluster.ask("scontrol", "show", "job", job)
    assert [losses(tmp_path, rank) for rank in (0, 1)] == undisturbed
    assert len((tmp_path / "losses_0").read_text().splitlines()) == STEPS


def test_a_step_that_fails_starts_again_as_often_as_it_may(tmp_path: Path) -> None:
    code, told = ended(launch(tmp_path, str(STEPS), "0", "1", "5", "7", options=("--max_restarts=2",)))
    assert code == 7, told
    assert told.count("Restarting it") == 2


def test_options_that_slurm_refuses_are_a_typed_error(tmp_path: Path) -> None:
    code, told = ended(launch(tmp_path, str(STEPS), "0", options=("--slurm_option=--partition=none",)))
    assert code == 2
    assert "Cannot submit the job to Slurm." in told
    assert "invalid partition" in told


class OnSlurm(LauncherSuite):
    launcher = "slurm"

    @pytest.fixture(autouse=True)
    def no_job_is_left(self, cluster: Cluster) -> Iterator[None]:
        yield
        wait_until(lambda: cluster.idle() == 3)


class TestSubmitted(OnSlurm):
    options = ("--cpu", "--nnodes=2", "--num_processes=2", "--wait")


class TestInAllocation(OnSlurm):
    options = ("--cpu", "--num_processes=2")

    @pytest.fixture(autouse=True)
    def allocation(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Two nodes, as the shell of `salloc` has them."""
        command = ["salloc", "--no-shell", "-N2", "--ntasks-per-node=1", "--job-name=suite"]
        told = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=60, check=True).stderr
        job = next(line.split()[-1] for line in told.splitlines() if "Granted" in line)
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
        yield
        cluster.ask("scancel", job)

    @pytest.fixture(autouse=True)
    def no_job_is_left(self) -> None:
        return
