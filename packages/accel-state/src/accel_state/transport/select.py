"""Starting the transport of a process: alone, or over torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as _rendezvous

from accel_state.devices.base import DeviceFamily
from accel_state.errors import CollectiveError, SettingError
from accel_state.topology import Topology
from accel_state.transport.base import Transport
from accel_state.transport.local import LocalTransport
from accel_state.transport.torch_dist import TorchDistTransport

__all__ = ("backend_of", "start_transport")


def backend_of(family: DeviceFamily, asked: str | None) -> str:
    """Name of the torch.distributed backend for a device family; `asked` wins where it can move that family's tensors.

    "nccl" is what the interface has as its default, so on another family it means "by device".
    """
    if asked is None or (asked == "nccl" and family.backend != "nccl"):
        return family.backend
    return asked


def start_transport(
    topology: Topology,
    family: DeviceFamily,
    device: torch.device,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
) -> tuple[Transport, str | None]:
    """The transport of this process and the name of its torch.distributed backend (None when it runs alone).

    A process group that the script initialised itself is used as it is.

    Raises:
        SettingError: no address is known at which the processes could meet.
        CollectiveError: they did not meet in time.
    """
    limit = timeout or family.timeout
    if dist.is_available() and dist.is_initialized():
        return TorchDistTransport(device, limit, dist.distributed_c10d._get_default_store()), dist.get_backend()
    if topology.world_size == 1 and (topology.master_addr is None or not dist.is_available()):
        return LocalTransport(device), None
    chosen = backend_of(family, backend)
    store = _meet(topology, init_method, limit)
    dist.init_process_group(
        backend=chosen, store=store, rank=topology.rank, world_size=topology.world_size, timeout=limit
    )
    return TorchDistTransport(device, limit, store), chosen


def _meet(topology: Topology, init_method: str | None, timeout: timedelta) -> Any:
    """The store that all processes share, prefixed by the attempt so that a restarted run reads no stale keys."""
    method = init_method or "env://"
    if method == "env://":
        _check_address(topology)
    try:
        meeting = _rendezvous(method, topology.rank, topology.world_size, timeout=timeout)
        store, _, _ = next(meeting)
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{topology.master_addr}:{topology.master_port}" if method == "env://" else method
        raise CollectiveError(
            f"Process {topology.rank} of {topology.world_size} wanted to meet the others at {where}.",
            f"They did not meet: {str(error).splitlines()[0]}.",
            "Check that the address is that of the first machine, that the port is free there, and that every process "
            "was started.",
        ) from error
    store.set_timeout(timeout)
    return dist.distributed_c10d.PrefixStore(f"attempt{topology.attempt}", store)


def _check_address(topology: Topology) -> None:
    missing = [
        name
        for name, value in (("MASTER_ADDR", topology.master_addr), ("MASTER_PORT", topology.master_port))
        if value is None
    ]
    if missing and topology.world_size > 1:
        raise SettingError(
            f"This process was started as rank {topology.rank} of {topology.world_size} ({topology.scheme}).",
            f"{' and '.join(missing)} not set, so the processes do not know where to meet.",
            "Set them, or start the script with `accel launch`, which sets them.",
        )
