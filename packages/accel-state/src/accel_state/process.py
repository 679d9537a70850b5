"""`PartialState`: who this process is, and the order in which the processes of a run do things."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from accel_state import current
from accel_state.current import Process
from accel_state.devices.base import DeviceFamily
from accel_state.devices.select import best_family, family_of
from accel_state.errors import Conflict, SettingError
from accel_state.kwargs import InitProcessGroupKwargs
from accel_state.labels import DistributedType
from accel_state.settings.environ import from_environment, read
from accel_state.settings.run import ProcessSettings
from accel_state.settings.schema import BOOLEAN, Setting
from accel_state.split import split_inputs
from accel_state.topology import Topology, read_topology
from accel_state.transport.select import start_transport

__all__ = ("PartialState", "start_process")

F = TypeVar("F", bound=Callable[..., Any])

_FORKED = Setting("fork_launched", BOOLEAN, False, variable="FORK_LAUNCHED")


def start_process(cpu: bool = False, **options: Any) -> Process:
    """Make the process from the environment, joining the others when it was launched as one of several.

    Args:
        cpu: work on the CPU even if another device is present.
        options: fields of `InitProcessGroupKwargs`.

    Raises:
        SettingError: a variable or an option cannot be used.
        CollectiveError: the processes did not meet.
    """
    settings = from_environment(ProcessSettings, cpu=True if cpu else None)
    group = InitProcessGroupKwargs(**{"backend": None, **options})
    topology = read_topology()
    family = _family(settings)
    device = _device(settings, family, topology)
    timeout: Any = group.timeout
    transport, backend = start_transport(topology, family, device, group.backend, group.init_method, timeout)
    forked = read(_FORKED)
    return Process(
        topology=topology,
        device=device,
        family=family,
        transport=transport,
        distributed_type=family.label if backend is not None else DistributedType.NO,
        backend=backend,
        debug=settings.debug,
        fork_launched=bool(forked and forked.value),
        options={"cpu": cpu, **options},
    )


def _family(settings: ProcessSettings) -> DeviceFamily:
    if settings.cpu:
        return family_of("cpu")
    if settings.device is not None:
        return family_of(settings.device)
    return best_family()


def _device(settings: ProcessSettings, family: DeviceFamily, topology: Topology) -> torch.device:
    if settings.device is not None and not settings.cpu:
        try:
            asked = torch.device(settings.device)
        except RuntimeError as error:
            raise SettingError(
                f"The device {settings.device!r} was asked for.",
                str(error).splitlines()[0],
                "Give a device such as cpu or cuda:0.",
            ) from None
        return family.device(topology.local_rank if asked.index is None else asked.index)
    return family.device(topology.local_rank)


class PartialState:
    """Who this process is, without anything that has to do with training.

    All instances show the same process. The first one joins the other processes of a launched run.

    Args:
        cpu: work on the CPU even if another device is present.
        kwargs: fields of `InitProcessGroupKwargs`.

    Raises:
        Conflict: the process works on another device than `cpu=True` asks for.

    Example:
        >>> from accel_state import PartialState
        >>> state = PartialState(cpu=True)
        >>> with state.split_between_processes(["a", "b", "c"]) as mine:
        ...     state.print(len(mine))
    """

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        options = {name: value for name, value in kwargs.items() if not name.startswith("_")}
        existing = current.process_or_none()
        if existing is None:
            current.set_process(start_process(cpu, **options))
        elif cpu and existing.family is not family_of("cpu"):
            raise Conflict(
                "PartialState(cpu=True) was asked for.",
                f"This process works on {existing.device} already.",
                "Give cpu=True to the first state or Accelerator, or launch with --cpu.",
            )

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @property
    def _process(self) -> Process:
        return current.process()

    @property
    def initialized(self) -> bool:
        """Whether the process is known; False after `destroy_process_group` or a reset."""
        return current.process_or_none() is not None

    @property
    def device(self) -> torch.device:
        """Where this process works."""
        return self._process.device

    @property
    def default_device(self) -> torch.device:
        """The first device of the best family that is present."""
        return torch.device(best_family().name)

    @property
    def backend(self) -> str | None:
        """Name of the torch.distributed backend, or None when the process runs alone."""
        return self._process.backend

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of the run."""
        return self._process.distributed_type

    @property
    def num_processes(self) -> int:
        """Number of all processes."""
        return self._process.world_size

    @property
    def process_index(self) -> int:
        """Index of this process among all."""
        return self._process.rank

    @property
    def local_process_index(self) -> int:
        """Index of this process on its node."""
        return self._process.topology.local_rank

    @property
    def debug(self) -> bool:
        """Whether more is told about collectives."""
        return self._process.debug

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook forked this process."""
        return self._process.fork_launched

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Return when every process has called this."""
        self._process.transport.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let the main process run the block first; the others follow when it has left the block."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let the first process of each node run the block first; the others follow when all of those have left it."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, goes_first: bool) -> Iterator[None]:
        if not goes_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if goes_first:
                self.wait_for_everyone()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """The part of `inputs` for this process; see `accel_state.split.split_inputs`."""
        yield split_inputs(inputs, self.num_processes, self.process_index, apply_padding)

    def on_main_process(self, function: F) -> F:
        """Decorator: run the function on the main process only; elsewhere it returns None."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: F) -> F:
        """Decorator: run the function on the first process of each node only."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: F) -> F:
        """Decorator: run the function on the last process only."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Decorator: run the function on the process with this index only."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only(function, lambda: self.process_index == process_index)

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: run the function on the process with this index on its node only."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only(function, lambda: self.local_process_index == local_process_index)

    def _only(self, function: F, condition: Callable[[], bool]) -> F:
        @functools.wraps(function)
        def only_where_it_holds(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if condition() else None

        wrapped: Any = only_where_it_holds
        return wrapped  # type: ignore[no-any-return]

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` on the first process of each node."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201 - this is what it is for

    def set_device(self) -> None:
        """Make the device of this process the current one of its family."""
        self._process.family.device(self.device.index or 0)

    def destroy_process_group(self, group: Any = None) -> None:
        """End a process group, by default all of them, after which this state is not initialised any more."""
        if group is not None:
            dist.destroy_process_group(group)
            return
        current.clear()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

    @staticmethod
    def _reset_state() -> None:
        current.clear()
