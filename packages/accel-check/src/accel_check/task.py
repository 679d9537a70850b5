"""What the processes of a run do; plain data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("ResumeTask", "Task")


@dataclass(frozen=True)
class ResumeTask:
    """What a check of a resumed run does in one run.

    Args:
        save_at: steps after which a checkpoint is kept.
        last_step: the step after which the run ends.
        resumed_at: step whose checkpoint the run loads; 0 for the uninterrupted run.
        checkpoint: the checkpoint that the run loads.
        checkpoints: folder of the checkpoints that are kept.
        in_window: whether a checkpoint is saved one batch after its step, inside an accumulation window.
        saved_on: the number of processes of the uninterrupted run.
        resumes_itself: whether the script loads the checkpoint, by its arguments.
    """

    save_at: tuple[int, ...]
    last_step: int
    resumed_at: int = 0
    checkpoint: str = ""
    checkpoints: str = ""
    in_window: bool = False
    saved_on: int = 1
    resumes_itself: bool = False


@dataclass(frozen=True)
class Task:
    """What the processes of a run record.

    Args:
        folder: folder for their records.
        steps: steps of each optimizer to record.
        follows: folder of the run of several processes whose samples this one process reads; empty in that run.
        double: whether floating-point numbers are 64 bits wide by default.
        scratch: folder for what the script saves.
        resume: what a check of a resumed run records; None in a check of parity.
    """

    folder: str
    steps: int
    follows: str = ""
    double: bool = False
    scratch: str = ""
    resume: ResumeTask | None = None

    @property
    def is_reference(self) -> bool:
        """Whether this is the run of one process that follows the run of several."""
        return bool(self.follows)
