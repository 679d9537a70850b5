"""MPI: the variables of mpirun of each family."""

from __future__ import annotations

from typing import ClassVar

from accel_state.clusters.base import ClusterEnvironment, Machines

__all__ = ("IntelMPIEnvironment", "MVAPICHEnvironment", "OpenMPIEnvironment", "PMIEnvironment")


class _MPI(ClusterEnvironment):
    """What is common to the families."""

    launcher_names: ClassVar[tuple[str, str, str]]
    """Variables with rank, number and number on this machine of launchers that mpirun started."""

    def address(self) -> tuple[str | None, int | None]:
        """MPI sets no address: this machine, if all processes are on one node."""
        from accel_state.network import DEFAULT_PORT

        size, local = (self.first(names) for names in (self.world_size_names, self.local_world_size_names))
        one_node = self.environ.get(size or "") == self.environ.get(local or "")
        return ("127.0.0.1" if one_node else None), DEFAULT_PORT

    def machines(self) -> Machines | None:
        """One launcher on each machine; several on one are single processes of the run."""
        rank, size, local_size = self.launcher_names
        if any(name not in self.environ for name in self.launcher_names):
            return None
        launchers = self.given(local_size).value
        if launchers > 1:
            return Machines("MPI", launchers=launchers)
        return Machines("MPI", {"num_machines": self.given(size), "machine_rank": self.given(rank)})


class OpenMPIEnvironment(_MPI):
    """Open MPI."""

    name = "OpenMPI"
    rank_names = ("OMPI_COMM_WORLD_RANK",)
    world_size_names = ("OMPI_COMM_WORLD_SIZE",)
    local_rank_names = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    local_world_size_names = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    launcher_names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


class MVAPICHEnvironment(_MPI):
    """MVAPICH."""

    name = "MVAPICH"
    rank_names = ("MV2_COMM_WORLD_RANK",)
    world_size_names = ("MV2_COMM_WORLD_SIZE",)
    local_rank_names = ("MV2_COMM_WORLD_LOCAL_RANK",)
    local_world_size_names = ("MV2_COMM_WORLD_LOCAL_SIZE",)
    launcher_names = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


class IntelMPIEnvironment(_MPI):
    """Intel MPI, and MPICH."""

    name = "Intel MPI"
    rank_names = ("PMI_RANK",)
    world_size_names = ("PMI_SIZE",)
    local_rank_names = ("MPI_LOCALRANKID",)
    local_world_size_names = ("MPI_LOCALNRANKS",)
    launcher_names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")

    def started_process(self) -> bool:
        """Whether the local rank is set too: Slurm and others set the other variables."""
        return super().started_process() and self.first(self.local_rank_names) is not None


class PMIEnvironment(_MPI):
    """Other systems that set a part of the variables of Intel MPI, without local ranks."""

    name = "PMI"
    rank_names = ("PMI_RANK",)
    world_size_names = ("PMI_SIZE",)

    def machines(self) -> Machines | None:
        """Nothing is known about machines."""
        return None
