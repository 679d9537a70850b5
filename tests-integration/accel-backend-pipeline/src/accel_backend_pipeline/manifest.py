"""What the backend declares about itself; read without torch."""

from __future__ import annotations

from typing import Final

from accel_plugins.manifest import Axis, Capabilities, Manifest, ObjectKind

__all__ = ("MANIFEST",)

MANIFEST: Final = Manifest(
    name="pipeline",
    config="accel_backend_pipeline.config:PipelineConfig",
    strategy="accel_backend_pipeline.strategy:PipelineStrategy",
    axes=frozenset({"pp", Axis.REPLICATE, Axis.TENSOR}),
    together=frozenset({ObjectKind.MODEL, ObjectKind.OPTIMIZER}),
    capabilities=Capabilities(
        loss_in_forward=True,
        own_accumulation=True,
        own_precision=True,
        whole_model=False,
        no_sync=False,
        join=False,
        average_parameters=False,
        unused_parameters=False,
        several_models=False,
        local_passes=False,
        partial_gradients=False,
        fp16=False,
    ),
    protocol=3,
)
