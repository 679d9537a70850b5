"""The transport over torch.distributed, on process groups of our own.

Own groups keep our collectives apart from those of DistributedDataParallel and of the user: ours against theirs can
then only wait, never mix. They have the backends of the default group. Headers always travel between
CPU tensors: over the CPU backend of the default group, or over a second group with gloo. Tensors over gloo take the way
that costs the processor least: one all_to_all for small ones, point-to-point messages for large ones.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from accel_state.transport.base import DONE, ForkedTransport, Reduction, Transport, Work
from accel_state.transport.control import ControlStore
from accel_state.transport.gloo import (
    ALL_TO_ALL_LIMIT,
    AllGatherByAllToAll,
    all_gather_p2p,
    all_reduce_p2p,
    broadcast_p2p,
    scatter_p2p,
)
from accel_state.transport.shutdown import keep_garbage_at_forks, shutdown_at_exit

__all__ = ("TorchDistTransport",)

_REDUCTIONS: Final = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}

_all_gather: Final[Callable[..., Any]] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch 2.13 renamed it and warns about the old name; earlier releases have the old name only."""


class TorchDistTransport(Transport):
    """Collectives over a process group made for us; torch.distributed must be initialised.

    Args:
        device: of the tensors of this process.
        timeout: how long a collective may take before it fails.
        store: the store the process group was made from.
        owner: whether the default group was made for this transport, which then ends it.
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
        # Each transport has its own keys, so that nobody reads messages from before a state was made anew.
        self._scope = f"transport{self._data.group_name}"
        self._store = None
        # Torch has `Backend.FAKE` once the fake backend is registered, and torch 2.9 has it not before.
        if host != "fake":
            # A fake group has no other processes, and its store may be empty.
            shared = self._host_store() if store is None else store
            self._store = dist.distributed_c10d.PrefixStore(self._scope, shared)
        self._small = AllGatherByAllToAll(self._header) if host == dist.Backend.GLOO else None
        self._owner = owner
        self._groups: dict[str, Transport] = {}
        shutdown_at_exit(self)
        keep_garbage_at_forks()

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, header: bool = False) -> Work:
        group = self._header if header else self._data
        if self._small is not None and self._over_gloo(tensor, group):
            if tensor.nbytes * self.world_size > ALL_TO_ALL_LIMIT:
                return all_gather_p2p(output, tensor, group)
            return _started(self._small.all_gather(output, tensor))
        if tensor.is_cpu:
            # Each CPU backend can gather into a list; MPI offers nothing else.
            rows = list(output.view(self.world_size, -1))
            work = dist.all_gather(rows, tensor.view(-1), group=group, async_op=True)
            # Ranks that are threads wait inside of the call, and cannot wait for its result.
            return DONE if work.is_completed() else _started(work)
        return _started(_all_gather(output, tensor, group=group, async_op=True))

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum", into: torch.Tensor | None = None) -> Work:
        if self._is_pair(tensor):
            return all_reduce_p2p(tensor, op, tensor if into is None else into, self._data)
        target = tensor if into is None else into.copy_(tensor)
        return _started(dist.all_reduce(target, op=_REDUCTIONS[op], group=self._data, async_op=True))

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        if self._is_pair(tensor):
            return broadcast_p2p(tensor, src, self._data)
        return _started(dist.broadcast(tensor, group_src=src, group=self._data, async_op=True))

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Work:
        given = None if inputs is None else list(inputs)
        if self._over_gloo(output, self._data):
            return scatter_p2p(output, given, src, self._data)
        return _started(dist.scatter(output, given, group_src=src, group=self._data, async_op=True))

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int) -> Work:
        taken = None if outputs is None else list(outputs)
        return _started(dist.gather(tensor, taken, group_dst=dst, group=self._data, async_op=True))

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        work = dist.all_to_all_single(output, tensor, group=self._data, async_op=True)
        return DONE if work.is_completed() else _started(work)

    def barrier(self) -> None:
        dist.barrier(group=self._header)

    def store(self) -> Any | None:
        return self._store

    def control(self) -> ControlStore | None:
        return None if self._store is None else ControlStore(self._store, self.rank, self._scope)

    def subgroup(self, group: Any, label: str, meet: Callable[[], None]) -> Transport:
        name = str(group.group_name)
        if name not in self._groups:
            meet()
            self._groups[name] = _GroupTransport(self, group, label)
        return self._groups[name]

    def shutdown(self) -> None:
        """End the groups over gloo; their threads end with them when nothing else refers to the group."""
        groups = {self._data, self._header}
        self._groups.clear()
        del self._data, self._header, self._small
        if self._owner and dist.is_initialized():
            groups.add(dist.group.WORLD)
        while groups:
            _end_host_group(groups.pop())

    def _over_gloo(self, tensor: torch.Tensor, group: Any) -> bool:
        return self._small is not None and group is self._header and tensor.is_cpu

    def _host_store(self) -> Any:
        """A store on rank 0, for groups without one, such as those of MPI."""
        host, hosted, address = socket.gethostname(), None, [("", 0)]
        if self.rank == 0:
            hosted = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            address = [(host, hosted.port)]
        dist.broadcast_object_list(address, src=0, group=self._header)
        return hosted or dist.TCPStore(*address[0], is_master=False)  # type: ignore[attr-defined]

    def _is_pair(self, tensor: torch.Tensor) -> bool:
        return self.world_size == 2 and self._over_gloo(tensor, self._data)

    def in_child(self) -> Transport:
        return ForkedTransport(self.rank, self.world_size, self.device)


class _GroupTransport(TorchDistTransport):
    """Collectives between the processes of a process group of torch.

    What is on the CPU travels over connections of our own where the run uses gloo, else over the given group; what is
    on other devices travels over the given group, after the header.

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
        self._store, self._scope, self._owner = world._store, world._scope, False
        self._groups = {}
        over_gloo = world._small is not None
        self._header = _gloo_group(group, world._store, world.timeout) if over_gloo else group
        backends = _backends_of(group)
        self._data = group if self.device.type != "cpu" and self.device.type in backends else self._header
        self._small = AllGatherByAllToAll(self._header) if over_gloo else None

    def subgroup(self, group: Any, label: str, meet: Callable[[], None]) -> Transport:
        raise TypeError("The transport between all processes makes those between some of them.")

    def shutdown(self) -> None:
        """End the connections of this group; nothing else refers to them."""
        del self._data, self._header, self._small


def _gloo_group(group: Any, store: Any, timeout: timedelta) -> Any:
    """A group over gloo of the processes of another.

    `new_group` would have to be called by all processes of the run, or names the group after the number of groups that
    a process knows, which may differ.
    """
    # A connection of its own: one that waits for the other processes holds the connection, and two threads that connect
    # groups in different orders would wait for each other.
    scope = dist.distributed_c10d.PrefixStore(f"group/{group.group_name}", store.clone())
    made = dist.ProcessGroup(scope, group.rank(), group.size())
    backend = dist.ProcessGroupGloo(scope, group.rank(), group.size(), timeout)
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return made


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
