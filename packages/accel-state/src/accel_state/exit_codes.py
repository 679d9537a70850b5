"""The exit code with which a script says that it can be resumed."""

from __future__ import annotations

import os
from typing import Final, NoReturn

__all__ = ("NOTICE_VARIABLE", "RESUME", "leave_to_resume")

RESUME: Final = 75
"""The run saved a checkpoint before it ended early; start it again to resume (EX_TEMPFAIL of sysexits.h)."""

NOTICE_VARIABLE: Final = "ACCEL_RESUME_NOTICE"
"""Variable with the path of a file that a process creates before it ends with `RESUME`, for launchers without access to
exit codes."""


def leave_to_resume(at_once: bool = False) -> NoReturn:
    """End this process, whose state is saved, and tell the launcher that it can be started again.

    Args:
        at_once: end it from any thread, without the interpreter's shutdown.

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
