"""The manifest of the DeepSpeed backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_plugins.manifest import PROTOCOL, Axis, Capabilities, Manifest
from accel_state.labels import DistributedType
from accel_state.settings.environ import read_setting
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import BOOLEAN, Setting

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("MANIFEST", "REQUIREMENT", "present")

REQUIREMENT: Final = Requirement("deepspeed", versions=">=0.18.2")
_USE: Final = Setting(
    "use_deepspeed",
    BOOLEAN,
    False,
    variable="ACCELERATE_USE_DEEPSPEED",
    flag="--use_deepspeed",
    help="Train with DeepSpeed.",
)


def present(process: Process) -> bool:
    """Whether the launcher selects DeepSpeed."""
    found = read_setting(_USE)
    return bool(found and found.value)


MANIFEST: Final = Manifest(
    name="deepspeed",
    config="accel_plugins.deepspeed.config:DeepSpeedPlugin",
    strategy="accel_plugins.deepspeed.strategy:DeepSpeedStrategy",
    label=DistributedType.DEEPSPEED,
    present="accel_plugins.deepspeed.manifest:present",
    requires=(REQUIREMENT,),
    capabilities=Capabilities(
        own_accumulation=True,
        own_precision=True,
        own_clipping=True,
        own_sequence_parallelism=True,
        no_sync=False,
        clip_value=False,
        join=False,
        average_parameters=False,
        several_models=False,
        local_passes=False,
        partial_gradients=False,
        collective_save=True,
    ),
    axes=frozenset({Axis.SHARD, Axis.SEQUENCE}),
    switch=_USE,
    parameter="deepspeed_plugin",
    # Lower than backends that shard parameters with torch: mesh axes must not select an engine.
    priority=45,
    tier=1,
    protocol=PROTOCOL,
)
