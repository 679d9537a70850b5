"""The examples of the documents run as their first lines say, on two processes, and learn what they should."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from accel_testing.processes import run_command
from documents import ROOT

FOLDER = ROOT / "docs/examples"
EXAMPLES = {
    "big_model.py": ("same result: True", ()),
    "char_gpt.py": ("better than guessing: True", ()),
    "collectives.py": ("replicas agree: True", ()),
    "gan.py": ("close: True", ()),
    "guarded.py": ("one step left out, weights finite: True", ()),
    "lora.py": ("learned: True", ("peft", "transformers")),
    "stream.py": ("each line once: True", ()),
    "zero3.py": ("learned: True", ("deepspeed",)),
}
"""The last line that each prints, and the libraries that only a session of their own installs."""

LONGEST = 120
ACTIVATED = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
}


def test_every_example_is_run_and_short() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(EXAMPLES)
    assert all(len((FOLDER / name).read_text(encoding="utf-8").splitlines()) <= LONGEST for name in EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_its_first_lines_say(name: str, tmp_path: Path) -> None:
    expected, libraries = EXAMPLES[name]
    if missing := [library for library in libraries if importlib.util.find_spec(library) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    text = (FOLDER / name).read_text(encoding="utf-8")
    (command,) = re.findall(rf"^ *((?:accel launch|torchrun|python) .*{name}.*)$", text, re.MULTILINE)
    words = command.replace(name, str(FOLDER / name)).split()
    if words[0] == "torchrun":
        # An environment that looks through to another one has its modules, and not its programs.
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    done = run_command(words, 500, env=ACTIVATED, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().splitlines()[-1].strip().endswith(expected), done.stdout + done.stderr
