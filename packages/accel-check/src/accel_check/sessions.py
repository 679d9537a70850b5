"""Scripts with our Accelerator: what only its session knows. Loaded in a script's process, if accel-torch is there."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_check.recorder import StepRecorder
    from accel_check.resume_notes import ResumeNotes

__all__ = ("follow_sessions",)


def follow_sessions(recorder: StepRecorder, notes: ResumeNotes | None) -> None:
    """Follow the sessions of this process, if accel-torch is installed.

    Args:
        recorder: the recorder of this process.
        notes: the notes of a check of a resumed run; None in another check.
    """
    if importlib.util.find_spec("accel_torch") is None:
        return
    from accel_torch.hooks import PROCESS_HOOKS, Hook

    class Follow(Hook):
        """Is replaced by the hook that follows sessions when there is one: other scripts are spared its imports."""

        def configure(self, options: Any) -> Any:
            """Called with the arguments of the first Accelerator."""
            from accel_check.session_hook import SessionHook

            hook = SessionHook(recorder, notes)
            PROCESS_HOOKS[PROCESS_HOOKS.index(self)] = hook
            return hook.configure(options)

    PROCESS_HOOKS.append(Follow())
