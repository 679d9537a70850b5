"""Binding a process to the processors nearest to its device.

A process that feeds a device is quickest on the processors of the NUMA node that the device is attached to.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Final

import torch

from accel_state.devices.base import DeviceFamily
from accel_state.devices.select import wanted_family
from accel_state.errors import NotOffered
from accel_state.processors import available_processors, numa_nodes
from accel_state.settings.environ import from_environment
from accel_state.settings.run import ProcessSettings

__all__ = ("bind", "override_numa_affinity", "set_numa_affinity")

_logger: Final = logging.getLogger(__name__)


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


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the processors nearest to its device, whatever it was bound to before.

    Args:
        local_process_index: index of the process on its node, which is that of its device unless
            ACCELERATE_TORCH_DEVICE names one.
        verbose: whether to log the processors; by default only with ACCELERATE_DEBUG_MODE.

    Raises:
        NotOffered: the system cannot bind processes to processors.
    """
    settings = from_environment(ProcessSettings)
    given = None if settings.device is None or settings.cpu else torch.device(settings.device).index
    index = local_process_index if given is None else given
    bind(wanted_family(settings), index, settings.debug if verbose is None else verbose)


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """`override_numa_affinity` once for each index; what was bound by hand since then stays.

    Args:
        local_process_index: index of the process on its node, which is that of its device unless
            ACCELERATE_TORCH_DEVICE names one.
        verbose: whether to log the processors.
    """
    override_numa_affinity(local_process_index, verbose)
