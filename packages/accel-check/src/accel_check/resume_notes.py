"""What the recorder does in a check of a resumed run: it digests the state of each step, and keeps checkpoints."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_check.digests import digests_of
from accel_check.models import piece_of
from accel_check.records import StartRecord, StepRecord, write_record
from accel_check.task import ResumeTask
from accel_check.training_state import optimizer_pieces, training_state, variables_of

if TYPE_CHECKING:
    from accel_check.recorder import StepRecorder

__all__ = ("ResumeNotes",)


class ResumeNotes:
    """The notes of one process.

    Args:
        recorder: the recorder of this process.
        task: what the run does.
    """

    def __init__(self, recorder: StepRecorder, task: ResumeTask) -> None:
        self._recorder, self.task = recorder, task
        self.by_command = False
        """Whether the command saves and loads, between the batches of a prepared loader."""
        self._calls_at: dict[int, int] = {}
        """The number of calls of any optimizer's `step` when the first one had made so many."""
        self.kept: dict[int, tuple[int, list[str]]] = {}
        """For each step of `save_at`, the call after which its checkpoint was written, and its files."""

    @property
    def first_steps(self) -> int:
        """Steps of the first optimizer, since the start of the uninterrupted run."""
        return self.task.resumed_at + self._recorder.steps_of(0)

    def forward_begins(self) -> None:
        """Digest the state before the first forward of a step."""
        recorder = self._recorder
        if recorder.step.state:
            return
        recorder.step.state = training_state(recorder)
        if recorder.calls in {call for call, _ in self.kept.values()} or (self.task.resumed_at and not recorder.calls):
            parameters = {name: piece_of(one) for name, one in recorder.models.parameters()}
            buffers = {name: piece_of(one) for name, one in recorder.models.buffers()}
            start = StartRecord(parameters | optimizer_pieces(recorder), buffers)
            write_record(recorder.folder / f"state_{recorder.calls + 1}.pt", start)

    def step_begins(self, step: StepRecord) -> None:
        """Digest the gradients of a step, and keep what was saved before it."""
        self.keep()
        gradients = {name: one.grad for name, one in self._recorder.models.parameters() if one.grad is not None}
        step.digests = digests_of(gradients)

    def step_ends(self, step: StepRecord) -> bool:
        """Note a step, and return whether it is the last one."""
        recorder = self._recorder
        if not step.optimizer:
            self._calls_at[self.first_steps] = recorder.calls
        compared = [one for objects in recorder.compared_objects for one in objects()]
        compared += [one() for one in (*recorder.optimizers, *recorder.schedulers, *recorder.scalers)]
        compared += list(recorder.models.roots())
        if self.task.resumed_at:
            last = self.first_steps >= self.task.last_step
        else:
            ends = [call + self.task.last_step - max(self.task.save_at) for call, _ in self.kept.values()]
            last = len(ends) == len(self.task.save_at) and recorder.calls >= max(ends)
        if last or recorder.calls in self._ends():
            step.variables = variables_of(sys._getframe(), recorder.script, compared)
        return last

    def _ends(self) -> set[int]:
        """The calls at which a resumed run ends."""
        steps = self.task.last_step - max((*self.task.save_at, self.task.resumed_at))
        return {call + steps for call, _ in self.kept.values()}

    # ------------------------------------------------------------------ checkpoints

    def due(self) -> int | None:
        """The step whose checkpoint is to be saved now; None if none is."""
        step = self.first_steps
        return step if step in self.task.save_at and step not in self.kept and not self.task.resumed_at else None

    def folder_of(self, step: int) -> str:
        """The checkpoint of a step."""
        return os.path.join(self.task.checkpoints, f"step_{step}")

    def saved(self, step: int) -> None:
        """Note that the command has saved a checkpoint; the next records begin here."""
        self.kept[step] = (self._recorder.calls, [self.folder_of(step)])
        self._recorder.step = StepRecord()

    def keep(self) -> None:
        """Keep the checkpoints that the script itself has written since the last step, before it overwrites them."""
        if self.by_command or self.task.resumed_at:
            return
        written: list[tuple[int, str]] = self._recorder.facts.more.get("saved", [])
        for step in self.task.save_at:
            begin = self._calls_at.get(step)
            if begin is None or step in self.kept:
                continue
            later = [(call, path) for call, path in written if call >= begin]
            if later:
                first = min(call for call, _ in later)
                paths = sorted({path for call, path in later if call == first})
                self.kept[step] = (first, [self._copy(path, step) for path in paths] + self._others(paths, first, step))

    def _copy(self, path: str, step: int) -> str:
        scratch = self._recorder.task.scratch
        kept = os.path.join(self.folder_of(step), os.path.relpath(path, scratch))
        if os.path.isdir(path):
            # The files of all ranks are complete when a collective save returns.
            if self._recorder.facts.rank == 0:
                shutil.copytree(path, kept, dirs_exist_ok=True)
        elif os.path.isfile(path):
            os.makedirs(os.path.dirname(kept), exist_ok=True)
            shutil.copyfile(path, kept)
        return kept

    def _others(self, paths: list[str], call: int, step: int) -> list[str]:
        """Files beside the checkpoint's that the script has opened itself."""
        scratch, copies = self._recorder.task.scratch, []
        folders = {
            "/" + os.path.relpath(path if os.path.isdir(path) else os.path.dirname(path), scratch) for path in paths
        }
        opened: list[tuple[int, str]] = self._recorder.facts.more.get("opened", [])
        for when, path in opened:
            if when == call and os.path.isfile(path) and any(Path(path).is_relative_to(folder) for folder in folders):
                kept = os.path.join(self.folder_of(step), path.lstrip(os.sep))
                os.makedirs(os.path.dirname(kept), exist_ok=True)
                shutil.copyfile(path, kept)
                copies.append(kept)
        return copies

    def finish(self) -> dict[str, Any]:
        """Facts about this process."""
        self.keep()
        return {"kept": self.kept}
