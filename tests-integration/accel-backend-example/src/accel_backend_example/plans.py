"""The plans of the backend in `accel estimate-memory --training`: to send all entries of gradients, or a tenth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import empty_like
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from accel_plugins.memory_plans import MemoryPlans, Overhead

__all__ = ("TopKPlans",)


class TopKPlans(MemoryPlans):
    """Data parallelism that holds, beside the buckets, what it has not sent yet."""

    variants: ClassVar[tuple[str, ...]] = ("", "keep=0.1")

    def settings(self, variant: str, blocks: Sequence[str], recompute: bool) -> Mapping[str, Any]:
        return {"keep": 0.1} if variant else {}

    def parallelize(
        self, model: Module, mesh: DeviceMesh, settings: Mapping[str, Any], mixed_precision: str
    ) -> Overhead:
        buckets, _ = super().parallelize(model, mesh, settings, mixed_precision)
        keep = settings.get("keep", 1.0)
        unsent = [] if keep == 1.0 else [empty_like(bucket) for bucket in buckets]
        # Each entry travels with its place, which takes 4 bytes. A process sends its own and reads those of all.
        sent = sum(math.ceil(keep * bucket.numel()) * (bucket.element_size() + 4) for bucket in buckets)
        return Overhead([*buckets, *unsent], sent * (1 + mesh.size()))
