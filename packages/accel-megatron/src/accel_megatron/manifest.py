"""The manifest of the Megatron-LM backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_plugins.manifest import PROTOCOL, Ability, Duty, Manifest, Part, Traits
from accel_state.labels import DistributedType
from accel_state.settings.environ import read_setting
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import BOOLEAN, Setting

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("MANIFEST", "REQUIREMENT", "present")

REQUIREMENT: Final = Requirement("megatron.core", "megatron-core", ">=0.16")
_USE: Final = Setting(
    "use_megatron_lm",
    BOOLEAN,
    False,
    variable="ACCELERATE_USE_MEGATRON_LM",
    flag="--use_megatron_lm",
    help="Train with Megatron-LM.",
)


def present(process: Process) -> bool:
    """Whether the launcher selects Megatron-LM."""
    found = read_setting(_USE)
    return bool(found and found.value)


MANIFEST: Final = Manifest(
    name="megatron",
    config="accel_megatron.config:MegatronLMPlugin",
    strategy="accel_megatron.strategy:MegatronStrategy",
    label=DistributedType.MEGATRON_LM,
    present="accel_megatron.manifest:present",
    requires=(REQUIREMENT,),
    owns=frozenset({Duty.ACCUMULATION, Duty.PRECISION, Duty.CLIPPING}),
    together=frozenset({Part.MODEL, Part.OPTIMIZER}),
    lacks=frozenset(
        {
            Ability.NO_SYNC,
            Ability.CLIP_VALUE,
            Ability.JOIN,
            Ability.AVERAGE,
            Ability.LOCAL_PASSES,
            Ability.SEVERAL_MODELS,
        }
    ),
    traits=Traits(collective_save=True, can_checkpoint_partial_grads=False),
    switch=_USE,
    parameter="megatron_lm_plugin",
    priority=70,
    tier=3,
    protocol=PROTOCOL,
)
