"""The one slot of the process: who it is, which run it takes part in, and the gradient state made last.

`PartialState`, `AcceleratorState` and `GradientState` are views of this slot. What lies in it is immutable; a change
puts a new object there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_state.errors import NotReady
from accel_state.labels import DistributedType

if TYPE_CHECKING:
    import torch

    from accel_state.devices.base import DeviceFamily
    from accel_state.gradient import GradientState
    from accel_state.topology import Topology
    from accel_state.transport.base import Transport

__all__ = (
    "Process",
    "Run",
    "clear",
    "gradient",
    "on_clear",
    "process",
    "process_or_none",
    "process_or_start",
    "replace_process",
    "run",
    "run_or_none",
    "set_gradient",
    "set_process",
    "set_run",
)


@dataclass(frozen=True)
class Process:
    """Who this process is; made once, when the first state or Accelerator is created.

    Args:
        topology: its place among the processes.
        device: where it works.
        family: the family of that device.
        transport: how it reaches the other processes.
        distributed_type: the label of the device family when there are several processes, else NO.
        backend: name of the torch.distributed backend, or None when it runs alone.
        debug: whether more is told about collectives.
        fork_launched: whether a notebook forked it.
        options: what was asked for by argument when it was made.
    """

    topology: Topology
    device: torch.device
    family: DeviceFamily
    transport: Transport
    distributed_type: DistributedType
    backend: str | None = None
    debug: bool = False
    fork_launched: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Index among all processes."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """Number of all processes."""
        return self.transport.world_size


@dataclass(frozen=True)
class Run:
    """What the processes do together: precision, strategy, mesh; made by the first Accelerator and shared by the next.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        distributed_type: what users read; the strategy's label, else that of the process.
        strategy: the object that owns the run; opaque to this layer.
        given: options that were given by argument, by name; a second Accelerator must not contradict them.
        mesh: the device mesh, or None.
    """

    mixed_precision: str
    distributed_type: DistributedType
    strategy: Any = None
    given: Mapping[str, Any] = field(default_factory=dict)
    mesh: Any = None


class _Slot:
    __slots__ = ("clearing", "gradient", "process", "run")

    def __init__(self) -> None:
        self.process: Process | None = None
        self.run: Run | None = None
        self.gradient: GradientState | None = None
        self.clearing: list[Callable[[], None]] = []


_slot = _Slot()


def process() -> Process:
    """The process.

    Raises:
        NotReady: no state was made yet.
    """
    if _slot.process is None:
        raise NotReady(
            "The state of this process was asked for.",
            "None was made yet.",
            "Create a PartialState() or an Accelerator() first.",
        )
    return _slot.process


def process_or_none() -> Process | None:
    """The process, or None when no state was made yet."""
    return _slot.process


def process_or_start() -> Process:
    """The process; made from the environment when no state was made yet."""
    if _slot.process is None:
        from accel_state.process import start_process

        _slot.process = start_process()
    return _slot.process


def set_process(process: Process | None) -> None:
    """Put a process into the slot."""
    _slot.process = process


@contextmanager
def replace_process(process: Process) -> Iterator[Process]:
    """Put another process into the slot for a while, for example one whose transport records what it is asked."""
    before, _slot.process = _slot.process, process
    try:
        yield process
    finally:
        _slot.process = before


def run() -> Run:
    """The run.

    Raises:
        NotReady: no Accelerator was made yet.
    """
    if _slot.run is None:
        raise NotReady("The state of the run was asked for.", "None was made yet.", "Create an Accelerator() first.")
    return _slot.run


def run_or_none() -> Run | None:
    """The run, or None when no Accelerator was made yet."""
    return _slot.run


def set_run(run: Run | None) -> None:
    """Put a run into the slot."""
    _slot.run = run


def gradient() -> GradientState | None:
    """The gradient state made last, or None."""
    return _slot.gradient


def set_gradient(gradient: GradientState | None) -> None:
    """Put a gradient state into the slot."""
    _slot.gradient = gradient


def on_clear(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the slot is cleared; for what other layers keep for the life of a process."""
    _slot.clearing.append(callback)


def clear() -> None:
    """Empty the slot: the next state is made from the environment again. The process group stays as it is."""
    callbacks, _slot.clearing = _slot.clearing, []
    for callback in callbacks:
        callback()
    _slot.process = _slot.run = _slot.gradient = None
