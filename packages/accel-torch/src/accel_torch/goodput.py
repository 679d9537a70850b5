"""Records how this process spends its time, in the account of `accel_state.goodput`.

It observes prepared loaders. While a loader fetches a batch, the process waits for data. The rest of a loop is
training, or evaluation if no optimizer stepped.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from accel_state import current
from accel_state.errors import SettingError
from accel_state.goodput.account import (
    DATA,
    EVALUATION,
    FIRST_STEP,
    GOODPUT_FOLDER,
    RECOMPUTED,
    START_UP,
    STEP,
    TimeAccount,
)
from accel_state.hang_report.progress import PROGRESS
from accel_torch.hooks import PROCESS_HOOKS, Hook
from accel_torch.stopwatch import TimedTransport

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from accel_state.gradient import GradientState
    from accel_torch.options import Options

__all__ = ("GoodputRecorder", "record_goodput")

_REPORTED_EVERY: Final = 0.1
"""Seconds between two updates of the account in a loop of fast steps."""


class GoodputRecorder(Hook):
    """Records the account of this process. All its sessions enter this hook.

    Args:
        folder: the project folder.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pid = os.getpid()
        self._account: TimeAccount | None = None
        self._stepped: Any = None
        self._saves: list[AbstractContextManager[Any]] = []

    @property
    def account(self) -> TimeAccount:
        """The account; created when the rank of this process is known."""
        if self._account is None:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            rank = current.process().rank
            self._account = TimeAccount(
                os.path.join(self._folder, GOODPUT_FOLDER), rank, int(attempt) if attempt.isdecimal() else 0
            )
            self._stepped = register_optimizer_step_post_hook(self._after_step_without_loader)
            atexit.register(self._close)
        return self._account

    def _close(self) -> None:
        if self._account is not None and os.getpid() == self._pid:
            self._account.step = PROGRESS.run_step
            self._account.close()

    def _after_step_without_loader(self, *_: Any) -> None:
        """For a loop without a prepared loader: the time after its first step counts as steps."""
        if self.account.doing == START_UP:
            self.account.charge(FIRST_STEP, STEP)

    def start_process(self) -> None:
        """Charge the collectives of this process to waiting."""
        account, process = self.account, current.process()
        if process.world_size == 1 or isinstance(process.transport, TimedTransport):
            return
        current.set_process(process._replace(transport=TimedTransport(process.transport, account)))

    def start(self, session: Any) -> None:
        """With several processes, charge the waiting in backward passes."""
        if session.state.num_processes > 1:
            session.hooks.enter(_WaitingInBackward(self.account))

    def before_save(self) -> None:
        """Charge saving."""
        saving = self.account.on("saving")
        saving.__enter__()
        self._saves.append(saving)

    def after_save(self) -> None:
        """End the charge of saving."""
        self._saves.pop().__exit__(None, None, None)

    def loader_prepared(self, session: Any, loader: Any) -> None:
        """Observe a loader."""
        if hasattr(loader, "between_batches"):
            loader.hook = _TimedLoader(self.account, session.gradient, self._forget_steps)

    def before_boundary(self, loader: Any, first: bool) -> None:
        """Charge what is saved between two batches; it ends the time of the step or of the evaluation before it."""
        if isinstance(loader.hook, _TimedLoader):
            loader.hook.judge(PROGRESS.steps)
        self.before_save()

    def after_boundary(self, loader: Any, first: bool) -> None:
        """End the charge."""
        self.after_save()

    def _forget_steps(self) -> None:
        if self._stepped is not None:
            self._stepped.remove()
            self._stepped = None


class _TimedLoader:
    """Charges the time of one loader and of the loop over it; see `accel_data.hooks.LoaderHook`."""

    __slots__ = ("_first", "_gradient", "_steps", "waits")

    def __init__(self, account: TimeAccount, gradient: GradientState, first: Callable[[], None]) -> None:
        self.waits, self._gradient, self._first = account, gradient, first
        self._steps = 0

    def epoch_begins(self) -> None:
        """See `LoaderHook`."""
        self._first()
        self._steps = PROGRESS.steps
        self.waits.enter(DATA)
        self.waits.due = 0.0

    def batch_given(self, batch: Any) -> None:
        """See `LoaderHook`."""
        account, steps = self.waits, PROGRESS.steps
        self.judge(steps)
        # The kind is known at the end of the step; until then, this is what is recorded for a killed process.
        counts = PROGRESS.loaded + steps >= account.before
        account.enter((STEP if counts else RECOMPUTED) if steps else FIRST_STEP)
        # Each batch is reported until the first step has ended.
        account.due = account.since + _REPORTED_EVERY if steps else 0.0

    def epoch_ends(self) -> None:
        """See `LoaderHook`: the time after an epoch counts as what the loop did."""
        account = self.waits
        account.resume()
        self.judge(PROGRESS.steps)
        account.enter(STEP if PROGRESS.steps > 0 and torch.is_grad_enabled() else EVALUATION)

    def judge(self, steps: int) -> None:
        """Decide how the loop has spent the time since the last report."""
        account, before = self.waits, self._steps
        self._steps = steps
        if account.doing == DATA:
            return
        if steps == before and self._gradient.sync_gradients:
            account.doing = EVALUATION
        elif before == 0:
            account.doing = FIRST_STEP
        else:
            account.step = step = PROGRESS.loaded + steps
            account.doing = STEP if step > account.before else RECOMPUTED


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


def record_goodput(options: Options) -> None:
    """Make every later session of this process record how the process spends its time; a repeated call does nothing.

    Raises:
        SettingError: `goodput=True` was given without a project folder.
    """
    if any(isinstance(hook, GoodputRecorder) for hook in PROCESS_HOOKS):
        return
    folder = options.project.project_dir
    if folder is None:
        raise SettingError(
            "Cannot construct an Accelerator with goodput=True.",
            "Goodput is recorded in the project folder, and there is none.",
            "Give project_dir too, or start the script with accel launch --project_dir.",
        )
    PROCESS_HOOKS.append(GoodputRecorder(os.fspath(folder)))
