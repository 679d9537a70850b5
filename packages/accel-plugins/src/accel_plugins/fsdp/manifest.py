"""What the sharding backend declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_plugins.manifest import Ability, Axis, Manifest, Part
from accel_state.labels import DistributedType
from accel_state.settings.environ import read
from accel_state.settings.schema import BOOLEAN, Setting

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("FSDP2", "present")

_USE: Final = Setting("use_fsdp", BOOLEAN, False, variable="ACCELERATE_USE_FSDP", flag="--use_fsdp")


def present(process: Process) -> bool:
    """Whether sharding was asked for by the launcher."""
    found = read(_USE)
    return bool(found and found.value)


FSDP2: Final = Manifest(
    name="fsdp2",
    config="accel_plugins.fsdp.config:FullyShardedDataParallelPlugin",
    strategy="accel_plugins.fsdp.fsdp2:FSDP2Strategy",
    label=DistributedType.FSDP,
    present="accel_plugins.fsdp.manifest:present",
    together=frozenset({Part.MODEL}),
    axes=frozenset(Axis),
    lacks=frozenset({Ability.JOIN, Ability.AVERAGE}),
    settings={"fsdp_version": 2},
    parameter="fsdp_plugin",
    priority=50,
    tier=1,
)
