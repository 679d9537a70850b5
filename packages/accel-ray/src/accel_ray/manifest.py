"""The launcher's manifest: its settings, requirements, and when it is selected. Does not import Ray."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from accel_cli.config.resolved import REPEATED
from accel_cli.launch.interface import LauncherManifest
from accel_cli.launch.settings import SECONDS
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import int_at_least, setting

if TYPE_CHECKING:
    from accel_cli.launch.interface import LaunchRequest

__all__ = ("MANIFEST", "RaySettings")

_ray: Final = partial(setting, flag="--{name}", key="{name}", group="Ray")


@dataclass
class RaySettings:
    """How a run is placed on a Ray cluster, and how often it is restarted."""

    ray_address: str | None = _ray(
        variable="{NAME}",
        help="Address of the cluster, such as 10.0.0.1:6379; without it, the cluster on this machine.",
    )
    ray_cpus_per_process: int = _ray(1, type=int_at_least(0), help="CPUs to reserve for each process.")
    ray_gpus_per_process: int | None = _ray(
        type=int_at_least(0),
        help="GPUs to reserve for each process; 1 if the cluster has GPUs and --cpu is not given.",
    )
    ray_resources: tuple[str, ...] = _ray(
        (),
        type=REPEATED,
        flag="--ray_resource",
        help="A further resource to reserve for each process, such as --ray_resource=TPU=4; may be repeated.",
    )
    ray_wait: float = _ray(
        60.0, type=SECONDS, help="Seconds to wait until the cluster has enough free resources for the run."
    )
    ray_lost_nodes: int = _ray(
        10,
        type=int_at_least(0),
        help="Number of restarts after lost nodes; --max_restarts counts failed processes.",
    )


def _called_for(request: LaunchRequest) -> str | None:
    """Whether `accel launch` received an address; $RAY_ADDRESS may be set for other programs."""
    address = request.settings["ray_address"]
    return address.text if address.is_set and not address.origin.startswith("$") else None


MANIFEST: Final = LauncherManifest(
    "ray",
    "accel_ray.launcher:Ray",
    "start the processes on the nodes of a Ray cluster",
    "accel_ray.manifest:RaySettings",
    _called_for,
    priority=25,
    requires=(Requirement("ray", versions=">=2.60"),),
    elastic=True,
)
