"""Creates the process from its environment: its rank, its device, its processors, and the transport to the others."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from accel_state.devices.base import DeviceFamily
from accel_state.devices.select import wanted_family
from accel_state.errors import NotOffered, SettingError
from accel_state.identity import Process
from accel_state.kwargs import InitProcessGroupKwargs
from accel_state.labels import DistributedType
from accel_state.settings.environ import from_environment, publish
from accel_state.settings.run import ProcessSettings
from accel_state.topology import Topology, read_topology
from accel_state.transport.base import LocalTransport, Transport
from accel_state.watch.record import STATUS_FOLDER, STATUS_RECORD

__all__ = ("bind", "start_process")

_logger: Final = logging.getLogger(__name__)


def start_process(cpu: bool = False, **options: Any) -> Process:
    """Create the process from the environment, and connect it to the others of a launched run.

    Args:
        cpu: use the CPU even if another device is present.
        options: fields of `InitProcessGroupKwargs`.

    Raises:
        SettingError: a variable or an option is invalid.
        NotReady: the device was initialised before this process was forked.
        CollectiveError: the other processes did not connect.
    """
    settings = from_environment(ProcessSettings, cpu=True if cpu else None)
    group = InitProcessGroupKwargs(**{"backend": None, **options})
    family = wanted_family(settings)
    family.check_fork()
    launched = family.runtime_topology(read_topology())
    if launched.distributed:
        publish(launched.variables())
    topology = launched
    grouped = dist.is_available() and dist.is_initialized()
    if grouped and not launched.distributed:
        from accel_state.transport.rendezvous import topology_of_group

        topology = topology_of_group(family.count)
    device = _device(settings, family, topology)
    family.configure(launched)
    if settings.cpu_affinity:
        bind(family, topology.local_rank if device.index is None else device.index, settings.debug)
    timeout: Any = group.timeout
    STATUS_RECORD.device_memory = partial(family.memory_beside_host, device.index)
    with STATUS_RECORD.during("waiting for others") if topology.world_size > 1 else nullcontext():
        if os.environ.get(STATUS_FOLDER):
            _publish_first_status(os.environ[STATUS_FOLDER], topology.rank)
        transport: Transport
        backend: str | None
        addressed = topology.master_addr is not None and topology.master_port is not None and dist.is_available()
        if topology.world_size > 1 or addressed or grouped:
            from accel_state.transport.rendezvous import init_transport

            transport, backend = init_transport(topology, family, device, group.backend, group.init_method, timeout)
        else:
            transport, backend = LocalTransport(device), None
    return Process(
        topology=topology,
        device=device,
        family=family,
        transport=transport,
        distributed_type=family.spec.label if backend is not None else DistributedType.NO,
        backend=backend,
        debug=settings.debug,
        fork_launched=settings.fork_launched,
        options={"cpu": cpu, **options},
    )


def _publish_first_status(folder: str, rank: int) -> None:
    """Publish the first status of this process; the thread that does so later starts after the rendezvous."""
    from accel_state.watch.calls import CallLog
    from accel_state.watch.goodput import close_accounts
    from accel_state.watch.status import capture_status

    STATUS_RECORD.open(folder, rank)
    STATUS_RECORD.publish(capture_status(CallLog()).to_json())
    # Where torch.distributed.run restarts processes, no launcher does this before.
    close_accounts(folder, rank=rank)


def _device(settings: ProcessSettings, family: DeviceFamily, topology: Topology) -> torch.device:
    if settings.device is None or settings.cpu:
        return family.device(topology.local_rank)
    try:
        device = torch.device(settings.device)
    except RuntimeError as error:
        raise SettingError(
            f"Cannot use the device {settings.device!r}.",
            str(error).splitlines()[0],
            "Use a device such as cpu or cuda:0.",
        ) from None
    if device.index is None:
        return family.device(topology.local_rank)
    try:
        return family.device_at(device.index)
    except (RuntimeError, AssertionError) as error:
        raise SettingError(
            f"Cannot use the device {settings.device!r}.",
            str(error).splitlines()[0],
            f"Use the index of one of the {family.count()} devices that this process sees, or none.",
        ) from error


def bind(family: DeviceFamily, index: int, verbose: bool = False) -> None:
    """Bind this process to the processors nearest to a device; replaces an earlier binding.

    Args:
        family: the family of the device.
        index: index of the device in its family.
        verbose: whether to log the processors.

    Raises:
        NotOffered: the system cannot bind processes to processors.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise NotOffered(
            "Cannot bind this process to the processors nearest to its device.",
            "This operating system cannot bind processes.",
            "Unset ACCELERATE_CPU_AFFINITY.",
        )
    from accel_state.processors import available_processors, numa_nodes

    node = family.numa_node(index)
    wanted = available_processors() & (frozenset() if node is None else numa_nodes().get(node, frozenset()))
    if not wanted:
        _logger.warning(
            "The allowed processors nearest to device %d of the family %r are not known; the process stays unbound.",
            index,
            family.name,
        )
        return
    os.sched_setaffinity(0, wanted)
    if verbose:
        _logger.info("The process of %s:%d runs on the processors %s.", family.name, index, sorted(wanted))
