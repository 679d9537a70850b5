"""Runs an unchanged training script with a hook, which the session of every Accelerator of the script enters."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from accel_torch.hooks import PROCESS_HOOKS, Hook

__all__ = ("StopRun", "run_script")


class StopRun(BaseException):
    """Ends a script after its last step. It is not an `Exception`, so that handlers in the script do not catch it."""


def run_script(script: str, arguments: Sequence[str], hook: Hook) -> None:
    """Run a script as `python script arguments` does, with a hook, until its end or `StopRun`."""
    PROCESS_HOOKS.append(hook)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(str(Path(script).resolve()), run_name="__main__")
    except StopRun:
        pass
