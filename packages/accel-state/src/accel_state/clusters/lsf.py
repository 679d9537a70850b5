"""LSF: launchers that `blaunch` started."""

from __future__ import annotations

from accel_state.clusters.base import ClusterEnvironment, Machines
from accel_state.settings.environ import Given

__all__ = ("LSFEnvironment",)


class LSFEnvironment(ClusterEnvironment):
    """A job of LSF; one variable lists its hosts."""

    name = "LSF"

    def machines(self) -> Machines | None:
        """The hosts of the job, among which this machine is found by its name."""
        if "LSF_PM_TASKID" not in self.environ or "LSB_MCPU_HOSTS" not in self.environ:
            return None
        hosts = list(dict.fromkeys(self.environ["LSB_MCPU_HOSTS"].split()[::2]))
        short = [name.partition(".")[0] for name in hosts]
        host = self.host.partition(".")[0]
        if host not in short:
            return None
        values = {"num_machines": len(hosts), "machine_rank": short.index(host), "main_process_ip": hosts[0]}
        given = {name: Given(value, "$LSB_MCPU_HOSTS") for name, value in values.items()}
        return Machines(self.name, given if len(hosts) > 1 else {})
