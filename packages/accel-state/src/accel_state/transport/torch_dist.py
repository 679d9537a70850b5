"""The transport over torch.distributed, on its own process groups.

Separate groups isolate our collectives from those of DistributedDataParallel and of the user: a mismatch between them
can only wait, and never mixes data. They use the backends of the default group. Headers are always CPU tensors, sent
over the CPU backend of the default group or over a second group with gloo.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from accel_state.transport.base import DONE, ForkedTransport, Reduction, Transport, Work
from accel_state.transport.shutdown import keep_garbage_at_forks, shutdown_at_exit

__all__ = (
    "MessageWork",
    "TorchDistTransport",
    "broadcast_to_other",
    "close_connections",
)

_REDUCTIONS: Final = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}

_MAX_RANKS_FOR_DIRECT_HEADERS: Final = 8
"""In groups of so many processes over gloo, and more than two, each sends its header to every other one by itself."""

_ADDRESS_BYTES: Final = 512
"""More than the longest host name with a port."""

_all_gather: Final[Callable[..., Any]] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch 2.13 renamed it and warns about the old name; earlier releases have the old name only."""


class TorchDistTransport(Transport):
    """Collectives over a process group that this class creates; torch.distributed must be initialised.

    Args:
        device: device of the tensors of this process.
        timeout: how long a collective may take before it fails.
        store: the store with which the default group was created.
        owner: whether the default group was created for this transport, which then ends it.
    """

    def __init__(
        self, device: torch.device, timeout: timedelta, store: Any | None = None, *, owner: bool = False
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.timeout = timeout
        backends = _backends_of()
        host = backends.get("cpu", dist.Backend.GLOO)
        self._header = dist.new_group(timeout=timeout, backend=None if "cpu" in backends else host)
        over_header = "cpu" in backends or device.type not in backends
        self._data = self._header if over_header else dist.new_group(timeout=timeout)
        # Each transport has its own keys, so that a new state never reads messages of an earlier one.
        self.scope = f"transport{self._data.group_name}"
        self._store = None
        # torch 2.9 has `Backend.FAKE` only after the fake backend was registered.
        if host != "fake":
            # A fake group has no other processes, and its store may be empty.
            shared = self._host_store() if store is None else store
            self._store = dist.distributed_c10d.PrefixStore(self.scope, shared)
        self._over_gloo = host == dist.Backend.GLOO
        self._owner = owner
        self._groups: dict[str, Transport] = {}
        shutdown_at_exit(self)
        keep_garbage_at_forks()

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, header: bool = False) -> Work:
        group = self._header if header else self._data
        if header and self._over_gloo and 2 < self.world_size <= _MAX_RANKS_FOR_DIRECT_HEADERS:
            # Gathering passes messages on around a ring, so that each process waits several times.
            to_each = tensor.view(-1).repeat(self.world_size)
            return _started(dist.all_to_all_single(output, to_each, group=group, async_op=True))
        if tensor.is_cpu and not self._over_gloo:
            # Each CPU backend can gather into a list; MPI supports nothing else.
            rows = list(output.view(self.world_size, -1))
            work = dist.all_gather(rows, tensor.view(-1), group=group, async_op=True)
            # Ranks that are threads wait inside the call, and cannot wait for its result.
            return DONE if work.is_completed() else _started(work)
        return _started(_all_gather(output, tensor, group=group, async_op=True))

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum", into: torch.Tensor | None = None) -> Work:
        target = tensor if into is None else into.copy_(tensor)
        return _started(dist.all_reduce(target, op=_REDUCTIONS[op], group=self._data, async_op=True))

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        if self._over_gloo and self.world_size == 2 and tensor.is_cpu:
            return broadcast_to_other(tensor, src, self._header)
        return _started(dist.broadcast(tensor, group_src=src, group=self._data, async_op=True))

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Work:
        parts = None if inputs is None else list(inputs)
        return _started(dist.scatter(output, parts, group_src=src, group=self._data, async_op=True))

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int) -> Work:
        rows = None if outputs is None else list(outputs)
        return _started(dist.gather(tensor, rows, group_dst=dst, group=self._data, async_op=True))

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        work = dist.all_to_all_single(output, tensor, group=self._data, async_op=True)
        return DONE if work.is_completed() else _started(work)

    def barrier(self) -> None:
        dist.barrier(group=self._header)

    def abort(self) -> None:
        """Close the connections over gloo; `abort` of torch's group does not close them."""
        if not self._over_gloo:
            return
        for group in {self._header, self._data}:
            if group is self._header or dist.get_backend(group) == dist.Backend.GLOO:
                close_connections(group)

    def store(self) -> Any | None:
        return self._store

    def subgroup(self, group: Any, label: str, meet: Callable[[], None]) -> Transport:
        name = str(group.group_name)
        if name not in self._groups:
            meet()
            self._groups[name] = _GroupTransport(self, group, label)
        return self._groups[name]

    def shutdown(self) -> None:
        """End the groups over gloo; their threads end too if nothing else refers to the group."""
        groups = {self._data, self._header}
        self._groups.clear()
        del self._data, self._header
        if self._owner and dist.is_initialized():
            groups.add(dist.group.WORLD)
        while groups:
            _end_host_group(groups.pop())

    def _host_store(self) -> Any:
        """A store on rank 0, for groups without one, such as those of MPI."""
        host, hosted, address = socket.gethostname(), None, bytearray(_ADDRESS_BYTES)
        if self.rank == 0:
            hosted = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            text = f"{hosted.port} {host}".encode()
            address[: len(text)] = text
        # As a tensor: the objects of torch.distributed are pickles without a signature.
        sent = torch.frombuffer(address, dtype=torch.uint8)
        dist.broadcast(sent, src=0, group=self._header)
        port, _, host = bytes(address).rstrip(b"\0").decode().partition(" ")
        return hosted or dist.TCPStore(host, int(port), is_master=False)  # type: ignore[attr-defined]

    def in_child(self) -> Transport:
        return ForkedTransport(self.rank, self.world_size, self.device)


