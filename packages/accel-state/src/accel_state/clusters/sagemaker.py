"""Amazon SageMaker: the containers of a training job."""

from __future__ import annotations

from accel_state.clusters.base import ClusterEnvironment, Machines
from accel_state.settings.environ import Given

__all__ = ("SageMakerEnvironment",)


class SageMakerEnvironment(ClusterEnvironment):
    """A training job with one container on each instance; a variable lists the containers as JSON."""

    name = "SageMaker"

    def machines(self) -> Machines | None:
        """The containers of the job."""
        if "SM_HOSTS" not in self.environ:
            return None
        import json

        try:
            hosts = sorted(json.loads(self.environ["SM_HOSTS"]))
            rank = hosts.index(self.environ.get("SM_CURRENT_HOST", ""))
        except (ValueError, TypeError):
            return None
        values = {
            "num_machines": Given(len(hosts), "$SM_HOSTS"),
            "machine_rank": Given(rank, "$SM_CURRENT_HOST"),
            "main_process_ip": Given(hosts[0], "$SM_HOSTS"),
        }
        return Machines(self.name, values if len(hosts) > 1 else {})
