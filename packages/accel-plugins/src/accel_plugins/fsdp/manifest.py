"""The manifests of the sharding backends, one for each version of FSDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_plugins.manifest import PROTOCOL, Axis, Capabilities, Manifest, ObjectKind
from accel_state.labels import DistributedType
from accel_state.settings.environ import read_setting
from accel_state.settings.schema import BOOLEAN, Setting, int_at_least

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("FSDP1", "FSDP2", "first_present", "second_present")

_USE: Final = Setting(
    "use_fsdp",
    BOOLEAN,
    False,
    variable="ACCELERATE_USE_FSDP",
    flag="--use_fsdp",
    help="Shard parameters with torch's FSDP.",
)
_SHARDS: Final = Capabilities(
    join=False,
    average_parameters=False,
    unused_parameters=False,
    local_passes=False,
    partial_gradients=False,
    collective_save=True,
    async_save=True,
)
_VERSION: Final = Setting("fsdp_version", int_at_least(1), 1, variable="FSDP_VERSION", flag="--fsdp_version")


def first_present(process: Process) -> bool:
    """Whether the launcher selects FSDP version 1."""
    return FSDP1.switched_on and _version() == 1


def second_present(process: Process) -> bool:
    """Whether the launcher selects FSDP version 2."""
    return FSDP2.switched_on and _version() == 2


def _version() -> int:
    """The version that the launcher selects; without one, it is version 1."""
    version = read_setting(_VERSION)
    return 1 if version is None else int(version.value)


FSDP1: Final = Manifest(
    name="fsdp1",
    config="accel_plugins.fsdp.config:FullyShardedDataParallelPlugin",
    strategy="accel_plugins.fsdp.fsdp1:FSDP1Strategy",
    label=DistributedType.FSDP,
    present="accel_plugins.fsdp.manifest:first_present",
    together=frozenset({ObjectKind.MODEL}),
    axes=frozenset({Axis.REPLICATE, Axis.SHARD}),
    capabilities=_SHARDS,
    settings={"fsdp_version": 1},
    switch=_USE,
    parameter="fsdp_plugin",
    priority=50,
    tier=1,
    protocol=PROTOCOL,
)

FSDP2: Final = Manifest(
    name="fsdp2",
    config="accel_plugins.fsdp.config:FullyShardedDataParallelPlugin",
    strategy="accel_plugins.fsdp.fsdp2:FSDP2Strategy",
    label=DistributedType.FSDP,
    present="accel_plugins.fsdp.manifest:second_present",
    together=frozenset({ObjectKind.MODEL}),
    axes=frozenset(Axis),
    capabilities=_SHARDS._replace(per_parameter_sharding=True, distributed_models=True, compiles_blocks=True),
    settings={"fsdp_version": 2},
    switch=_USE,
    parameter="fsdp_plugin",
    priority=51,
    tier=1,
    protocol=PROTOCOL,
)
