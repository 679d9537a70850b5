"""What the launcher declares: its settings, what calls for it, and what it needs. Never imports Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from accel_cli.config.resolved import REPEATED, ResolvedSettings
from accel_cli.launch.check import shown
from accel_cli.launch.launcher import LauncherManifest
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import TEXT, ValueType, int_at_least, setting, settings_class

__all__ = ("MANIFEST", "RaySettings")

_GROUP: Final = "Ray"


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError(text)
    return seconds


_SECONDS: Final = ValueType("a number of seconds of at least 0", _parse_seconds)


def _ray(name: str, said: str, value_type: ValueType = TEXT, default: object = None, **more: Any) -> Any:
    further = {"flag": f"--{name}", **more}
    return setting(default, type=value_type, key=name, help=said, group=_GROUP, **further)


@settings_class
class RaySettings:
    """How a run is placed on a Ray cluster, and how often it starts again."""

    ray_address: str | None = _ray(
        "ray_address",
        "Address of the cluster, such as 10.0.0.1:6379; without it, the cluster that runs on this machine.",
        variable="RAY_ADDRESS",
    )
    ray_cpus_per_process: int = _ray("ray_cpus_per_process", "CPUs that each process reserves.", int_at_least(0), 1)
    ray_gpus_per_process: int | None = _ray(
        "ray_gpus_per_process",
        "GPUs that each process reserves; 1 where the cluster has some and --cpu is not given.",
        int_at_least(0),
    )
    ray_resources: tuple[str, ...] = _ray(
        "ray_resources",
        "A further resource that each process reserves, such as --ray_resource=TPU=4; may be repeated.",
        REPEATED,
        (),
        flag="--ray_resource",
    )
    ray_wait: float = _ray(
        "ray_wait", "Seconds for which the cluster may take to have room for the run.", _SECONDS, 60.0
    )
    ray_lost_nodes: int = _ray(
        "ray_lost_nodes",
        "How often the run starts again because a node was lost; --max_restarts counts processes that failed.",
        int_at_least(0),
        10,
    )


def _called_for(settings: ResolvedSettings, environ: Mapping[str, str]) -> str | None:
    """An address that was given to `accel launch`; $RAY_ADDRESS alone may be there for something else."""
    address = settings["ray_address"]
    return shown(address) if address.given and not address.origin.startswith("$") else None


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
