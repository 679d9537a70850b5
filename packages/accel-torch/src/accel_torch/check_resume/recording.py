"""Runs an unchanged training script, and records its results after each step.

    accel launch --module accel_torch.check_resume.recording TASK.json train.py its arguments

A *step* is one step of the optimizer. Results are recorded, and checkpoints saved, between two batches of the prepared
loader that is trained on, when all work of the step is complete and the script's own counters are up to date.
"""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.hang_report.progress import PROGRESS
from accel_torch.check_resume.digests import Pieces, digests_of, sample_digests, state_pieces, variables_of
from accel_torch.check_resume.task import Task
from accel_torch.observed_runs import StopRun, run_script
from accel_torch.observers import RunObserver

if TYPE_CHECKING:
    from accel_torch.accelerator import Accelerator
    from accel_torch.session import Session

__all__ = ("RunRecorder", "main")


class RunRecorder(RunObserver):
    """Records what one process of a run computes.

    Args:
        task: the task of the run.
        script: the script's file.
    """

    def __init__(self, task: Task, script: str) -> None:
        self.task, self.script = task, script
        self._accelerators: list[weakref.ref[Accelerator]] = []
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
        return PROGRESS.steps or max(self._plain_steps.values(), default=0)

    @property
    def step(self) -> int:
        """Steps since the start of the uninterrupted run."""
        return self.task.resumed_at + self._steps

    # ------------------------------------------------------------------ called by the Accelerator and its loaders

    def begins(self, accelerator: Accelerator) -> None:
        """Record a new Accelerator."""
        self._accelerators.append(weakref.ref(accelerator))
        if self.task.resumes:
            accelerator.register_load_state_pre_hook(self._before_load)
        backward = accelerator.backward

        def noted(loss: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self._losses.append(float(loss.detach()))
            return backward(loss, *arguments, **options)

        accelerator.backward = noted  # type: ignore[method-assign]
        self._lead_checkpoints(accelerator)

    def _lead_checkpoints(self, accelerator: Accelerator) -> None:
        """Use another folder for automatic checkpoint names than the script's project.

        In the project's folder, the uninterrupted run could find checkpoints of earlier runs, and the resumed run could
        load one of them.
        """
        project = accelerator.session.options.project
        load, save = accelerator.load_state, accelerator.save_state

        def load_state(input_dir: Any = None, *arguments: Any, **options: Any) -> Any:
            automatic = input_dir is None and project.automatic_checkpoint_naming
            if automatic and not self.task.resumes and options.get("missing_ok"):
                return None
            return load(self.task.checkpoint if automatic and self.task.resumes else input_dir, *arguments, **options)

        def save_state(output_dir: Any = None, *arguments: Any, **options: Any) -> Any:
            if not project.automatic_checkpoint_naming:
                return save(output_dir, *arguments, **options)
            self._saves += 1
            given = output_dir or Path(self.task.notes, f"checkpoint_{self._saves}")
            project.automatic_checkpoint_naming = False
            try:
                return save(given, *arguments, **options)
            finally:
                project.automatic_checkpoint_naming = True

        accelerator.load_state = load_state  # type: ignore[method-assign]
        accelerator.save_state = save_state  # type: ignore[method-assign]

    def loader_prepared(self, session: Session, loader: Any) -> None:
        """Attach to a prepared loader, to be called between its batches."""
        if not hasattr(loader, "between_batches"):
            return
        living = [accelerator for reference in self._accelerators if (accelerator := reference()) is not None]
        accelerator = next(one for one in living if one.session is session)
        number = len(accelerator.session.prepared.loaders)
        before, pauses, steps = loader.between_batches, loader.pauses, self._steps

        def between(first: bool) -> None:
            nonlocal steps
            if before is not None and (pauses is None or pauses.used):
                before(first)
            trained = not first and self._steps > steps and accelerator.gradient_state.sync_gradients
            steps = self._steps
            if self._to_save is not None and not first:
                if trained:
                    raise SystemExit(
                        "check-resume: the script steps after each batch: it has no window. Remove --in_window."
                    )
                self._save(accelerator, self._to_save)
            if trained:
                self._after_step(accelerator)

        loader.between_batches, loader.pauses = between, None
        loader.observer = _Observer(self, accelerator, number, loader.progress)

    def epoch_begins(self, accelerator: Accelerator) -> None:
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
            allowed = () if accelerator.num_processes == self.task.saved_on else ("random_states",)
            accelerator.load_state(self.task.checkpoint, allow_missing=allowed)
        # Loading may step an optimizer with zero gradients to create its states.
        self._plain_steps.clear()
        self._gradients = {}
        note = {"step": self.step, "loaded": self.task.resumes, "pieces": self._state_of(accelerator)}
        if self.task.resumes:
            note |= {"fresh": self._fresh, "full": state_pieces(accelerator.session, full=True)}
        self._write(note)

    def batch_given(self, number: int, epoch: int, batch: Any) -> None:
        """Record the samples of a batch."""
        self._samples.append((number, epoch, sample_digests(batch)))

    # ------------------------------------------------------------------ notes

    def _before_load(self, models: Any, folder: str) -> None:
        self._loaded = True
        accelerator = self._accelerators[-1]()
        if accelerator is not None:
            self._fresh = self._state_of(accelerator)

    def _before_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        accelerator = self._accelerators[-1]() if self._accelerators else None
        name_of = None if accelerator is None else accelerator.session.prepared.parameter_name
        gradients = {}
        for group, options in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(options["params"]):
                if parameter.grad is not None:
                    name = (name_of(parameter) if name_of else None) or f"parameter {index} of group {group}"
                    gradients[name] = parameter.grad
        self._gradients |= digests_of(gradients)

    def _after_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        self._plain_steps[id(optimizer)] = self._plain_steps.get(id(optimizer), 0) + 1

    def _after_step(self, accelerator: Accelerator) -> None:
        step = self.step
        prepared = accelerator.session.prepared
        pieces = {**self._state_of(accelerator), "gradients": self._gradients}
        note: dict[str, Any] = {"step": step, "pieces": pieces, "samples": self._samples, "losses": self._losses}
        last = step >= self.task.last_step
        if last:
            known = [accelerator, *prepared.custom, *prepared.loaders, *prepared.schedulers, *prepared.optimizers]
            known += [*prepared.models, *map(accelerator.unwrap_model, prepared.models)]
            known += [inner_optimizer(item) for item in prepared.optimizers]
            known += [getattr(item, "scheduler", item) for item in prepared.schedulers]
            note["variables"] = variables_of(sys._getframe(), self.script, known)
        self._write(note)
        self._samples, self._losses, self._gradients = [], [], {}
        if step in self.task.save_at:
            self._to_save = step
            if not self.task.in_window:
                self._save(accelerator, step)
        if last:
            raise StopRun

    def _save(self, accelerator: Accelerator, step: int) -> None:
        """Save the checkpoint of a step; it includes the batches read since."""
        self._to_save = None
        self._samples, self._losses = [], []
        full = state_pieces(accelerator.session, full=True)
        self._write({"step": step, "saved": True, "pieces": self._state_of(accelerator), "full": full})
        accelerator.save_state(self.task.folder_of(step))

    def _state_of(self, accelerator: Accelerator) -> Pieces:
        """Digests of the state that this process saves in a checkpoint, and the positions of its loaders."""
        pieces = state_pieces(accelerator.session, full=False)
        prepared = accelerator.session.prepared
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
        accelerator = self._accelerators[-1]()
        rank = 0 if accelerator is None else accelerator.process_index
        with Path(self.task.notes, f"rank_{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")


class _Observer:
    """Forwards the calls of a loader; see `accel_data.hooks.LoaderObserver`."""

    waits = None

    def __init__(self, recorder: RunRecorder, accelerator: Accelerator, number: int, progress: Any) -> None:
        self._recorder, self._accelerator = recorder, weakref.ref(accelerator)
        self._number, self._progress = number, progress

    def epoch_begins(self) -> None:
        accelerator = self._accelerator()
        if accelerator is not None:
            self._recorder.epoch_begins(accelerator)

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
