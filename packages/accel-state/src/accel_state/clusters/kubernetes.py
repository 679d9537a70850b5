"""Kubernetes: the pods of a training job of Kubeflow, and those of a JobSet."""

from __future__ import annotations

import re

from accel_state.clusters.base import ClusterEnvironment, Machines
from accel_state.settings.environ import Given

__all__ = ("JobSetEnvironment", "TrainingJobEnvironment")


class TrainingJobEnvironment(ClusterEnvironment):
    """A job of the training operator, which sets RANK and WORLD_SIZE as if each pod were one process."""

    name = "Kubernetes"

    def machines(self) -> Machines | None:
        """Each pod is a machine; a process of a launch has a local rank too."""
        needed = ("KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE", "MASTER_ADDR")
        if any(name not in self.environ for name in needed) or "LOCAL_RANK" in self.environ:
            return None
        return Machines(self.name, {"num_machines": self.given("WORLD_SIZE"), "machine_rank": self.given("RANK")})


class JobSetEnvironment(ClusterEnvironment):
    """A replicated job of a JobSet.

    An indexed Job sets JOB_COMPLETION_INDEX. JobSet sets no variable; the manifest passes labels of the pod on by the
    downward API: JOBSET_JOB_INDEX (jobset.sigs.k8s.io/job-index), JOBSET_REPLICAS (replicatedjob-replicas) and
    JOBSET_RESTART_ATTEMPT (restart-attempt). JOBSET_PODS is the number of pods of each job (its completions), and
    JOBSET_SUBDOMAIN that of its network; without it, the name of the JobSet (jobset-name) in JOBSET_NAME.
    """

    name = "JobSet"

    def machines(self) -> Machines | None:
        """Each pod is a machine; the first pod of the first job is the main one.

        Pods have the host name `<jobset>-<replicated job>-<job index>-<pod index>`, in the subdomain.
        """
        environ = self.environ
        if "JOBSET_JOB_INDEX" not in environ or "JOB_COMPLETION_INDEX" not in environ or "LOCAL_RANK" in environ:
            return None
        pods = self._number("JOBSET_PODS", 1)
        job, pod = self.given("JOBSET_JOB_INDEX").value, self.given("JOB_COMPLETION_INDEX").value
        values = {
            "num_machines": Given(self._number("JOBSET_REPLICAS", 1) * pods, "$JOBSET_REPLICAS"),
            "machine_rank": Given(job * pods + pod, "$JOB_COMPLETION_INDEX"),
        }
        own = re.fullmatch(r"(.+)-\d+-\d+", self.host.partition(".")[0])
        subdomain = environ.get("JOBSET_SUBDOMAIN") or environ.get("JOBSET_NAME")
        if own is not None and subdomain:
            values["main_process_ip"] = Given(f"{own[1]}-0-0.{subdomain}", "$JOBSET_SUBDOMAIN")
        return Machines(self.name, values, restarts=self._number("JOBSET_RESTART_ATTEMPT", 0))

    def _number(self, name: str, default: int) -> int:
        return int(self.given(name).value) if self.environ.get(name) else default
