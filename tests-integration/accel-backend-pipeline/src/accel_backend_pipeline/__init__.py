"""A backend for accel: the layers of a model divided over processes."""

from __future__ import annotations

from accel_backend_pipeline.config import PipelineConfig

__all__ = ("PipelineConfig",)
