"""Starting the transport of a process: alone, or over torch.distributed."""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accel_state.devices.base import DeviceFamily
from accel_state.errors import CollectiveError
from accel_state.topology import Topology
from accel_state.transport.base import Transport
from accel_state.transport.local import LocalTransport

__all__ = ("backend_of", "place_in_group", "start_transport")


def backend_of(family: DeviceFamily, asked: str | None) -> str:
    """Name of the torch.distributed backend for a device family; `asked` wins where it can move that family's tensors.

    "nccl" is what the interface has as its default, so on another family it means "by device".

    Raises:
        NotOffered: none was asked for and none is known.
    """
    if asked is None or (asked == "nccl" and family.backend != "nccl"):
        return family.distributed_backend()
    return asked


def place_in_group(devices: int) -> Topology | None:
    """The place of this process in the default group of torch.distributed; None before there is one.

    For a process whose launcher left no trace. Ranks are taken to follow each other on each machine.

    Args:
        devices: of this machine. With several, as many processes as these are taken to be on each machine; with one,
            which all share, all of them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_world_size = world_size if devices == 1 else min(devices, world_size)
    node, local = divmod(rank, local_world_size)
    return Topology(rank, world_size, local, local_world_size, node, scheme="process group")


def start_transport(
    topology: Topology,
    family: DeviceFamily,
    device: torch.device,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
) -> tuple[Transport, str | None]:
    """The transport of this process and the name of its torch.distributed backend (None when it runs alone).

    A process group that the script initialised itself is used as it is, whatever its backend.

    Raises:
        SettingError: no address is known at which the processes could meet, or two have the same rank.
        NotOffered: no backend is known that moves the tensors of the device.
        CollectiveError: they did not meet in time, or could not connect to each other.
    """
    limit = timeout or family.timeout
    if dist.is_available() and dist.is_initialized():
        return _transport(family)(device, limit, dist.distributed_c10d._get_default_store()), dist.get_backend()
    nowhere = topology.master_addr is None or topology.master_port is None
    if topology.world_size == 1 and (nowhere or not dist.is_available()):
        return LocalTransport(device), None
    # What a process needs to meet others is imported by those that do.
    from accel_state.transport.meeting import meet

    chosen = backend_of(family, backend)
    store = meet(topology, init_method, limit)
    try:
        return _connect(topology, family, device, chosen, store, limit), chosen
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise CollectiveError(
            f"Process {topology.rank} of {topology.world_size} met the others and wanted to connect to them.",
            f"The backend {chosen!r} could not: {str(error).splitlines()[0]}.",
            "Look at the output of the other processes, and at the network between the machines.",
        ) from error


def _connect(
    topology: Topology, family: DeviceFamily, device: torch.device, backend: str, store: Any, timeout: timedelta
) -> Transport:
    """The transport over a process group that is made here; it ends the group with itself."""
    dist.init_process_group(
        backend=backend, store=store, rank=topology.rank, world_size=topology.world_size, timeout=timeout
    )
    transport: Transport = _transport(family)(device, timeout, store, owner=True)
    # A process that ended now would cut those off that are still connecting.
    transport.barrier()
    return transport


def _transport(family: DeviceFamily) -> Any:
    """The class of the transport between processes on a family's devices."""
    module, _, name = family.transport.partition(":")
    return getattr(importlib.import_module(module), name)
