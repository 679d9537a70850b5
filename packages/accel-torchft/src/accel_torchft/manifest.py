"""What the backends declare about themselves; read without torch and without torchft."""

from __future__ import annotations

from typing import Final

from accel_plugins.manifest import Ability, Axis, Manifest, Part, Traits
from accel_state.settings.installed import Requirement

__all__ = ("NEEDED", "TORCHFT", "TORCHFT_FSDP2")

# The nightly releases are another distribution, `torchft-nightly`, whose versions are dates.
NEEDED: Final = Requirement("torchft", versions=">=0.2")
"""The engine."""

_CONFIG: Final = "accel_torchft.config:TorchFTConfig"

TORCHFT: Final = Manifest(
    name="torchft",
    strategy="accel_torchft.strategy:TorchFTStrategy",
    config=_CONFIG,
    requires=(NEEDED,),
    # A step is committed once for all optimizers of a process.
    lacks=frozenset({Ability.JOIN, Ability.AVERAGE, Ability.SEVERAL_MODELS}),
    traits=Traits(elastic=True, can_checkpoint_partial_grads=False),
    tier=1,
    protocol=2,
)
"""Every replica is one process with the whole model."""

TORCHFT_FSDP2: Final = Manifest(
    name="torchft-fsdp2",
    strategy="accel_torchft.strategy:TorchFTFSDP2Strategy",
    config="accel_plugins.fsdp.config:FullyShardedDataParallelPlugin",
    requires=(NEEDED,),
    together=frozenset({Part.MODEL}),
    axes=frozenset({Axis.SHARD}),
    lacks=frozenset({Ability.JOIN, Ability.AVERAGE, Ability.LOCAL_PASSES, Ability.SEVERAL_MODELS}),
    traits=Traits(
        collective_save=True,
        can_checkpoint_partial_grads=False,
        per_parameter_sharding=True,
        elastic=True,
    ),
    settings={"fsdp_version": 2},
    tier=1,
    protocol=2,
)
"""Every replica is a group of processes that divide the model by FSDP 2."""
