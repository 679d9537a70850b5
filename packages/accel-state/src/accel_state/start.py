"""Making the process from its environment: its rank, its device, its processors, and the transport to the others."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any, Final

import torch

from accel_state.devices.base import DeviceFamily
from accel_state.devices.select import wanted_family
from accel_state.errors import NotOffered, SettingError
from accel_state.hang_report.call_log import CallLog
from accel_state.hang_report.rank_status import PROGRESS, StatusFile, capture
from accel_state.identity import Process
from accel_state.kwargs import InitProcessGroupKwargs
from accel_state.labels import DistributedType
from accel_state.processors import available_processors, numa_nodes
from accel_state.settings.environ import from_environment, publish
from accel_state.settings.run import ProcessSettings
from accel_state.topology import Topology, read_topology
from accel_state.transport.rendezvous import init_transport, topology_of_group

__all__ = ("bind", "start_process")

_logger: Final = logging.getLogger(__name__)


def start_process(cpu: bool = False, **options: Any) -> Process:
    """Make the process from the environment, joining the others when it was launched as one of several.

    Args:
        cpu: work on the CPU even if another device is present.
        options: fields of `InitProcessGroupKwargs`.

    Raises:
        SettingError: a variable or an option cannot be used.
        NotReady: the device was opened before this process was forked.
        CollectiveError: the processes did not meet.
    """
    settings = from_environment(ProcessSettings, cpu=True if cpu else None)
    group = InitProcessGroupKwargs(**{"backend": None, **options})
    family = wanted_family(settings)
    family.check_fork()
    told = family.runtime_topology(read_topology())
    if told.distributed:
        publish(told.variables())
    topology = told if told.distributed else topology_of_group(max(family.count(), 1)) or told
    device = _device(settings, family, topology)
    family.configure(told)
    if settings.cpu_affinity:
        bind(family, topology.local_rank if device.index is None else device.index, settings.debug)
    timeout: Any = group.timeout
    with PROGRESS.during("waiting for others"):
        if (status := StatusFile.of_run(topology.rank)) is not None:
            # The thread that writes it later begins when the processes have met.
            status.write(capture(CallLog()))
        PROGRESS.device_memory = partial(family.memory_beside_host, device.index)
        transport, backend = init_transport(topology, family, device, group.backend, group.init_method, timeout)
    return Process(
        topology=topology,
        device=device,
        family=family,
        transport=transport,
        distributed_type=family.label if backend is not None else DistributedType.NO,
        backend=backend,
        debug=settings.debug,
        fork_launched=settings.fork_launched,
        options={"cpu": cpu, **options},
    )


def _device(settings: ProcessSettings, family: DeviceFamily, topology: Topology) -> torch.device:
    if settings.device is None or settings.cpu:
        return family.device(topology.local_rank)
    try:
        asked = torch.device(settings.device)
    except RuntimeError as error:
        raise SettingError(
            f"The device {settings.device!r} was asked for.",
            str(error).splitlines()[0],
            "Give a device such as cpu or cuda:0.",
        ) from None
    return family.device(topology.local_rank if asked.index is None else asked.index)


def bind(family: DeviceFamily, index: int, verbose: bool = False) -> None:
    """Run this process on the processors nearest to a device, whatever it was bound to before.

    Args:
        family: the family of the device.
        index: which of its devices.
        verbose: whether to log the processors.

    Raises:
        NotOffered: the system cannot bind processes to processors.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise NotOffered(
            "This process was to be bound to the processors nearest to its device.",
            "The operating system offers no such call.",
            "Unset ACCELERATE_CPU_AFFINITY.",
        )
    node = family.numa_node(index)
    wanted = available_processors() & (frozenset() if node is None else numa_nodes().get(node, frozenset()))
    if not wanted:
        _logger.warning(
            "Which of the allowed processors are nearest to device %d of the family %r is not known; the process "
            "stays unbound.",
            index,
            family.name,
        )
        return
    os.sched_setaffinity(0, wanted)
    if verbose:
        _logger.info("The process of %s:%d runs on the processors %s.", family.name, index, sorted(wanted))
