"""What the backends declare about themselves; read without torch and without torchft.

There is one backend for each way in which replicas train together (`torchft`, `-local-sgd`, `-diloco`), with one
process a replica or, with `-fsdp2`, a group that shards the model.
"""

from __future__ import annotations

from typing import Final

from accel_plugins.manifest import Axis, Capabilities, Manifest, ObjectKind
from accel_state.settings.installed import Requirement

__all__ = (
    "MANIFESTS",
    "NEEDED",
    "TORCHFT",
    "TORCHFT_DILOCO",
    "TORCHFT_FSDP2",
    "TORCHFT_FSDP2_DILOCO",
    "TORCHFT_FSDP2_LOCAL_SGD",
    "TORCHFT_LOCAL_SGD",
)

# The nightly releases are another distribution, `torchft-nightly`, whose versions are dates.
NEEDED: Final = Requirement("torchft", versions=">=0.2")
"""The engine."""

# A step is committed once for all optimizers of a process.
_WHOLE_MODEL_CAPABILITIES: Final = Capabilities(
    join=False,
    average_parameters=False,
    unused_parameters=False,
    several_models=False,
    partial_gradients=False,
    elastic=True,
)
_SHARDED_CAPABILITIES: Final = _WHOLE_MODEL_CAPABILITIES._replace(
    local_passes=False, collective_save=True, per_parameter_sharding=True, distributed_models=True
)


def _whole(name: str, strategy: str, equal_replicas: bool) -> Manifest:
    """A backend whose replicas are one process each, with the whole model."""
    return Manifest(
        name=name,
        strategy=strategy,
        config="accel_torchft.config:TorchFTConfig",
        requires=(NEEDED,),
        capabilities=_WHOLE_MODEL_CAPABILITIES._replace(equal_replicas=equal_replicas),
        tier=1,
        protocol=3,
    )


def _sharded(name: str, strategy: str, equal_replicas: bool) -> Manifest:
    """A backend whose replicas are groups of processes that shard the model with FSDP 2."""
    return Manifest(
        name=name,
        strategy=strategy,
        config="accel_plugins.fsdp.config:FullyShardedDataParallelPlugin",
        requires=(NEEDED,),
        together=frozenset({ObjectKind.MODEL}),
        axes=frozenset({Axis.SHARD}),
        capabilities=_SHARDED_CAPABILITIES._replace(equal_replicas=equal_replicas),
        settings={"fsdp_version": 2},
        tier=1,
        protocol=3,
    )


TORCHFT: Final = _whole("torchft", "accel_torchft.strategy:TorchFTStrategy", equal_replicas=True)
"""Replicas average their gradients in every step."""

TORCHFT_FSDP2: Final = _sharded("torchft-fsdp2", "accel_torchft.strategy:TorchFTFSDP2Strategy", equal_replicas=True)
"""Replicas of several processes average their gradients in every step."""

TORCHFT_LOCAL_SGD: Final = _whole(
    "torchft-local-sgd", "accel_torchft.local_steps:LocalSGDStrategy", equal_replicas=False
)
"""Replicas average their weights every few steps."""

TORCHFT_FSDP2_LOCAL_SGD: Final = _sharded(
    "torchft-fsdp2-local-sgd", "accel_torchft.local_steps:LocalSGDFSDP2Strategy", equal_replicas=False
)
"""Replicas of several processes average their weights every few steps."""

TORCHFT_DILOCO: Final = _whole("torchft-diloco", "accel_torchft.local_steps:DiLoCoStrategy", equal_replicas=False)
"""Every few steps an outer optimizer makes a step with the mean of what the replicas changed."""

TORCHFT_FSDP2_DILOCO: Final = _sharded(
    "torchft-fsdp2-diloco", "accel_torchft.local_steps:DiLoCoFSDP2Strategy", equal_replicas=False
)
"""Replicas of several processes, with an outer optimizer."""

MANIFESTS: Final = {
    manifest.name: manifest
    for manifest in (
        TORCHFT,
        TORCHFT_FSDP2,
        TORCHFT_LOCAL_SGD,
        TORCHFT_FSDP2_LOCAL_SGD,
        TORCHFT_DILOCO,
        TORCHFT_FSDP2_DILOCO,
    )
}
"""All backends of this package by name."""
