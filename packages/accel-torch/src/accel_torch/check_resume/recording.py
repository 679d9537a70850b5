"""Runs an unchanged training script, and records its results after each step.

    accel launch --module accel_torch.check_resume.recording TASK.json train.py its arguments

A *step* is one step of the optimizer. Results are recorded, and checkpoints saved, between two batches of the prepared
loader that is trained on, when all work of the step is complete and the script's own counters are up to date.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accel_plugins.layers import extract_model_from_parallel
from accel_plugins.prepared import add_hook
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.watch.record import STATUS_RECORD
from accel_torch.check_resume.digests import Pieces, digests_of, sample_digests, state_pieces, variables_of
from accel_torch.check_resume.task import Task
from accel_torch.hooks import Hook
from accel_torch.loading import load_state
from accel_torch.observed_runs import StopRun, run_script
from accel_torch.saving import save_state

if TYPE_CHECKING:
    from accel_torch.options import Options
    from accel_torch.session import Session

__all__ = ("RunRecorder", "main")


class RunRecorder(Hook):
    """Records what one process of a run computes.

    Args:
        task: the task of the run.
        script: the script's file.
    """

    def __init__(self, task: Task, script: str) -> None:
        self.task, self.script = task, script
        self._sessions: list[weakref.ref[Session]] = []
        self._names_automatically = False
        self._samples: list[tuple[int, int, list[str]]] = []
        self._losses: list[float] = []
        self._gradients: dict[str, str] = {}
        self._fresh: Pieces | None = None
        self._loaded = self._begun = False
        self._saves = 0
        self._to_save: int | None = None
        self._plain_steps: dict[int, int] = {}
        register_optimizer_step_pre_hook(self._before_optimizer_step)
        register_optimizer_step_post_hook(self._after_optimizer_step)

    @property
    def _steps(self) -> int:
        """The number of steps on this process; a script may step the optimizers inside the prepared ones."""
        return STATUS_RECORD.steps or max(self._plain_steps.values(), default=0)

    @property
    def step(self) -> int:
        """Steps since the start of the uninterrupted run."""
        return self.task.resumed_at + self._steps

    # ------------------------------------------------------------------ called by the sessions and their loaders

    def configure(self, options: Options) -> Options:
        """Disable automatic names of checkpoints, for which `folder_to_save` and `folder_to_load` have other folders.

        In the project's folder, the uninterrupted run could find checkpoints of earlier runs, and the resumed run could
        load one of them.
        """
        project = dataclasses.replace(options.project, automatic_checkpoint_naming=False)
        self._names_automatically = options.project.automatic_checkpoint_naming
        return options._replace(project=project)

    def start(self, session: Session) -> None:
        """Record a new session."""
        self._sessions.append(weakref.ref(session))
        if self.task.resumes:
            add_hook(session.prepared.load_hooks, self._before_load)

    def before_backward(self, loss: Any) -> None:
        """Record a loss."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(float(loss.detach()))

    def folder_to_load(self, session: Session, input_dir: Any, missing_ok: bool) -> Any:
        """The checkpoint of the task in a resumed run, and no checkpoint in the uninterrupted one."""
        if input_dir is not None or not self._names_automatically:
            return input_dir
        return self.task.checkpoint if self.task.resumes else Path(self.task.notes, "checkpoint_0")

    def folder_to_save(self, session: Session, output_dir: Any) -> Any:
        """A folder beside the notes."""
        if output_dir is not None or not self._names_automatically:
            return output_dir
        self._saves += 1
        return Path(self.task.notes, f"checkpoint_{self._saves}")

    def loader_prepared(self, session: Session, loader: Any) -> None:
        """Attach to a prepared loader."""
        if hasattr(loader, "between_batches"):
            session.pauses.used = True
            loader.hook = _LoaderHook(self, session, len(session.prepared.loaders), loader.progress, self._steps)

    def after_boundary(self, loader: Any, first: bool) -> None:
        """Save if it is asked to, and record the state after a step."""
        hook = loader.hook
        session = hook.session() if isinstance(hook, _LoaderHook) else None
        if session is None:
            return
        trained = not first and self._steps > hook.steps and session.gradient.sync_gradients
        hook.steps = self._steps
        if self._to_save is not None and not first:
            if trained:
                raise SystemExit(
                    "check-resume: the script steps after each batch: it has no window. Remove --in_window."
                )
            self._save(session, self._to_save)
        if trained:
            self._after_training_step(session)

    def epoch_begins(self, session: Session) -> None:
        """Load the checkpoint unless the script does it, and record the state before the first step."""
        if self._begun:
            return
        self._begun = True
        if self.task.resumes and not self._loaded:
            if not self.task.loads:
                raise SystemExit(
                    f"check-resume: the script did not load {self.task.checkpoint} when it was called with "
                    f"{self.task.resume_arguments}."
                )
            # The generators of processes are not restored on another number of processes.
            allowed = () if session.state.num_processes == self.task.saved_on else ("random_states",)
            load_state(session, self.task.checkpoint, {"allow_missing": allowed})
        # Loading may step an optimizer with zero gradients to create its states.
        self._plain_steps.clear()
        self._gradients = {}
        note = {"step": self.step, "loaded": self.task.resumes, "pieces": self._state_of(session)}
        if self.task.resumes:
            note |= {"fresh": self._fresh, "full": state_pieces(session, full=True)}
        self._write(note)

    def batch_given(self, number: int, epoch: int, batch: Any) -> None:
        """Record the samples of a batch."""
        self._samples.append((number, epoch, sample_digests(batch)))

    # ------------------------------------------------------------------ notes

    def _before_load(self, models: Any, folder: str) -> None:
        self._loaded = True
        session = self._sessions[-1]()
        if session is not None:
            self._fresh = self._state_of(session)

    def _before_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        session = self._sessions[-1]() if self._sessions else None
        name_of = None if session is None else session.prepared.parameter_name
        gradients = {}
        for group, options in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(options["params"]):
                if parameter.grad is not None:
                    name = (name_of(parameter) if name_of else None) or f"parameter {index} of group {group}"
                    gradients[name] = parameter.grad
        self._gradients |= digests_of(gradients)

    def _after_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        self._plain_steps[id(optimizer)] = self._plain_steps.get(id(optimizer), 0) + 1

    def _after_training_step(self, session: Session) -> None:
        step = self.step
        prepared = session.prepared
        pieces = {**self._state_of(session), "gradients": self._gradients}
        note: dict[str, Any] = {"step": step, "pieces": pieces, "samples": self._samples, "losses": self._losses}
        last = step >= self.task.last_step
        if last:
            known = [*prepared.custom, *prepared.loaders, *prepared.schedulers, *prepared.optimizers]
            known += [*prepared.models, *map(extract_model_from_parallel, prepared.models)]
            known += [inner_optimizer(item) for item in prepared.optimizers]
            known += [getattr(item, "scheduler", item) for item in prepared.schedulers]
            note["variables"] = variables_of(sys._getframe(), self.script, known)
        self._write(note)
        self._samples, self._losses, self._gradients = [], [], {}
        if step in self.task.save_at:
            self._to_save = step
            if not self.task.in_window:
                self._save(session, step)
        if last:
            raise StopRun

    def _save(self, session: Session, step: int) -> None:
        """Save the checkpoint of a step; it includes the batches read since."""
        self._to_save = None
        self._samples, self._losses = [], []
        full = state_pieces(session, full=True)
        self._write({"step": step, "saved": True, "pieces": self._state_of(session), "full": full})
        save_state(session, self.task.folder_of(step), safe_serialization=True)

    def _state_of(self, session: Session) -> Pieces:
        """Digests of the state that this process saves in a checkpoint, and the positions of its loaders."""
        pieces = state_pieces(session, full=False)
        prepared = session.prepared
        for index, loader in enumerate(prepared.loaders):
            if hasattr(loader, "progress"):
                at = loader.progress
                pieces[f"loader {index}"] = {"position": f"epoch {at.epoch}, batch {at.steps}"}
        if self.task.in_window:
            for index, model in enumerate(prepared.models):
                held = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
                pieces[f"gradients of model {index} so far"] = digests_of(held)
        return pieces

    def _write(self, note: dict[str, Any]) -> None:
        session = self._sessions[-1]()
        rank = 0 if session is None else session.process.rank
        with Path(self.task.notes, f"rank_{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")


class _LoaderHook:
    """Forwards the calls of a loader; see `accel_data.hooks.LoaderHook`."""

    waits = None

    def __init__(self, recorder: RunRecorder, session: Session, number: int, progress: Any, steps: int) -> None:
        self._recorder, self.session = recorder, weakref.ref(session)
        self._number, self._progress, self.steps = number, progress, steps

    def epoch_begins(self) -> None:
        session = self.session()
        if session is not None:
            self._recorder.epoch_begins(session)

    def epoch_ends(self) -> None:
        pass

    def batch_given(self, batch: Any) -> None:
        self._recorder.batch_given(self._number, self._progress.epoch, batch)


def main(arguments: list[str]) -> None:
    """Run the script in the arguments with the task in the first argument."""
    task = Task.read(arguments[0])
    script = str(Path(arguments[1]).resolve())
    run_script(arguments[1], [*arguments[2:], *task.resume_arguments], RunRecorder(task, script))


if __name__ == "__main__":
    main(sys.argv[1:])
