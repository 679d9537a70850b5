"""Options of DeepSpeed's own launcher, by which it finds the machines; its backend has those that processes read."""

from __future__ import annotations

from typing import Any, Final

from accel_state.settings.schema import TEXT, ValueType, choice, setting, settings_class

__all__ = ("LAUNCHERS", "DeepSpeedLaunchSettings")

LAUNCHERS: Final = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
"""Ways in which processes on several machines are started; "standard" is torch.distributed.run on each of them."""

_GROUP: Final = "DeepSpeed"


def _deepspeed(name: str, said: str, value_type: ValueType = TEXT) -> Any:
    return setting(None, type=value_type, flag=f"--{name}", key=f"deepspeed_config.{name}", help=said, group=_GROUP)


@settings_class
class DeepSpeedLaunchSettings:
    """Settings of DeepSpeed's own launcher."""

    deepspeed_hostfile: str | None = _deepspeed("deepspeed_hostfile", "File that names the machines.")
    deepspeed_exclusion_filter: str | None = _deepspeed(
        "deepspeed_exclusion_filter", "Machines and devices to leave out, such as host1@host2:0,2."
    )
    deepspeed_inclusion_filter: str | None = _deepspeed(
        "deepspeed_inclusion_filter", "Machines and devices to use, such as host1@host2:0,2."
    )
    deepspeed_multinode_launcher: str | None = _deepspeed(
        "deepspeed_multinode_launcher", "Who starts the processes on several machines.", choice(*LAUNCHERS)
    )
