"""`PartialState`: the rank and device of this process, and what runs on which rank."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from accel_state import current
from accel_state.console import install_tracebacks
from accel_state.creation import run_creation_hooks
from accel_state.current import Process, SharedState
from accel_state.devices.select import best_family, family_of
from accel_state.errors import Conflict, NoState, ShapeMismatch, UnknownKind
from accel_state.labels import DistributedType
from accel_state.start import start_process
from accel_state.watch.record import STATUS_FOLDER

__all__ = ("PartialState", "do_nothing", "split_inputs", "wait_for_everyone")

F = TypeVar("F", bound=Callable[..., Any])


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a decorated function on the processes that do not run it."""


def wait_for_everyone() -> None:
    """Wait until every process has called this.

    Raises:
        ShapeMismatch: on every process, when one of them called another collective.
        CollectiveError: a process died or did not call it before the timeout.
    """
    _wait_for_all(current.process_or_start())


def _wait_for_all(process: Process) -> None:
    if process.transport.world_size > 1:
        from accel_state.protocol.call import barrier

        barrier(process.transport, "wait_for_everyone")


def split_inputs(inputs: Any, count: int, index: int, apply_padding: bool = False) -> Any:
    """The shard of `inputs` for process `index` of `count`.

    Args:
        inputs: a list, tuple (a named tuple becomes a tuple), tensor, data set with a method `select`, or a dict of
            those with equal lengths.
        count: number of processes.
        index: the process.
        apply_padding: repeat the last item until all shards have the same length, so that results can be gathered.

    Raises:
        UnknownKind: `inputs` is of another type.
        ShapeMismatch: the values of a dict have different lengths.
    """
    if count == 1:
        return inputs
    if isinstance(inputs, dict):
        _check_equal_lengths(inputs)
        return {key: split_inputs(value, count, index, apply_padding) for key, value in inputs.items()}
    if hasattr(inputs, "select") and hasattr(inputs, "column_names"):
        return inputs.select(_indices(len(inputs), count, index, apply_padding))
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.tensor(_indices(len(inputs), count, index, apply_padding), dtype=torch.long)]
    if isinstance(inputs, (list, tuple)):
        items = [inputs[position] for position in _indices(len(inputs), count, index, apply_padding)]
        # A shard of a named tuple has fewer items than the class has fields.
        kind = tuple if hasattr(inputs, "_fields") else type(inputs)
        return kind(items)
    raise UnknownKind(
        f"Cannot split an object of type {type(inputs).__name__} between processes.",
        "split_between_processes takes lists, tuples, tensors, and dicts of those.",
        "Convert it to a list first.",
    )


