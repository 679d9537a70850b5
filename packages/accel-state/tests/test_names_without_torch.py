"""Names that need torch say so where torch is not installed; settings and errors work."""

from __future__ import annotations

import sys

from accel_testing.processes import run_command

SCRIPT = """
import sys


class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")


sys.meta_path.insert(0, NotInstalled())
import accel_state
from accel_state import DistributedType
from accel_state.errors import Missing

print(DistributedType.NO.value)
try:
    accel_state.PartialState
except Missing as error:
    print(str(error).splitlines()[0], type(error.__context__ and error.__cause__).__name__, error.remedy)
"""


def test_a_name_that_needs_torch_names_torch_and_the_extra() -> None:
    finished = run_command([sys.executable, "-c", SCRIPT])
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == [
        "NO",
        "Cannot use accel_state.PartialState. NoneType Install torch, or accel-state[torch].",
    ]
