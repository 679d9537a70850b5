"""Records on what this process spends its time, in its status record.

It observes prepared loaders. While a loader fetches a batch, the process waits for data. The rest of a loop is
training, or evaluation if no optimizer stepped. `accel runs goodput` and the straggler report read the seconds.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from accel_data.hooks import LoaderHook
from accel_state import current
from accel_state.errors import SettingError
from accel_state.watch.record import (
    BEFORE,
    BEGAN,
    DATA,
    EVALUATION,
    FIRST_STEP,
    LIKELY,
    RECOMPUTED,
    SAVING,
    START_UP,
    STATUS_RECORD,
    STEP,
    UNDECIDED,
    UNDER_WAY,
    WAITING,
)
from accel_torch.hooks import PROCESS_HOOKS, Hook

if TYPE_CHECKING:
    from torch import Tensor

    from accel_torch.options import Options

__all__ = ("TimeRecorder", "record_time")


class TimeRecorder(Hook):
    """Records the time of this process. All its sessions enter this hook.

    Attributes:
        folder: the project folder, for the lines of the account; empty to write none.
        trained: whether the first step has ended.
    """

    def __init__(self) -> None:
        self.folder = ""
        self._pid = os.getpid()
        self.trained = False
        self._stepped: Any = None
        self._saves: list[int | None] = []

    def _close(self) -> None:
        from accel_state.watch.goodput import close_account

        if os.getpid() == self._pid:
            close_account()

    def _after_step_without_loader(self, *_: Any) -> None:
        """For a loop without a prepared loader: the time after its first step counts as steps."""
        if STATUS_RECORD.doing == START_UP:
            STATUS_RECORD.doing = FIRST_STEP
            STATUS_RECORD.enter(STEP)

    def start_process(self) -> None:
        """Begin the account, and let the monitor append its lines."""
        from accel_state.protocol.state import protocol_state

        process = current.process()
        if not STATUS_RECORD.cells[BEGAN]:
            STATUS_RECORD.begin_account()
            self._stepped = register_optimizer_step_post_hook(self._after_step_without_loader)
            atexit.register(self._close)
        if self.folder:
            if not STATUS_RECORD.account:
                from accel_state.watch.goodput import GOODPUT_FOLDER, keep_account

                folder = os.path.join(os.path.abspath(self.folder), GOODPUT_FOLDER)
                keep_account(os.path.join(folder, f"rank_{process.rank}.jsonl"))
            protocol_state(process.transport).monitor.start()

    def start(self, session: Any) -> None:
        """With several processes, charge the waiting in backward passes."""
        if session.state.num_processes > 1:
            session.hooks.enter(_WaitingInBackward())

    def before_save(self) -> None:
        """Charge saving."""
        self._saves.append(STATUS_RECORD.begin(SAVING))

    def after_save(self) -> None:
        """End the charge of saving."""
        before = self._saves.pop()
        if before is not None:
            STATUS_RECORD.enter(before)

    def loader_prepared(self, session: Any, loader: Any) -> None:
        """Observe a loader."""
        if hasattr(loader, "between_batches"):
            loader.hook = _TimedLoader(self, session)

    def before_boundary(self, loader: Any, first: bool) -> None:
        """Charge what is saved between two batches."""
        self.before_save()

    def after_boundary(self, loader: Any, first: bool) -> None:
        """End the charge."""
        self.after_save()

    def forget_steps(self) -> None:
        """Watch single steps no longer, because a prepared loader reports its loop."""
        if self._stepped is not None:
            self._stepped.remove()
            self._stepped = None


class _TimedLoader(LoaderHook):
    """Charges the time of one loader, and of the loop over it.

    A loop inside of a step belongs to this step, such as that of a teacher over its own loader. A loop that begins
    after the step of the current batch, or while no model is in training mode, is an evaluation.
    """

    __slots__ = ("_gradient", "_in_step", "_recorder", "_session")

    def __init__(self, recorder: TimeRecorder, session: Any) -> None:
        # A weak reference, because the session has one to the loader.
        self._recorder, self._session = recorder, weakref.ref(session)
        self._gradient, self._in_step = session.gradient, False

    def epoch_begins(self) -> None:
        """The loop around this one may not have stepped yet, and still trains."""
        self._recorder.forget_steps()
        record = STATUS_RECORD
        self._in_step = record.doing == UNDECIDED and not record.stepped and self._trains()
        if not self._in_step:
            record.enter(DATA, int(record.cells[LIKELY]))
            self._recorder.trained |= record.stepped
            record.stepped = False

    def batch_requested(self) -> None:
        """Charge what the loop did with the batch before, unless a loop around it decides that."""
        record, decided = STATUS_RECORD, None
        if record.stepped:
            record.stepped = False
            self._recorder.trained = True
            decided = int(record.cells[LIKELY])
        elif not self._in_step:
            # An open window of micro-batches belongs to the next step.
            decided = EVALUATION if self._gradient.sync_gradients else int(record.cells[LIKELY])
        record.enter(DATA, decided)

    def batch_given(self, batch: Any) -> None:
        """What the loop does with the batch is known later; until then it counts as a step if the process is killed."""
        record = STATUS_RECORD
        cells, step = record.cells, record.loaded + record.steps + 1
        cells[UNDER_WAY] = step
        cells[LIKELY] = FIRST_STEP if not self._recorder.trained else STEP if step > cells[BEFORE] else RECOMPUTED
        record.enter(UNDECIDED)

    def epoch_ends(self) -> None:
        """The time after an epoch counts as what the loop did."""
        self.batch_requested()
        after = STEP if STATUS_RECORD.steps > 0 and torch.is_grad_enabled() else EVALUATION
        STATUS_RECORD.enter(UNDECIDED if self._in_step else after)

    def _trains(self) -> bool:
        """Whether a model with parameters to train is in training mode."""
        session = self._session()
        models: Any = () if session is None else session.prepared.models
        return any(one.training and any(weight.requires_grad for weight in one.parameters()) for one in models)


class _WaitingInBackward(Hook):
    """Charges the time of a backward pass after this process's last gradient to waiting."""

    def __init__(self) -> None:
        self._gradient_hook: Any = None
        self._before: int | None = None

    def before_backward(self, loss: Tensor) -> None:
        if loss.requires_grad:
            self._gradient_hook = loss.register_hook(lambda _: self._queue())  # type: ignore[no-untyped-call]

    def after_backward(self, loss: Tensor) -> None:
        if self._gradient_hook is not None:
            self._gradient_hook.remove()
            self._gradient_hook = None
        if self._before is not None:
            STATUS_RECORD.enter(self._before)
            self._before = None

    def _queue(self) -> None:
        # Callbacks run in the order in which they were queued, and those that wait for others are queued later.
        torch.autograd.Variable._execution_engine.queue_callback(self._wait)

    def _wait(self) -> None:
        if self._before is None:
            self._before = STATUS_RECORD.begin(WAITING)


def record_time(options: Options) -> TimeRecorder:
    """Make every later session of this process record how the process spends its time, for goodput or stragglers.

    Raises:
        SettingError: `goodput=True` was given without a project folder.
    """
    folder = options.project.project_dir
    if options.goodput and folder is None:
        raise SettingError(
            "Cannot construct an Accelerator with goodput=True.",
            "Goodput is recorded in the project folder, and there is none.",
            "Give project_dir too, or start the script with accel launch --project_dir.",
        )
    recorder = next((hook for hook in PROCESS_HOOKS if isinstance(hook, TimeRecorder)), None)
    if recorder is None:
        recorder = TimeRecorder()
        PROCESS_HOOKS.append(recorder)
    if options.goodput and folder is not None:
        recorder.folder = recorder.folder or os.fspath(folder)
    return recorder
