"""Scripts with our Accelerator: what only its session knows. Loaded in a script's process, if accel-torch is there."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_check.recorder import Recorder

__all__ = ("follow_sessions",)


def follow_sessions(recorder: Recorder) -> None:
    """Follow the sessions of this process, if accel-torch is installed."""
    if importlib.util.find_spec("accel_torch") is None:
        return
    from accel_check.session_hook import SessionHook
    from accel_torch.hooks import PROCESS_HOOKS

    PROCESS_HOOKS.append(SessionHook(recorder))
