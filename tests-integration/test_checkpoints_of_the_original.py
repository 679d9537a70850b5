"""Checkpoints go between ours and the original library, and the losses after a resume are those of whoever saved.

A folder that the original wrote is beside this file, so that reading one is tested everywhere; writing for the
original is tested where $ACCEL_ORIGINAL_PYTHON names an interpreter that has it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from accel_testing.processes import ReservedPort, run_command

ORIGINAL = os.environ.get("ACCEL_ORIGINAL_PYTHON", "")
HERE = Path(__file__).parent
KEPT = HERE / "reference" / "original_state"
SCRIPT = HERE / "exchanged_checkpoint.py"

WHY = "$ACCEL_ORIGINAL_PYTHON names no interpreter with the original"
needs_original = pytest.mark.skipif(not ORIGINAL, reason=WHY)


def run(library: str, task: str, folder: Path, kind: str, processes: int = 1) -> None:
    python = sys.executable if library == "ours" else ORIGINAL
    command = [python, str(SCRIPT), task, str(folder), kind]
    port = ReservedPort()
    if processes > 1:
        place = ["--nproc-per-node", str(processes), "--master-port", str(port.reserve())]
        command = [python, "-m", "torch.distributed.run", *place, *command[1:]]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
    if library == "ours":
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        done = run_command(command, timeout=250, env=environment)
    finally:
        port.release()
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_original_wrote_is_resumed(tmp_path: Path) -> None:
    shutil.copytree(KEPT, tmp_path / "kept")
    run("ours", "read", tmp_path / "kept", "safe")


@needs_original
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", ["safe", "torch"])
@pytest.mark.parametrize(("writer", "reader"), [("original", "ours"), ("ours", "original")])
def test_checkpoints_go_both_ways(tmp_path: Path, writer: str, reader: str, kind: str, processes: int) -> None:
    run(writer, "write", tmp_path / "a", kind, processes)
    run(reader, "read", tmp_path / "a", kind, processes)


@needs_original
@pytest.mark.parametrize(("writer", "reader"), [("original", "ours"), ("ours", "original")])
@pytest.mark.parametrize("kind", ["safe", "torch", "safe-sharded", "torch-sharded"])
def test_weights_go_both_ways(tmp_path: Path, writer: str, reader: str, kind: str) -> None:
    run(writer, "write-model", tmp_path / "a", kind)
    run(reader, "read-model", tmp_path / "a", kind)
