"""The task of one run of a check; written by the command, read by every process of the run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ("Task",)


@dataclass(frozen=True)
class Task:
    """The task of one run.

    Args:
        notes: folder for the records of the processes.
        checkpoints: folder of the uninterrupted run's checkpoints.
        last_step: the step after which the run ends.
        save_at: steps after which a checkpoint is saved.
        resumed_at: step whose checkpoint the run loads; 0 for the uninterrupted run.
        saved_on: world size of the uninterrupted run.
        in_window: whether a checkpoint is saved one batch after its step, inside an accumulation window.
        resume_arguments: further arguments of the script; empty if the command loads the checkpoint.
    """

    notes: str
    checkpoints: str
    last_step: int
    save_at: tuple[int, ...] = ()
    resumed_at: int = 0
    saved_on: int = 1
    in_window: bool = False
    resume_arguments: tuple[str, ...] = ()

    @property
    def resumes(self) -> bool:
        """Whether the run loads a checkpoint."""
        return self.resumed_at > 0

    @property
    def loads(self) -> bool:
        """Whether the command loads the checkpoint, instead of the script."""
        return not self.resume_arguments

    @property
    def checkpoint(self) -> str:
        """The checkpoint that the run loads."""
        return self.folder_of(self.resumed_at)

    def folder_of(self, step: int) -> str:
        """The checkpoint of a step."""
        return os.path.join(self.checkpoints, f"step_{step}")

    def write(self, path: Path) -> None:
        """Write the task to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> Task:
        """Read the task from a file."""
        given = json.loads(Path(path).read_text(encoding="utf-8"))
        given["save_at"], given["resume_arguments"] = tuple(given["save_at"]), tuple(given["resume_arguments"])
        return cls(**given)