class _GroupTransport(TorchDistTransport):
    """Collectives between the processes of a torch process group.

    CPU tensors are sent over separate connections if the run uses gloo, else over the given group. Tensors on other
    devices are sent over the given group, after the header.

    Args:
        world: the transport between all processes.
        group: the process group; this process is one of its ranks.
        label: its name in messages.
    """

    def __init__(self, world: TorchDistTransport, group: Any, label: str) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank, self.world_size = group.rank(), group.size()
        self.group = label
        self.device, self.timeout = world.device, world.timeout
        self._store, self.scope, self._owner = world._store, world.scope, False
        self._groups = {}
        self._over_gloo = world._over_gloo
        self._header = _gloo_group(group, world._store, world.timeout) if self._over_gloo else group
        backends = _backends_of(group)
        self._data = group if self.device.type != "cpu" and self.device.type in backends else self._header

    def subgroup(self, group: Any, label: str, meet: Callable[[], None]) -> Transport:
        raise TypeError("Only the transport between all processes can create transports of groups.")

    def shutdown(self) -> None:
        """End the connections of this group, to which nothing else refers."""
        del self._data, self._header


def _gloo_group(group: Any, store: Any, timeout: timedelta) -> Any:
    """Create a group over gloo with the processes of another group.

    All processes of the run would have to call `new_group`. Otherwise it derives the group's name from the number of
    groups in the process, which may differ between processes.
    """
    # A separate connection: a thread occupies the connection while it waits for the other processes, and two threads
    # that connect groups in different orders would wait for each other.
    scope = dist.distributed_c10d.PrefixStore(f"group/{group.group_name}", store.clone())
    process_group = dist.ProcessGroup(scope, group.rank(), group.size())
    backend = dist.ProcessGroupGloo(scope, group.rank(), group.size(), timeout)
    process_group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return process_group


def _backends_of(group: Any = None) -> dict[str, str]:
    """The backend of a group, by default of the default group, for each type of device: {"cpu": "gloo"}."""
    pairs: Any = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return dict(pairs)


def _end_host_group(group: Any) -> None:
    try:
        if dist.get_backend(group) == dist.Backend.GLOO:
            dist.destroy_process_group(group)
    except ValueError:
        # The script has already ended it.
        return


def _started(work: Any) -> Work:
    started: Work = work
    return started


# ---------------------------------------------------------------------- messages over gloo

# gloo broadcasts a large tensor to one process in 1.2 times the time of a message, and with the header of a call it
# would take longer than a broadcast without checks.

_NEVER_SENT_TAG: Final = 1
"""Tag of a message that no process sends; all others have the tag 0."""

_IMMEDIATE_TIMEOUT: Final = timedelta(milliseconds=1)


class MessageWork:
    """A message that was started; `wait` also raises the error of the start.

    Args:
        operation: starts the message and returns its work: `send` or `recv` of a process group.
        tensor: what it sends or receives.
        other: rank of the other process.
    """

    __slots__ = ("_ended", "_error", "_work")

    def __init__(self, operation: Any, tensor: torch.Tensor, other: int) -> None:
        self._ended = False
        self._error: RuntimeError | None = None
        try:
            self._work = operation([tensor], other, 0)
        except RuntimeError as error:
            self._error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is complete.

        Ignores a `timeout` shorter than the group's: gloo would close the connections after it.
        """
        if not self._ended:
            self._ended = True
            try:
                if self._error is None:
                    self._work.wait()
            except RuntimeError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether `wait` has completed it."""
        return self._ended


def broadcast_to_other(tensor: torch.Tensor, src: int, group: Any) -> MessageWork:
    """Overwrite `tensor` with that of process `src`, between two processes."""
    sends = group.rank() == src
    return MessageWork(group.send if sends else group.recv, tensor, 1 - group.rank())


def close_connections(group: Any) -> None:
    """Close the connections of this process: gloo does so when a message does not arrive in time."""
    other = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8)], other, _NEVER_SENT_TAG).wait(_IMMEDIATE_TIMEOUT)
