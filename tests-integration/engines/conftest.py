"""Playing scenes of an engine in real processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_testing.processes import Finished, run_command

Play = Callable[..., Any]


def launch(script: str, *arguments: str, processes: int) -> Finished:
    """Run a script of this folder in some processes."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    # Engines compile C++ with ninja, which lies beside the interpreter.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    script = str(Path(__file__).parent / script)
    return run_command([*command, script, *arguments], timeout=250, env={"PATH": path, "OMP_NUM_THREADS": "1"})


@pytest.fixture
def play() -> Play:
    """`play(script, scene, processes=2, **told)` plays a scene of a script of this folder, and returns its result."""

    def play(script: str, scene: str, processes: int = 2, **told: Any) -> Any:
        done = launch(script, scene, json.dumps(told), processes=processes)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert done.returncode == 0, done.stderr
        return json.loads(lines[0].removeprefix("RESULT "))

    return play
