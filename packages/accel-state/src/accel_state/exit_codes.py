"""Exit codes that mean something between a script and whoever started it."""

from __future__ import annotations

import os
from typing import Final, NoReturn

__all__ = ("NOTICE_VARIABLE", "RESUME", "leave_to_resume")

RESUME: Final = 75
"""The run was asked to end, saved a checkpoint and can be resumed: start it again (EX_TEMPFAIL of sysexits.h)."""

NOTICE_VARIABLE: Final = "ACCEL_RESUME_NOTICE"
"""Names a file that is made before a process ends with `RESUME`, for launchers that do not get to know exit codes."""


def leave_to_resume() -> NoReturn:
    """End this process, whose state is saved, so that whoever started it knows that it can be started again.

    Raises:
        SystemExit: with `RESUME`.
    """
    notice = os.environ.get(NOTICE_VARIABLE)
    if notice and os.path.isdir(os.path.dirname(notice)):
        with open(notice, "ab"):
            pass
    raise SystemExit(RESUME)
