"""Runs a script of a client library here and with the original library, and reads what it tells."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from accel_testing.processes import run_command

SCRIPTS = Path(__file__).parent / "scripts"
ORIGINAL = os.environ.get("ACCEL_ORIGINAL_PYTHON")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ALONE = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
LAUNCHERS = {
    "python": ("{python}",),
    "torchrun": ("{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    # DeepSpeed of the original knows of one process on a CPU, and takes it from a launcher.
    "torchrun alone": ("{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"),
    "accel": ("{bin}/accel", "launch", "--cpu", "--num_processes=2"),
    "accel of four": ("{bin}/accel", "launch", "--cpu", "--num_processes=4"),
    "accelerate": ("{bin}/accelerate", "launch", "--cpu", "--num_processes=2"),
}
MISUSE = ("MisuseWarning", "Replicas differ after", "All processes train on the same samples")


class Both(NamedTuple):
    """What one script told here and with the original library."""

    ours: dict[str, Any]
    original: dict[str, Any]


class Run(Protocol):
    """Runs a script of the folder beside this file, and reads the line it prints."""

    def __call__(
        self, script: str, launcher: str = "python", original: bool = False, **told: Any
    ) -> dict[str, Any]: ...


def _run(script: str, launcher: str = "python", original: bool = False, **told: Any) -> dict[str, Any]:
    python = Path(ORIGINAL or "") if original else Path(sys.executable)
    places = {"python": python, "bin": python.parent}
    command = [part.format(**places) for part in LAUNCHERS[launcher]]
    path = os.pathsep.join((str(python.parent), os.environ["PATH"]))
    environment = {**OFFLINE, **ALONE, "PATH": path}
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        # DeepSpeed compiles anew whenever another environment used the folder before.
        environment["TORCH_EXTENSIONS_DIR"] = os.path.join(
            os.environ["TORCH_EXTENSIONS_DIR"], python.parent.parent.name
        )
    arguments = (str(SCRIPTS / script), json.dumps(told))
    with tempfile.TemporaryDirectory() as elsewhere:  # PEFT writes parts of a model below the folder it runs in
        done = run_command([*command, *arguments], timeout=500, env=environment, cwd=elsewhere)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == 1, done.stdout + done.stderr
    # Libraries use the interface rightly, so nothing may be reported as misuse.
    assert not [sentence for sentence in MISUSE if sentence in done.stderr], done.stderr
    return dict(json.loads(lines[0].removeprefix("RESULT ")))


@pytest.fixture(scope="session")
def run() -> Run:
    """Runs a script here, or with the original; it fails when the script does."""
    return _run


class Compare(Protocol):
    """Runs a script here and with the original, each in a folder of its own."""

    def __call__(self, script: str, launcher: str = "python", **told: Any) -> Both: ...


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    """Runs a script both ways; "{folder}" in a text that it is told becomes the folder of that run."""
    if ORIGINAL is None:
        pytest.skip("ACCEL_ORIGINAL_PYTHON names no Python that has the original library")

    def both(script: str, launcher: str = "python", **told: Any) -> Both:
        outcomes = []
        for original in (False, True):
            folder = tmp_path / ("original" if original else "ours")
            here = {name: what.format(folder=folder) if isinstance(what, str) else what for name, what in told.items()}
            outcomes.append(_run(script, launcher, original, folder=str(folder), **here))
        return Both(*outcomes)

    return both