def _indices(length: int, count: int, index: int, padded: bool) -> list[int]:
    """Indices of process `index`; the first `length % count` processes have one more."""
    size, larger = divmod(length, count)
    start = index * size + min(index, larger)
    indices = list(range(start, start + size + (index < larger)))
    if padded and length:
        longest = -(-length // count)
        indices += [length - 1] * (longest - len(indices))
    return indices


def _check_equal_lengths(inputs: dict[Any, Any]) -> None:
    lengths = {key: len(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ShapeMismatch(
            "Cannot split a dict between processes.",
            "Its values have different lengths: " + ", ".join(f"{key}: {n}" for key, n in lengths.items()) + ".",
            "Pass values of equal length.",
        )


def _content() -> dict[str, Any]:
    process = current.process_or_none()
    if process is None:
        return {}
    return {
        "_cpu": bool(process.options.get("cpu")),
        "backend": process.backend,
        "device": process.device,
        "debug": process.debug,
        "distributed_type": process.distributed_type,
        "num_processes": process.world_size,
        "process_index": process.rank,
        "local_process_index": process.topology.local_rank,
        "fork_launched": process.fork_launched,
    }


class PartialState:
    """The rank, world size and device of this process, without a run.

    All instances are views of the same process. The first one connects a launched process with the others.

    Args:
        cpu: use the CPU even if another device is present.
        kwargs: fields of `InitProcessGroupKwargs`.

    Raises:
        Conflict: `cpu=True`, and the process already uses another device.

    Example:
        >>> from accel_state import PartialState
        >>> state = PartialState(cpu=True)
        >>> with state.split_between_processes(["a", "b", "c"]) as mine:
        ...     state.print(len(mine))
    """

    _shared_state = SharedState(_content, current.clear)

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        run_creation_hooks()
        options = {name: value for name, value in kwargs.items() if not name.startswith("_")}
        existing = current.process_or_none()
        if existing is None:
            install_tracebacks()
            process = start_process(cpu, **options)
            current.set_process(process)
            if process.world_size > 1 or STATUS_FOLDER in os.environ:
                from accel_state.protocol.state import protocol_state

                # From here on this process publishes its position, and errors can report those of all ranks.
                protocol_state(process.transport)
            if process.world_size > 1:
                from accel_state.uncaught import install_hook

                install_hook()
        elif cpu and existing.family is not family_of("cpu"):
            raise Conflict(
                "Cannot use the CPU in this process.",
                f"Its state already uses the device {existing.device}.",
                "Pass cpu=True to the first state or Accelerator, or launch with --cpu.",
            )

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Explain why a property cannot be read after a reset."""
            attribute = getattr(type(self), name, None)
            kind = type(self).__name__
            if not isinstance(attribute, property):
                raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)
            if self.initialized:
                return attribute.fget(self)
            raise NoState(
                f"`{kind}` object has no attribute {name!r}. This happens if `{kind}._reset_state()` was called.",
                "It has not been created again since then.",
                f"Create a {kind}() or an Accelerator() first.",
            )

    @property
    def _process(self) -> Process:
        return current.process()

    @property
    def initialized(self) -> bool:
        """Whether there is a state; False after `destroy_process_group` or a reset."""
        return current.process_or_none() is not None

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._process.device

    @property
    def default_device(self) -> torch.device:
        """The first device of the best family that is present."""
        return torch.device(best_family().name)

    @property
    def backend(self) -> str | None:
        """Name of the torch.distributed backend; None in a single process."""
        return self._process.backend

    @property
    def distributed_type(self) -> DistributedType:
        """The label of the device family, or NO in a single process."""
        return self._process.distributed_type

    @property
    def num_processes(self) -> int:
        """The world size."""
        return self._process.world_size

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self._process.rank

    @property
    def local_process_index(self) -> int:
        """The local rank of this process."""
        return self._process.topology.local_rank

    @property
    def debug(self) -> bool:
        """Whether collectives report more; an assigned value takes effect at once."""
        return self._process.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        current.set_process(self._process._replace(debug=bool(debug)))

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
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is local rank 0."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this.

        Raises:
            ShapeMismatch: on every process, when one of them called another collective.
            CollectiveError: a process died or did not call it before the timeout.
        """
        _wait_for_all(self._process)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on the main process first; the others run it afterwards."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on the local main process of every node first; the others run it afterwards."""
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
        """The shard of `inputs` for this process; see `accel_state.process.split_inputs`.

        Processes that must read the same samples, such as those of one tensor-parallel group, get the same shard.
        """
        from accel_state.data_shards import data_shard

        yield split_inputs(inputs, *data_shard(self._process), apply_padding)

    def on_main_process(self, function: F | None = None) -> F:
        """Decorator: run the function on the main process only; elsewhere it returns None."""
        only: F = self._only(function, lambda: self.is_main_process)
        return only

    def on_local_main_process(self, function: F | None = None) -> F:
        """Decorator: run the function on the local main process of each node only."""
        only: F = self._only(function, lambda: self.is_local_main_process)
        return only

    def on_last_process(self, function: F | None = None) -> F:
        """Decorator: run the function on the last process only."""
        only: F = self._only(function, lambda: self.is_last_process)
        return only

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Decorator: run the function on the process with this rank only; a single process always runs it."""
        return self._only(function, lambda: not self.use_distributed or self.process_index == process_index)

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: run the function on the processes with this local rank only; a single process always runs it."""
        return self._only(function, lambda: not self.use_distributed or self.local_process_index == local_process_index)

    def _only(self, function: F | None, condition: Callable[[], bool]) -> Any:
        """The function if the condition is true; a decorator when there is no function yet."""
        if function is None:
            return functools.partial(self._only, condition=condition)

        @functools.wraps(function)
        def only_where_it_holds(*args: Any, **kwargs: Any) -> Any:
            return (function if condition() else do_nothing)(*args, **kwargs)

        return only_where_it_holds

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` on the local main process of each node."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201 - this is what it is for

    def set_device(self) -> None:
        """Make the device of this process the current device."""
        self._process.family.device(self.device.index or 0)

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy a process group; by default all groups, and this state."""
        if group is not None:
            dist.destroy_process_group(group)
            return
        current.clear()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

    @staticmethod
    def _reset_state() -> None:
        current.clear()
