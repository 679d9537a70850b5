"""What precisions of 8 bits have in common: they compute in bf16 where 8 bits do not reach."""

from __future__ import annotations

from typing import ClassVar

import torch

from accel_plugins.manifest import Axis
from accel_plugins.precision.fp8_library import FP8BackendType
from accel_plugins.precision.native import Autocasting

__all__ = ("Float8",)


class Float8(Autocasting):
    """Linear layers compute in 8 bits, everything else in bf16."""

    name: ClassVar[str] = "fp8"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    library: ClassVar[FP8BackendType]
    excludes: ClassVar[frozenset[Axis]] = frozenset({Axis.TENSOR})
    exchanges_layers: ClassVar[bool] = True
