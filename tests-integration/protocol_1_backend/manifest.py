"""What the backend declares about itself; read without torch, whenever somebody lists or chooses backends."""

from __future__ import annotations

from typing import Final

from accel_plugins.manifest import Axis, Manifest

__all__ = ("MANIFEST",)

MANIFEST: Final = Manifest(
    name="example-1",
    config="protocol_1_backend.config:ExampleConfig",
    strategy="protocol_1_backend.strategy:TopKStrategy",
    label=None,
    axes=frozenset({Axis.REPLICATE}),
    tier=1,
)
