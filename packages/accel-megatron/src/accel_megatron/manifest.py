"""The manifest of the Megatron-LM backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_plugins.manifest import PROTOCOL, Capabilities, Manifest, ObjectKind
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
    capabilities=Capabilities(
        own_accumulation=True,
        own_precision=True,
        own_clipping=True,
        no_sync=False,
        clip_value=False,
        join=False,
        average_parameters=False,
        several_models=False,
        local_passes=False,
        partial_gradients=False,
        collective_save=True,
    ),
    together=frozenset({ObjectKind.MODEL, ObjectKind.OPTIMIZER}),
    switch=_USE,
    parameter="megatron_lm_plugin",
    priority=70,
    tier=3,
    protocol=PROTOCOL,
)
