"""The launcher `ray`: the settings of a run on a Ray cluster, and its restarts."""

from __future__ import annotations

import signal
import sys
from typing import Final, NamedTuple

from accel_cli.config.resolved import ResolvedSettings
from accel_cli.launch.interface import LaunchPlan, LaunchRequest
from accel_cli.launch.settings import fewest_machines
from accel_cli.launch.signals import Inbox
from accel_ray.attempt import Attempt, AttemptStart
from accel_ray.cluster import Cluster, Layout, connected
from accel_ray.manifest import RaySettings
from accel_state.errors import SettingError
from accel_state.exit_codes import RESUME
from accel_state.untrusted import printable

__all__ = ("Ray", "RayRun")

_VARIABLES_OF_NODES: Final = ("HOSTNAME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""The launcher's environment variables that do not apply to other machines."""


class RayRun(NamedTuple):
    """How a run is placed and restarted.

    Args:
        address: head of the cluster, or None for the cluster of this machine.
        layout: how the run is placed on nodes.
        patience: seconds to wait until the cluster has enough free resources.
        restarts: number of restarts after a process failed.
        lost_nodes: number of restarts after a node was lost.
    """

    address: str | None
    layout: Layout
    patience: float
    restarts: int
    lost_nodes: int


class Ray:
    """Starts processes on the nodes of a Ray cluster; see `accel_cli.launch.interface.Launcher`."""

    def __init__(self) -> None:
        self._inbox = Inbox()

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Processes on each node, or where there is room if only their number is given.

        Raises:
            SettingError: a resource is not of the form NAME=AMOUNT.
        """
        settings = request.settings
        own, layout = settings.instance(RaySettings), _layout(settings)
        world = layout.bundles * layout.each if layout.bundles is not None and layout.each is not None else None
        elastic = layout.bundles is not None and layout.fewest < layout.bundles
        prefix = settings["prefix_output"]
        return LaunchPlan(
            request.environment(1),
            request.program[1:],
            "ray",
            world_size=None if elastic else world,
            port=settings["main_process_port"].value or None,
            inherited={name: text for name, text in request.machine.environ.items() if name not in _VARIABLES_OF_NODES},
            grace_period=settings["grace_period"].value,
            prefix_output=bool(prefix.value) if prefix.is_set else world != 1,
            quiet=request.quiet,
            details=RayRun(own.ray_address, layout, own.ray_wait, settings["max_restarts"].value, own.ray_lost_nodes),
        )

    def run(self, plan: LaunchPlan) -> int:
        """Run the script, and restart it after a lost node or a failed process; see `Launcher`.

        Raises:
            NotFound: there is no running cluster at the address.
            LaunchError: the cluster has too few free resources, or its head was lost.
        """
        run: RayRun = plan.details
        with connected(run.address) as cluster, self._inbox as inbox:
            return self._attempts(plan, cluster, inbox)

    def _attempts(self, plan: LaunchPlan, cluster: Cluster, inbox: Inbox) -> int:
        run: RayRun = plan.details
        failed = lost = 0
        while True:
            start = AttemptStart(plan, run.layout, run.patience, failed + lost, run.restarts - failed)
            outcome = Attempt(start, cluster, inbox).run()
            if outcome.code in (0, RESUME) or outcome.signalled:
                return outcome.code
            for node in outcome.lost:
                cluster.suspect(node)
            if outcome.lost and lost < run.lost_nodes:
                lost += 1
                reason = f"{len(outcome.lost)} node(s) were lost; restarting ({lost} of {run.lost_nodes})"
            elif not outcome.lost and failed < run.restarts:
                failed += 1
                reason = f"it failed with exit code {outcome.code}; restarting ({failed} of {run.restarts})"
            else:
                return outcome.code
            if not plan.quiet:
                print(printable(f"accel launch: The run on Ray: {reason}."), file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End the run as SIGTERM does."""
        self._inbox.post(signal.SIGTERM)


def _layout(settings: ResolvedSettings) -> Layout:
    own = settings.instance(RaySettings)
    gpus = 0 if settings["cpu"].value and own.ray_gpus_per_process is None else own.ray_gpus_per_process
    further = tuple(map(_resource, own.ray_resources))
    machines, processes = settings["num_machines"], settings["num_processes"].value
    demand = (own.ray_cpus_per_process, gpus, further)
    if machines.is_set:
        each = None if processes is None else processes // machines.value
        return Layout(machines.value, fewest_machines(machines.value), each, True, *demand)
    if processes is not None:
        return Layout(processes, processes, 1, False, *demand)
    return Layout(None, 1, None, True, *demand)


def _resource(text: str) -> tuple[str, float]:
    name, equals, amount = text.partition("=")
    try:
        number = float(amount)
    except ValueError:
        number = -1.0
    if not (name and equals and 0 < number < float("inf")):
        raise SettingError(
            f"Cannot reserve the resource {text!r} (--ray_resource).",
            "A resource is a name and an amount above 0.",
            "Write it as NAME=AMOUNT, such as TPU=4.",
        )
    return name, number
