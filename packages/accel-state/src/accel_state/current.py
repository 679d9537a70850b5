"""The state of this process, in one slot: its `Process`, its `Run`, and the newest gradient state.

`PartialState`, `AcceleratorState` and `GradientState` are views of this slot. `Process` and `Run` are immutable; a
change puts a new object into the slot.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accel_state.errors import NoState, NotReady
from accel_state.identity import Process, Run
from accel_state.settings.environ import publish
from accel_state.topology import Topology, read_topology

__all__ = (
    "Process",
    "Run",
    "SharedState",
    "StateContent",
    "clear",
    "end_run",
    "gradient",
    "on_clear",
    "on_run_end",
    "process",
    "process_or_none",
    "process_or_start",
    "publish_for_run",
    "replace_process",
    "require_run",
    "run_or_none",
    "set_gradient",
    "set_process",
    "set_run",
    "slot_per_thread",
)


class _Slot:
    def __init__(self) -> None:
        self.process: Process | None = None
        self.run: Run | None = None
        self.gradient: Any = None
        self.clearing: list[Callable[[], None]] = []
        self.ending: list[Callable[[], None]] = []


_slot = _Slot()


class _SlotOfThread(_Slot, threading.local):
    """A slot for each thread."""


@contextmanager
def slot_per_thread() -> Iterator[None]:
    """Use a separate slot for each thread inside the block, for `accel_testing.threads`."""
    global _slot
    before, _slot = _slot, _SlotOfThread()
    try:
        yield
    finally:
        _slot = before


def process() -> Process:
    """The `Process` in the slot.

    Raises:
        NoState: there is no state yet.
    """
    if _slot.process is None:
        raise NoState(
            "Cannot read the state of this process.",
            "It was not created yet, or it was reset.",
            "Create a PartialState() or an Accelerator() first.",
        )
    return _checked(_slot.process)


def process_or_none() -> Process | None:
    """The process, or None when there is no state yet."""
    return None if _slot.process is None else _checked(_slot.process)


def process_or_start() -> Process:
    """The process; created from the environment when there is no state yet.

    Raises:
        NotReady: the state was created before this process was forked, and a launcher has assigned it another rank.
    """
    if _slot.process is None:
        from accel_state.start import start_process

        _slot.process = start_process()
    return _checked(_slot.process)


def _checked(process: Process) -> Process:
    """The process, unless it describes the parent and a launcher has assigned another rank since the fork."""
    launched = read_topology() if process.inherited else Topology()
    if launched.distributed and launched.variables() != process.topology.variables():
        raise NotReady(
            "Cannot use the state of this process.",
            f"Rank {process.rank} of {process.world_size} created it before this process was forked. Since then the "
            f"launcher has assigned rank {launched.rank} of {launched.world_size} to this process.",
            "Restart the notebook or script, and create the first state or Accelerator in the function that is "
            "launched.",
        )
    return process


_parents: list[Process | None] = []


def _after_fork() -> None:
    """In a forked child, mark the process as inherited and replace the parent's connections."""
    _parents.append(_slot.process)
    if _slot.process is not None:
        transport = _slot.process.transport.in_child()
        _slot.process = _slot.process._replace(transport=transport, inherited=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def set_process(process: Process | None) -> None:
    """Put a process into the slot."""
    _slot.process = process


@contextmanager
def replace_process(process: Process) -> Iterator[Process]:
    """Put another process into the slot inside the block, for example one with a transport that records its calls."""
    before, _slot.process = _slot.process, process
    try:
        yield process
    finally:
        _slot.process = before


def require_run() -> Run:
    """The `Run` in the slot.

    Raises:
        NoState: there is no Accelerator yet.
    """
    if _slot.run is None:
        raise NoState(
            "Cannot read the state of the run.",
            "It was not created yet, or it was reset.",
            "Create an Accelerator() first.",
        )
    return _slot.run


def run_or_none() -> Run | None:
    """The run, or None when there is no Accelerator yet."""
    return _slot.run


def set_run(run: Run | None) -> None:
    """Put a run into the slot."""
    _slot.run = run


def gradient() -> Any:
    """The newest `GradientState`, or None; opaque here, because its module imports this one."""
    return _slot.gradient


def on_run_end(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the run ends, for example to close what the run opened."""
    _slot.ending.append(callback)


def publish_for_run(variables: Mapping[str, str]) -> None:
    """Write variables into the environment for libraries that read them there, until the run ends."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    publish(variables)
    on_run_end(lambda: publish(before, remove=variables))


def end_run() -> None:
    """Call the callbacks of `on_run_end`, and remove the run from the slot."""
    callbacks, _slot.ending = _slot.ending, []
    for callback in callbacks:
        callback()
    _slot.run = None


def set_gradient(gradient: Any) -> None:
    """Put a gradient state into the slot."""
    _slot.gradient = gradient


def on_clear(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the slot is cleared, for example to reset a cache of another layer."""
    _slot.clearing.append(callback)


def clear() -> None:
    """Empty the slot. The next state is created from the environment again; the process group stays open."""
    end_run()
    callbacks, _slot.clearing = _slot.clearing, []
    for callback in callbacks:
        callback()
    _slot.process = _slot.run = _slot.gradient = None


class StateContent(dict[str, Any]):
    """The content of a state at one moment; assignments to items do not change the state.

    Args:
        values: the content.
        reset: ends the state.
    """

    def __init__(self, values: Mapping[str, Any], reset: Callable[[], None]) -> None:
        super().__init__(values)
        self._reset = reset

    def clear(self) -> None:
        """End the state, so that the next one can be created with other arguments."""
        self._reset()
        super().clear()


class SharedState:
    """Class attribute that returns the content of a state; empty until the state is created, and after its reset.

    Args:
        read: returns the content.
        reset: ends the state.

    Example:
        >>> values = {"device": "cpu"}
        >>> class View:
        ...     _shared_state = SharedState(lambda: values, values.clear)
        >>> View._shared_state
        {'device': 'cpu'}
        >>> View._shared_state.clear()
        >>> View._shared_state
        {}
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]], reset: Callable[[], None]) -> None:
        self._read = read
        self._reset = reset

    def __get__(self, instance: object, owner: type | None = None) -> StateContent:
        return StateContent(self._read(), self._reset)
