"""Runs on a real Ray cluster: two nodes train, exit codes come through, and a run that loses a node resumes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from ray_clusters.conftest import Cluster
from resumed_runs import STEPS, TRAIN, ended, losses, losses_on_one_machine, wait_until

from accel_testing.launchers import LauncherSuite

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def launch(
    cluster: Cluster, folder: Path, *arguments: str, options: Sequence[str] = ("--nnodes=2", "--num_processes=2")
) -> subprocess.Popen[str]:
    """Start a run on the cluster in the background."""
    words = ["--launcher=ray", f"--ray_address={cluster.address}", "--cpu", *options]
    return subprocess.Popen(
        cluster.inside([sys.executable, "-m", "accel_cli.main", "launch", *words, TRAIN, str(folder), *arguments]),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    """The losses of both processes on one machine."""
    return losses_on_one_machine(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("options", [("--nnodes=2", "--num_processes=2"), ("--num_processes=2",)])
def test_nodes_train_as_one_machine_does(
    cluster: Cluster, tmp_path: Path, undisturbed: list[dict[int, str]], options: Sequence[str]
) -> None:
    code, told = ended(launch(cluster, tmp_path, str(STEPS), "0", options=options))
    assert code == 0, told
    assert [losses(tmp_path, rank) for rank in (0, 1)] == undisturbed


def test_a_run_that_fails_starts_again_as_often_as_it_may(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--nnodes=2", "--num_processes=2", "--max_restarts=1")
    code, told = ended(launch(cluster, tmp_path, str(STEPS), "0", "1", "5", "7", options=options))
    assert code == 7, told
    assert told.count("restarting") == 1


def test_a_run_that_loses_a_node_resumes_on_another(
    doomed_cluster: Cluster, tmp_path: Path, undisturbed: list[dict[int, str]]
) -> None:
    process = launch(doomed_cluster, tmp_path, str(STEPS), "0.5")
    wait_until(lambda: all(len(losses(tmp_path, rank)) >= 6 for rank in (0, 1)) or process.poll() is not None)
    doomed_cluster.tell("kill", "0")
    doomed_cluster.tell("add")
    code, told = ended(process)
    assert code == 0, told
    assert "was lost" in told
    assert told.count("restarting") == 1
    assert [losses(tmp_path, rank) for rank in (0, 1)] == undisturbed
    assert len((tmp_path / "losses_0").read_text().splitlines()) < 2 * STEPS


def test_an_elastic_run_goes_on_with_the_nodes_that_are_left(doomed_cluster: Cluster, tmp_path: Path) -> None:
    options = ("--nnodes=1:2", "--num_processes=2")
    process = launch(doomed_cluster, tmp_path, str(STEPS), "0.5", options=options)
    wait_until(lambda: all(len(losses(tmp_path, rank)) >= 6 for rank in (0, 1)) or process.poll() is not None)
    doomed_cluster.tell("kill", "0")
    code, told = ended(process)
    assert code == 0, told
    assert max(losses(tmp_path, 0)) == STEPS
    # One process went on alone.
    assert max(losses(tmp_path, 1)) < STEPS


def test_a_run_whose_cluster_loses_its_head_ends(doomed_cluster: Cluster, tmp_path: Path) -> None:
    process = launch(doomed_cluster, tmp_path, "100000", "0.1")
    wait_until(lambda: all(len(losses(tmp_path, rank)) >= 2 for rank in (0, 1)) or process.poll() is not None)
    doomed_cluster.tell("behead")
    code, told = ended(process)
    assert code == 2, told
    assert "is lost" in told
    steps = len(losses(tmp_path, 0))
    time.sleep(3)
    assert len(losses(tmp_path, 0)) == steps


def test_a_cluster_that_is_too_small_is_a_typed_error(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--nnodes=3", "--num_processes=3", "--ray_wait=3")
    code, told = ended(launch(cluster, tmp_path, "1", "0", options=options))
    assert code == 2
    assert "It needs 3 nodes with 1 CPU each" in told


def test_no_cluster_is_a_typed_error(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--num_processes=2", "--ray_address=127.0.0.1:1")
    code, told = ended(launch(cluster, tmp_path, "1", "0", options=options))
    assert code == 2
    assert "No Ray cluster answers at 127.0.0.1:1" in told


class TestSuiteOnRay(LauncherSuite):
    """The suite runs `accel launch` of this interpreter, so the whole of it enters the network of the cluster."""

    launcher = "ray"
    options = ("--cpu", "--nnodes=2", "--num_processes=2")

    @pytest.fixture(autouse=True)
    def in_the_network(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        monkeypatch.setattr(subprocess, "Popen", entering(cluster))


def entering(cluster: Cluster) -> type[subprocess.Popen[str]]:
    """Processes that start in the network of the cluster."""

    class Entering(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, words: Sequence[str], *arguments: object, **options: object) -> None:
            super().__init__(cluster.inside(words), *arguments, **options)  # type: ignore[call-overload]

    return Entering
