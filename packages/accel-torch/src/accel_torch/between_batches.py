"""Work between two batches of a prepared loader: save, or end the run after a signal.

Checkpoint modules are imported at their first use, since most runs do not need them here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel_state.errors import NotOffered
from accel_state.watch.record import STATUS_RECORD

if TYPE_CHECKING:
    from accel_plugins.checkpoint.boundaries import Preemption
    from accel_torch.session import Session

__all__ = ("BetweenBatches", "call_between_batches")


class BetweenBatches:
    """Called by a prepared loader before each of its batches; see `PreparedLoader.between_batches`.

    A boundary between steps is between two batches of a loader if an optimizer has stepped since the loader's last
    batch. A loader for evaluation has no such boundaries, even inside a training loop, so that parameters which a
    script exchanges for an evaluation are never saved as those of the run.

    Args:
        session: the session.
        loader: the prepared loader.
        ending: ends the run if a signal has requested it.
        saving: saves a checkpoint if one is due.
    """

    __slots__ = ("_ending", "_loader", "_saving", "_session", "_steps")

    def __init__(
        self,
        session: Session,
        loader: Any,
        ending: Callable[[], None] | None,
        saving: Callable[[], None] | None = None,
    ) -> None:
        # Weak references: the session has a reference to the loader, which has one to this object.
        self._session, self._loader = weakref.ref(session), weakref.ref(loader)
        self._ending, self._saving = ending, saving
        self._steps = 0

    def __call__(self, first: bool) -> None:
        session, loader = self._session(), self._loader()
        for before_boundary in () if session is None else session.hooks.before_boundary:
            before_boundary(loader, first)
        self._save_or_end(session, first)
        for after_boundary in () if session is None else session.hooks.after_boundary:
            after_boundary(loader, first)

    def _save_or_end(self, session: Session | None, first: bool) -> None:
        if self._saving is not None and session is not None:
            if not first and STATUS_RECORD.steps > self._steps and session.gradient.sync_gradients:
                self._saving()
            self._steps = STATUS_RECORD.steps
        if self._ending is not None and not first:
            self._ending()


def call_between_batches(session: Session, loader: Any) -> None:
    """Make a prepared loader call this between its batches."""
    ending = None
    if session.options.project.save_on_signal:
        ending = _ending(session)
    saving = None
    if session.options.project.save_policy is not None:
        saving = _saving(session)
    loader.between_batches, loader.pauses = BetweenBatches(session, loader, ending, saving), session.pauses
    if ending is not None or saving is not None:
        loader.pauses.used = True


def _ending(session: Session) -> Callable[[], None]:
    """The function that ends the run between two batches after a signal.

    Raises:
        NotOffered: called outside the main thread, the only one that can handle signals.
    """
    from accel_plugins.checkpoint.boundaries import Preemption
    from accel_torch.saving import save_state, wait

    if session.preemption is None:
        if threading.current_thread() is not threading.main_thread():
            raise NotOffered(
                "Cannot handle signals for ProjectConfiguration(save_on_signal=True).",
                "Only the main thread of Python can handle signals, and this is another thread.",
                "Prepare loaders in the main thread.",
            )

        def save() -> None:
            save_state(session, None, True)
            wait(session)

        session.preemption = Preemption(session.process, save, session.options.project.deadline)
    return _boundary(session, session.preemption)


def _boundary(session: Session, preemption: Preemption) -> Callable[[], None]:
    """The function to call between two batches; waits for the end of a window if partial gradients cannot be saved."""
    gradient = session.gradient
    if session.strategy.capabilities.partial_gradients:
        return preemption.between_batches

    def between_windows() -> None:
        if gradient.sync_gradients:
            preemption.between_batches()

    return between_windows


def _saving(session: Session) -> Callable[[], None]:
    """The function that saves a checkpoint between two steps if one is due."""
    from accel_plugins.checkpoint.boundaries import ContinuousSaver, SavePace
    from accel_torch.saving import save_state

    project = session.options.project
    policy = project.save_policy
    assert policy is not None
    if session.continuous is None:
        # A weak reference: the saver's thread must not keep the Accelerator alive.
        owner = weakref.ref(session)
        strategy = session.strategy
        behind = strategy.capabilities.async_save or not strategy.capabilities.collective_save

        def save() -> None:
            if (session := owner()) is not None:
                save_state(session, None, True, async_save=behind)

        def busy() -> bool:
            session = owner()
            return session is not None and session.saver is not None and session.saver.busy

        pace = SavePace(policy.max_overhead)
        session.continuous = ContinuousSaver(session.process, save, busy, pace, project.deadline)
    return session.continuous.between_steps
