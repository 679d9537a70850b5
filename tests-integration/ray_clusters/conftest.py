"""The cluster that the tests of this folder share, and commands that run in its network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from accel_state.settings.installed import importable

HERE = Path(__file__).parent
LOOPBACK_ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")


class Cluster:
    """Two nodes with two CPUs each, up when the constructor returns."""

    def __init__(self, folder: Path) -> None:
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [*LOOPBACK_ALONE, sys.executable, str(HERE / "nodes.py"), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._answered()
        self.address = (folder / "address").read_text(encoding="utf-8")

    def _answered(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "done\n", "the Ray cluster did not start"

    def tell(self, *words: str) -> None:
        """Let the cluster add, kill or behead; see `nodes`."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        self._answered()

    def inside(self, words: Sequence[str]) -> list[str]:
        """A command that runs in the network of the cluster."""
        return ["nsenter", f"--net=/proc/{self._process.pid}/ns/net", *words]

    def close(self) -> None:
        """End the nodes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)


def started(folder: Path) -> Cluster:
    if not importable("ray"):
        pytest.skip("Ray is not installed; `nox -s ray` installs it.")
    if os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("A network namespace needs Linux, root and iproute2.")
    return Cluster(folder)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = started(tmp_path_factory.mktemp("ray"))
    yield made
    made.close()


@pytest.fixture
def doomed_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of its own, for a test that damages it."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    made = started(folder)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("RAY_", "MASTER_", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
