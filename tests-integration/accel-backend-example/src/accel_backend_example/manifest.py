"""What the backend declares about itself; read without torch, whenever somebody lists or chooses backends."""

from __future__ import annotations

from typing import Final

from accel_plugins.manifest import Axis, Capabilities, Manifest

__all__ = ("MANIFEST",)

MANIFEST: Final = Manifest(
    name="example",
    config="accel_backend_example.config:ExampleConfig",
    strategy="accel_backend_example.strategy:TopKStrategy",
    label=None,
    axes=frozenset({Axis.REPLICATE}),
    capabilities=Capabilities(unused_parameters=False),
    tier=1,
    protocol=3,
)
