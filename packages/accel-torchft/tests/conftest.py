"""What the tests of this package share: lighthouses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from accel_state.settings.installed import importable

# An environment of other packages alone leaves these tests out.
collect_ignore_glob = [] if importable("accel_torchft") else ["test_*.py"]


def _start_lighthouse() -> tuple[subprocess.Popen[str], str]:
    argv = [sys.executable, "-m", "accel_torchft.lighthouse", "0.5", "0.1", "1"]
    environment = {**os.environ, "ACCEL_TORCHFT_HOST": "127.0.0.1", "RUST_LOG": "error"}
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:")
    return process, address


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(scope="session")
def lighthouse() -> Iterator[str]:
    """The address of a lighthouse that waits for nobody."""
    process, address = _start_lighthouse()
    yield address
    _end(process)


@pytest.fixture
def own_lighthouse() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A lighthouse of one test, which may kill it, and its address."""
    process, address = _start_lighthouse()
    yield process, address
    _end(process)
