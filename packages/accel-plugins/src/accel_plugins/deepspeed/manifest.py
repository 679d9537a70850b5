"""The manifest of the DeepSpeed backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_plugins.manifest import ENGINE_CAPABILITIES, PROTOCOL, Axis, Manifest
from accel_state.labels import DistributedType
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import BOOLEAN, Setting

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("MANIFEST", "REQUIREMENT", "present")

REQUIREMENT: Final = Requirement("deepspeed", versions=">=0.18.2")


def present(process: Process) -> bool:
    """Whether the launcher selects DeepSpeed."""
    return MANIFEST.switched_on


MANIFEST: Final = Manifest(
    name="deepspeed",
    config="accel_plugins.deepspeed.config:DeepSpeedPlugin",
    strategy="accel_plugins.deepspeed.strategy:DeepSpeedStrategy",
    label=DistributedType.DEEPSPEED,
    present="accel_plugins.deepspeed.manifest:present",
    requires=(REQUIREMENT,),
    capabilities=ENGINE_CAPABILITIES._replace(own_sequence_parallelism=True),
    axes=frozenset({Axis.SHARD, Axis.SEQUENCE}),
    switch=Setting(
        "use_deepspeed",
        BOOLEAN,
        False,
        variable="ACCELERATE_USE_DEEPSPEED",
        flag="--use_deepspeed",
        help="Train with DeepSpeed.",
    ),
    parameter="deepspeed_plugin",
    imports_from_folder=True,
    # Lower than backends that shard parameters with torch: mesh axes must not select an engine.
    priority=45,
    tier=1,
    protocol=PROTOCOL,
)
