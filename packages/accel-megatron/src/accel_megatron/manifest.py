"""The manifest of the Megatron-LM backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_plugins.manifest import ENGINE_CAPABILITIES, PROTOCOL, Manifest, ObjectKind
from accel_state.labels import DistributedType
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import BOOLEAN, Setting

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("MANIFEST", "REQUIREMENT", "present")

REQUIREMENT: Final = Requirement("megatron.core", "megatron-core", ">=0.16")


def present(process: Process) -> bool:
    """Whether the launcher selects Megatron-LM."""
    return MANIFEST.switched_on


MANIFEST: Final = Manifest(
    name="megatron",
    config="accel_megatron.config:MegatronLMPlugin",
    strategy="accel_megatron.strategy:MegatronStrategy",
    label=DistributedType.MEGATRON_LM,
    present="accel_megatron.manifest:present",
    requires=(REQUIREMENT,),
    capabilities=ENGINE_CAPABILITIES,
    together=frozenset({ObjectKind.MODEL, ObjectKind.OPTIMIZER}),
    switch=Setting(
        "use_megatron_lm",
        BOOLEAN,
        False,
        variable="ACCELERATE_USE_MEGATRON_LM",
        flag="--use_megatron_lm",
        help="Train with Megatron-LM.",
    ),
    parameter="megatron_lm_plugin",
    priority=70,
    tier=3,
    protocol=PROTOCOL,
)
