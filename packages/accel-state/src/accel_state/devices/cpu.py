"""The CPU as a device family: always present, with the lowest priority."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import torch

from accel_state.devices.base import DeviceFamily
from accel_state.devices.specs import SPECS
from accel_state.settings.environ import read_setting
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import TEXT, Setting
from accel_state.topology import Topology

__all__ = ("CPU",)

_THREADS_SETTING: Final = Setting("threads", TEXT, None, variable="OMP_NUM_THREADS")
_PSUTIL: Final = Requirement("psutil")


class CPU(DeviceFamily):
    """The processors of the host; all processes of a node share them."""

    spec = SPECS["cpu"]

    def present(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def device_at(self, index: int) -> torch.device:
        """The CPU with an index: it has none, but the device of a run keeps the one that the settings name."""
        return torch.device("cpu", index)

    def configure(self, topology: Topology) -> None:
        """Use an equal share of the cores of the node as threads, unless OMP_NUM_THREADS is set."""
        if topology.local_world_size > 1 and read_setting(_THREADS_SETTING) is None:
            from accel_state.processors import physical_cores

            torch.set_num_threads(max(1, physical_cores() // topology.local_world_size))

    def check_fork(self) -> None:
        """The CPU survives a fork."""

    def seed(self, seed: int) -> None:
        """Does nothing: `torch.manual_seed` seeds the generator of the CPU."""

    def rng_state(self) -> Any:
        return None

    def set_rng_state(self, state: Any) -> None:
        """Does nothing: the generator of the CPU is torch's own."""

    def current_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_current_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def synchronize(self) -> None:
        """Does nothing: work on the host has finished when its call returns."""

    def empty_cache(self) -> None:
        """Does nothing: the allocator of the host has no cache."""

    def free_memory(self, index: int | None = None) -> int:
        """Bytes available without swapping."""
        return int(_virtual_memory().available)

    def total_memory(self, index: int | None = None) -> int:
        if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(_virtual_memory().total)

    def used_memory(self, index: int | None = None) -> int:
        """Resident memory of this process in bytes, including its libraries."""
        _PSUTIL.demand("Cannot read the memory of this process.")
        import psutil

        return int(psutil.Process().memory_info().rss)

    def memory_beside_host(self, index: int | None = None) -> int | None:
        return None

    def peak_memory(self, index: int | None = None) -> int:
        """The maximum of `used_memory` since the process started.

        Raises:
            NotOffered: the operating system does not record it.
        """
        try:
            import resource
        except ImportError:
            return super().peak_memory(index)
        # The unit is KiB on Linux and bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def out_of_memory(self, error: BaseException) -> bool:
        allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
        return isinstance(error, MemoryError) or allocator or super().out_of_memory(error)

    def numa_node(self, index: int) -> int | None:
        """The NUMA node for process `index` of this machine; the processes are spread over all nodes."""
        from accel_state.processors import numa_nodes

        nodes = sorted(numa_nodes())
        return nodes[index % len(nodes)] if nodes else None


def _virtual_memory() -> Any:
    _PSUTIL.demand("Cannot read the memory of the host.")
    import psutil

    return psutil.virtual_memory()
