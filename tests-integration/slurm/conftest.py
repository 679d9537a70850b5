"""The cluster that the tests of this folder share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import MISSING, Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if MISSING:
        pytest.skip(f"A Slurm cluster on this machine needs {', '.join(MISSING)}.")
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def variables(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MASTER_", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(cluster.configuration))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
