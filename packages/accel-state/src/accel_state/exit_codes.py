"""The exit code of a script that can be resumed."""

from __future__ import annotations

import os
from typing import Final, NoReturn

__all__ = ("NOTICE_VARIABLE", "RESUME", "leave_to_resume")

RESUME: Final = 75
"""The run saved a checkpoint before it ended early; start it again to resume (EX_TEMPFAIL of sysexits.h)."""

NOTICE_VARIABLE: Final = "ACCEL_RESUME_NOTICE"
"""Variable with the path of a file that a process creates before it exits with `RESUME`, for launchers that cannot read
exit codes."""


def leave_to_resume(at_once: bool = False) -> NoReturn:
    """Exit with `RESUME`: the state is saved, and the launcher can start the run again.

    Args:
        at_once: exit immediately, from any thread, without the interpreter's shutdown.

    Raises:
        SystemExit: with `RESUME`.
    """
    notice = os.environ.get(NOTICE_VARIABLE)
    if notice and os.path.isdir(os.path.dirname(notice)):
        with open(notice, "ab"):
            pass
    if at_once:
        os._exit(RESUME)
    raise SystemExit(RESUME)
