"""Records how this process spends its time, in the account of `accel_state.watch.seconds`.

It observes prepared loaders. While a loader fetches a batch, the process waits for data. The rest of a loop is
training, or evaluation if no optimizer stepped. `accel runs goodput` and the straggler report read the account.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from accel_state import current
from accel_state.errors import SettingError
from accel_state.transport.base import Transport, Work
from accel_state.transport.forwarding import ForwardingTransport
from accel_state.watch.record import STATUS_RECORD
from accel_state.watch.seconds import (
    DATA,
    EVALUATION,
    FIRST_STEP,
    GOODPUT_FOLDER,
    RECOMPUTED,
    SAVING,
    START_UP,
    STEP,
    WAITING,
    TimeAccount,
)
from accel_torch.hooks import PROCESS_HOOKS, Hook

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from accel_state.gradient import GradientState
    from accel_torch.options import Options

__all__ = ("TimeRecorder", "TimedTransport", "record_time")

_REPORTED_EVERY: Final = 0.1
"""Seconds between two updates of the account in a loop of fast steps."""


class TimeRecorder(Hook):
    """Records the account of this process. All its sessions enter this hook.

    Attributes:
        folder: the project folder, for the lines of the account; empty to write none.
        account: the account; it begins when the rank of this process is known.
    """

    account: TimeAccount

    def __init__(self) -> None:
        self.folder = ""
        self._pid = os.getpid()
        self._steps = 0
        self._stepped: Any = None
        self._saves: list[AbstractContextManager[Any]] = []

    def _begin(self) -> None:
        self.account = TimeAccount(STATUS_RECORD)
        self._stepped = register_optimizer_step_post_hook(self._after_step_without_loader)
        atexit.register(self._close)

    def _close(self) -> None:
        if os.getpid() == self._pid:
            self.account.reach(STATUS_RECORD.run_step)
            self.account.close()

    def _after_step_without_loader(self, *_: Any) -> None:
        """For a loop without a prepared loader: the time after its first step counts as steps."""
        if self.account.doing == START_UP:
            self.account.doing = FIRST_STEP
            self.account.enter(STEP)

    def start_process(self) -> None:
        """Begin the account, let the monitor append its lines, and charge collectives to waiting."""
        from accel_state.protocol.state import protocol_state

        process = current.process()
        if not hasattr(self, "account"):
            self._begin()
        if self.folder:
            if not self.account.path:
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                path = os.path.join(os.path.abspath(self.folder), GOODPUT_FOLDER, f"rank_{process.rank}.jsonl")
                self.account.write_to(path, int(attempt) if attempt.isdecimal() else 0)
            protocol_state(process.transport).monitor.start()
        if process.world_size > 1 and not isinstance(process.transport, TimedTransport):
            current.set_process(process._replace(transport=TimedTransport(process.transport, self.account)))

    def start(self, session: Any) -> None:
        """With several processes, charge the waiting in backward passes."""
        if session.state.num_processes > 1:
            session.hooks.enter(_WaitingInBackward(self.account))

    def before_save(self) -> None:
        """Charge saving."""
        saving = self.account.on(SAVING)
        saving.__enter__()
        self._saves.append(saving)

    def after_save(self) -> None:
        """End the charge of saving."""
        self._saves.pop().__exit__(None, None, None)

    def loader_prepared(self, session: Any, loader: Any) -> None:
        """Observe a loader."""
        if hasattr(loader, "between_batches"):
            loader.hook = _TimedLoader(self, session.gradient)

    def before_boundary(self, loader: Any, first: bool) -> None:
        """Charge what is saved between two batches; it ends the time of the step or of the evaluation before it."""
        if isinstance(loader.hook, _TimedLoader):
            loader.hook.decide()
        self.before_save()

    def after_boundary(self, loader: Any, first: bool) -> None:
        """End the charge."""
        self.after_save()

    def forget_steps(self) -> None:
        """Watch single steps no longer, because a prepared loader reports its loop."""
        if self._stepped is not None:
            self._stepped.remove()
            self._stepped = None

    def decide(self, otherwise: int, accumulates: bool) -> None:
        """Charge what the loop did since the last decision.

        Args:
            otherwise: the category if no optimizer stepped.
            accumulates: whether the window of micro-batches is still open, so that the next step counts.
        """
        account, steps, before = self.account, STATUS_RECORD.steps, self._steps
        self._steps = steps
        if steps == before and not accumulates:
            account.decide(otherwise)
        else:
            step = STATUS_RECORD.loaded + steps
            account.reach(step)
            is_new = step + (steps == before) > account.before
            account.decide(FIRST_STEP if before == 0 else STEP if is_new else RECOMPUTED)


class _TimedLoader:
    """Charges the time of one loader and of the loop over it; see `accel_data.hooks.LoaderHook`."""

    __slots__ = ("_gradient", "_recorder", "waits")

    def __init__(self, recorder: TimeRecorder, gradient: GradientState) -> None:
        self.waits, self._recorder, self._gradient = recorder.account, recorder, gradient

    def epoch_begins(self) -> None:
        """See `LoaderHook`. A loop around this one may not have stepped yet, and still trains."""
        account = self.waits
        self._recorder.forget_steps()
        self._recorder.decide(account.doing, not self._gradient.sync_gradients)
        account.enter(DATA)
        account.due = 0.0

    def batch_given(self, batch: Any) -> None:
        """See `LoaderHook`."""
        account, steps = self.waits, STATUS_RECORD.steps
        self.decide()
        # The kind is known at the end of the step; until then, this is what is recorded for a killed process.
        counts = STATUS_RECORD.loaded + steps >= account.before
        account.enter((STEP if counts else RECOMPUTED) if steps else FIRST_STEP, decided=False)
        # Each batch is reported until the first step has ended.
        account.due = account.since + _REPORTED_EVERY if steps else 0.0

    def epoch_ends(self) -> None:
        """See `LoaderHook`: the time after an epoch counts as what the loop did."""
        account = self.waits
        account.resume()
        self.decide()
        account.enter(STEP if STATUS_RECORD.steps > 0 and torch.is_grad_enabled() else EVALUATION)

    def decide(self) -> None:
        """Charge what the loop over this loader did since the last decision."""
        self._recorder.decide(EVALUATION, not self._gradient.sync_gradients)


class _WaitingInBackward(Hook):
    """Charges the time of a backward pass after this process's last gradient to waiting."""

    def __init__(self, account: TimeAccount) -> None:
        self._account = account
        self._gradient_hook: Any = None

    def before_backward(self, loss: Tensor) -> None:
        if loss.requires_grad:
            self._gradient_hook = loss.register_hook(lambda _: _queue(self._account))  # type: ignore[no-untyped-call]

    def after_backward(self, loss: Tensor) -> None:
        if self._gradient_hook is not None:
            self._gradient_hook.remove()
            self._gradient_hook = None
        self._account.resume()


def _queue(account: TimeAccount) -> None:
    # Callbacks run in the order in which they were queued, and those that wait for other processes are queued later.
    torch.autograd.Variable._execution_engine.queue_callback(lambda: _wait(account))


def _wait(account: TimeAccount) -> None:
    if account.is_mine:
        account.wait_for_others()


class _TimedWork:
    __slots__ = ("_account", "_work", "is_completed")

    def __init__(self, work: Work, account: TimeAccount) -> None:
        self._work, self._account = work, account
        self.is_completed = work.is_completed

    def wait(self, *timeout: Any) -> Any:
        with self._account.on(WAITING):
            return self._work.wait(*timeout)


class TimedTransport(ForwardingTransport):
    """Forwards every call to another transport, and charges the time for which this process waits for it.

    Args:
        inner: the transport that moves the data.
        account: receives the time.
    """

    def __init__(self, inner: Transport, account: TimeAccount) -> None:
        super().__init__(inner)
        self._account = account

    def around(self, inner: Transport) -> TimedTransport:
        return TimedTransport(inner, self._account)

    def started(self, work: Work) -> Work:
        return _TimedWork(work, self._account)

    def barrier(self) -> None:
        with self._account.on(WAITING):
            super().barrier()


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
