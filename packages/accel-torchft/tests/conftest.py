"""What the tests of this package share: a lighthouse for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from accel_state.settings.installed import importable

# An environment of other packages alone leaves these tests out.
collect_ignore_glob = [] if importable("accel_torchft") else ["test_*.py"]


@pytest.fixture(scope="session")
def lighthouse() -> Iterator[str]:
    """The address of a lighthouse that waits for nobody."""
    argv = [sys.executable, "-m", "accel_torchft.lighthouse", "0.5", "0.1", "1"]
    environment = {**os.environ, "ACCEL_TORCHFT_HOST": "127.0.0.1", "RUST_LOG": "error"}
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:")
    yield address
    process.terminate()
    process.wait()
    process.stdout.close()
