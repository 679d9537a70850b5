"""Runs unchanged training scripts with a hook, for the commands that check scripts.

A command launches its recording module with a task and a script. The module passes a hook to `run_script`, which the
session of every Accelerator of the script enters.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from accel_state.errors import SettingError
from accel_torch.hooks import PROCESS_HOOKS, Hook

__all__ = ("DIFFERS", "EQUAL", "NOT_VERIFIED", "StopRun", "check_script", "launch", "run_script")

EQUAL: Final = 0
DIFFERS: Final = 1
NOT_VERIFIED: Final = 3
"""Exit codes of commands that compare runs."""

_TAIL: Final = 15
"""Lines of a run's output that are shown when it failed."""


class StopRun(BaseException):
    """Ends a script after its last step. It is not an `Exception`, so that handlers in the script do not catch it."""


def check_script(script: str) -> None:
    """Check that a script exists.

    Raises:
        SettingError: there is no such file.
    """
    if not Path(script).is_file():
        raise SettingError(
            f"Cannot check the script {script!r}.", "There is no such file.", "Give the path of a script."
        )


def launch(
    observing: str,
    task: Path,
    script: Sequence[str],
    *,
    processes: int,
    options: Sequence[str],
    timeout: float,
) -> str | None:
    """Launch a script under an observer, wait for its end, and return why it failed; None if it did not.

    Args:
        observing: the recording module, run with the path of the task, then the script and its arguments.
        task: file of the observer's task; the run's output is written to the same folder.
        script: the script and its arguments.
        processes: the number of processes.
        options: further options of `accel launch`.
        timeout: seconds after which the run is stopped.
    """
    launched = [sys.executable, "-m", "accel_cli.main", "launch", "--num_processes", str(processes)]
    launched += [*options, "--module", observing, str(task), *script]
    output = task.with_name("output.txt")
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(launched, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return f"it did not end within {timeout:g} s"
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        tail = "\n".join(output.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:])
        return f"it ended with exit code {code}:\n{tail}"
    return None


def run_script(script: str, arguments: Sequence[str], hook: Hook) -> None:
    """Run a script as `python script arguments` does, with a hook, until its end or `StopRun`.

    Called in each process of a run.
    """
    PROCESS_HOOKS.append(hook)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(str(Path(script).resolve()), run_name="__main__")
    except StopRun:
        pass
