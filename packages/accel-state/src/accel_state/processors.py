"""The processors of this machine: those that this process may use, and their cores and NUMA nodes.

Linux describes the layout in /sys. Elsewhere each processor counts as a core, and the NUMA nodes are unknown.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ("available_processors", "numa_nodes", "physical_cores")

_SYSTEM_DEVICES: Final = Path("/sys/devices/system")


def available_processors() -> frozenset[int]:
    """Numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def numa_nodes(system: Path = _SYSTEM_DEVICES) -> dict[int, frozenset[int]]:
    """Processors of each NUMA node by its number; empty if the system does not describe them."""
    nodes = {}
    for folder in sorted(system.glob("node/node[0-9]*"), key=lambda folder: int(folder.name[4:])):
        nodes[int(folder.name[4:])] = _parse_list((folder / "cpulist").read_text())
    return {number: processors for number, processors in nodes.items() if processors}


def physical_cores(system: Path = _SYSTEM_DEVICES) -> int:
    """Number of cores that this process may run on; the threads of one core count once."""
    cores = set()
    for processor in available_processors():
        siblings = system / f"cpu/cpu{processor}/topology/thread_siblings_list"
        try:
            cores.add(_parse_list(siblings.read_text()))
        except OSError:
            cores.add(frozenset({processor}))
    return len(cores)


def _parse_list(text: str) -> frozenset[int]:
    """Numbers of a list such as "0-3,8"."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
