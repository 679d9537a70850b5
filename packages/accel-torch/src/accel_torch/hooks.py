"""Hooks of a session: what is called when it prepares, steps and saves, and nothing otherwise.

A check enters its hook when it has something to do and leaves when it is done. So a step costs nothing for a check that
is not there, and no object has to wrap or replace another one's methods.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from accel_plugins.wrapped.step_hooks import StepHooks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.amp import GradScaler
    from torch.nn import Module
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_torch.options import Options

Folder = str | os.PathLike[str]

__all__ = ("PROCESS_HOOKS", "Hook", "Hooks")


class Hook:
    """Something that follows a session. Subclasses define the methods of the events that they want.

    A session calls only what a subclass defines, so a method that is not defined costs nothing. `session` is an
    `accel_torch.session.Session`.

    Example:
        >>> class CountSteps(Hook):
        ...     steps = 0
        ...
        ...     def after_step(self, optimizer, stepped):
        ...         self.steps += 1
        >>> counter = CountSteps()
        >>> accelerator.session.hooks.enter(counter)
        >>> accelerator.session.hooks.leave(counter)
    """

    # ------------------------------------------------------------------ the start of a session

    def configure(self, options: Options) -> Options:
        """Called with the arguments of each new Accelerator before it joins a run; returns the arguments to use."""
        return options

    def start_process(self) -> None:
        """Called when this process is in its group, before other objects refer to its transport."""

    def start(self, session: Any) -> None:
        """Called with each new session, before it prepares anything."""

    # ------------------------------------------------------------------ preparing

    def before_prepare(self, session: Any, bundle: Bundle) -> None:
        """Called with the objects of a `prepare` call, before any is changed."""

    def after_prepare(self, session: Any, bundle: Bundle) -> None:
        """Called with the prepared objects, in the same order."""

    def loader_prepared(self, session: Any, loader: Any) -> None:
        """Called with each prepared loader, before it is read."""

    # ------------------------------------------------------------------ steps

    def begin_micro_batch(self, models: Sequence[Module]) -> None:
        """Called with the arguments of `accumulate`, when it is known whether gradients are synchronised."""

    def before_backward(self, loss: Tensor) -> None:
        """Called before each backward pass with the loss of the script, not yet divided."""

    def after_backward(self, loss: Tensor) -> None:
        """Called after each backward pass, also one that failed."""

    def before_clip(self, session: Any) -> None:
        """Called before gradients are scaled down to a norm."""

    def after_clip(self, norm: Tensor | float | None) -> None:
        """Called with the norm before scaling, or None if the backend does not compute it."""

    def before_gradients_complete(self) -> None:
        """Called before gradients are completed over the processes, for clipping or for a step."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before each step of a prepared optimizer, with the optimizer of the script."""

    def judge_step(self, optimizer: Optimizer) -> bool:
        """Called with complete gradients before each step, with the optimizer of the script; False leaves it out.

        In a step with a closure it is called after the first call of the closure.
        """
        return True

    def after_step(self, optimizer: Optimizer, stepped: Any) -> None:
        """Called after each step, unless it raised an error.

        Args:
            optimizer: the optimizer of the script.
            stepped: False if the step was skipped. Reading it may wait for the device.
        """

    # ------------------------------------------------------------------ what a script changes

    def scaler_assigned(self, scaler: GradScaler | None) -> None:
        """Called when a script has assigned another gradient scaler."""

    def replicas_separate(self) -> None:
        """Called when processes begin to train their replicas independently, as `LocalSGD` does."""

    # ------------------------------------------------------------------ saving, and between batches

    def folder_to_save(self, session: Any, output_dir: Folder | None) -> Folder | None:
        """Called with the folder that a script gives to `save_state`; returns the folder to use.

        With automatic naming of checkpoints, neither of them is used.
        """
        return output_dir

    def folder_to_load(self, session: Any, input_dir: Folder | None, missing_ok: bool) -> Folder | None:
        """Called with the folder or URL that a script gives to `load_state`; returns the one to use.

        `missing_ok` says whether there may be no checkpoint yet.
        """
        return input_dir

    def before_save(self) -> None:
        """Called before this process saves, or waits for a checkpoint."""

    def after_save(self) -> None:
        """Called after it, also if it failed."""

    def keep_state(self) -> Callable[[], None]:
        """Called when a snapshot of the run is taken in host memory; returns a function that puts this hook's state
        back."""
        return _nothing

    def before_boundary(self, loader: Any, first: bool) -> None:
        """Called between two batches of a prepared loader, before what the session does there.

        It is called while `session.pauses.used` is true.

        Args:
            loader: the prepared loader.
            first: whether it is before the first batch of the epoch.
        """

    def after_boundary(self, loader: Any, first: bool) -> None:
        """Called between two batches, after what the session does there."""


class Hooks(StepHooks):
    """The hooks of a session, by event: the methods to call, in the order in which the hooks were entered.

    A tuple is replaced and never changed, so that a hook may leave while it is called.
    """

    before_prepare: tuple[Callable[[Any, Bundle], None], ...] = ()
    after_prepare: tuple[Callable[[Any, Bundle], None], ...] = ()
    loader_prepared: tuple[Callable[[Any, Any], None], ...] = ()
    begin_micro_batch: tuple[Callable[[Sequence[Module]], None], ...] = ()
    before_backward: tuple[Callable[[Tensor], None], ...] = ()
    after_backward: tuple[Callable[[Tensor], None], ...] = ()
    before_clip: tuple[Callable[[Any], None], ...] = ()
    after_clip: tuple[Callable[[Any], None], ...] = ()
    scaler_assigned: tuple[Callable[[GradScaler | None], None], ...] = ()
    replicas_separate: tuple[Callable[[], None], ...] = ()
    folder_to_save: tuple[Callable[[Any, Folder | None], Folder | None], ...] = ()
    folder_to_load: tuple[Callable[[Any, Folder | None, bool], Folder | None], ...] = ()
    before_save: tuple[Callable[[], None], ...] = ()
    after_save: tuple[Callable[[], None], ...] = ()
    keep_state: tuple[Callable[[], Callable[[], None]], ...] = ()
    before_boundary: tuple[Callable[[Any, bool], None], ...] = ()
    after_boundary: tuple[Callable[[Any, bool], None], ...] = ()

    def enter(self, hook: Hook) -> None:
        """Call the methods that the class of a hook defines from now on."""
        for event in _EVENTS:
            if getattr(type(hook), event) is not getattr(Hook, event):
                setattr(self, event, (*getattr(self, event), getattr(hook, event)))

    def leave(self, hook: Hook) -> None:
        """Call a hook no more; no effect if it has not entered."""
        for event in _EVENTS:
            kept = tuple(method for method in getattr(self, event) if method != getattr(hook, event))
            setattr(self, event, kept)


def _nothing() -> None:
    """Put nothing back."""


_EVENTS: Final = (*StepHooks.__annotations__, *Hooks.__annotations__)
"""The events of a session after its start, which calls the first three methods of each hook itself."""

PROCESS_HOOKS: Final[list[Hook]] = []
"""Hooks that every later session of this process enters: those of the commands that run unchanged scripts."""
