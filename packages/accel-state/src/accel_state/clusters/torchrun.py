"""torchrun, and everything that sets its variables: this project's launchers, Ray, DeepSpeed, Kubeflow's operator."""

from __future__ import annotations

from accel_state.clusters.base import ClusterEnvironment, Machines
from accel_state.settings.environ import Given

__all__ = ("TorchrunEnvironment",)


class TorchrunEnvironment(ClusterEnvironment):
    """The variables of torchrun's processes, and those that torchrun reads in place of options."""

    name = "torchrun"
    rank_names = ("RANK",)
    world_size_names = ("WORLD_SIZE",)
    # The second of these, and the third of the next, are those of DeepSpeed's launcher.
    local_world_size_names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    node_rank_names = ("GROUP_RANK", "NODE_RANK", "CROSS_RANK")

    def machines(self) -> Machines | None:
        """The machines as the options of torchrun give them in variables; not a range."""
        environ = self.environ
        if not environ.get("PET_NNODES", "").isdecimal():
            return None
        values = {"num_machines": self.given("PET_NNODES")}
        if "PET_NODE_RANK" in environ:
            values["machine_rank"] = self.given("PET_NODE_RANK")
        if environ.get("PET_NPROC_PER_NODE", "").isdecimal():
            total = values["num_machines"].value * int(environ["PET_NPROC_PER_NODE"])
            values["num_processes"] = Given(total, "$PET_NPROC_PER_NODE")
        if "PET_MASTER_PORT" in environ:
            values["main_process_port"] = self.given("PET_MASTER_PORT")
        if environ.get("PET_MASTER_ADDR"):
            values["main_process_ip"] = Given(environ["PET_MASTER_ADDR"], "$PET_MASTER_ADDR")
        return Machines(self.name, values)
