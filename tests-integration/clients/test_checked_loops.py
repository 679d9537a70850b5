"""The loops of the guide "Check a loop that does not use accel" are what the guide says of them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import accel_check.started
from accel_state.settings.installed import importable
from accel_testing.processes import Finished, run_command

pytestmark = [pytest.mark.usefixtures("preloaded_python")]
PRELOADED = ("accel_check.comparison", "accel_check.continuation", "accel_check.recorder")

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "check-any-loop.md"
SCRIPTS = re.findall(
    r"^## ([^\n]*)\n.*?```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
)
LOOPS = dict(SCRIPTS)
LIBRARIES = {"Lightning Fabric": "lightning", "The Trainer of transformers": "transformers"}
EPOCH = "    sampler.set_epoch(epoch)\n"
SCHEDULER = "    for name, part in parts.items():\n        part.load_state_dict(state[name])\n"


def checked(folder: Path, text: str, command: str, *options: str) -> Finished:
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    words = [sys.executable, str(accel_check.started.__file__), command, *options, str(script)]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    return run_command(words, timeout=280, env=environment)


@pytest.mark.parametrize("name", ["DistributedDataParallel", *LIBRARIES])
def test_a_loop_of_the_guide_is_equal(name: str, tmp_path: Path) -> None:
    library = LIBRARIES.get(name)
    if library is not None and not importable(library):
        pytest.skip(f"needs {library}: nox -s clients-checks")
    done = checked(tmp_path, LOOPS[name], "check-parity", "--processes", "2")
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "equal"), done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"] or name != "DistributedDataParallel"


def test_a_loop_without_epochs_is_remarked(tmp_path: Path) -> None:
    loop = LOOPS["DistributedDataParallel"]
    assert EPOCH in loop
    done = checked(tmp_path, loop.replace(EPOCH, ""), "check-parity", "--processes", "2")
    assert done.returncode == 0
    assert "call sampler.set_epoch(epoch)" in done.stdout


@pytest.mark.parametrize("loads", [True, False])
def test_the_resumed_loop_of_the_guide_is_equal_unless_it_forgets_its_scheduler(loads: bool, tmp_path: Path) -> None:
    loop = LOOPS["A run that saves and resumes"]
    assert SCHEDULER in loop
    if not loads:
        loop = loop.replace(
            "in parts.items():\n        part.load", 'in parts.items():\n        name == "scheduler" or part.load'
        )
    done = checked(tmp_path, loop, "check-resume", "--at", "3", "--resume_args", "--resume {checkpoint}")
    assert done.returncode == (0 if loads else 1), done.stdout
    assert ("scheduler 0: last_epoch (3 and 0)" in done.stdout) is not loads
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]
