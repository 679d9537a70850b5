"""Settings of devices that torch_xla drives, which the devices, the backend for them and the launcher read."""

from __future__ import annotations

from accel_state.settings.schema import BOOLEAN, setting, table

__all__ = ("XLASettings",)


@table
class XLASettings:
    """How torch_xla computes; it has to know before the first tensor lies on a device."""

    fsdp: bool = setting(
        False,
        kind=BOOLEAN,
        variable="ACCEL_XLA_FSDP",
        help="Divide parameters and batches between all devices that a process has (FSDP v2 by SPMD).",
    )
    downcast_bf16: bool = setting(
        False,
        kind=BOOLEAN,
        variable="ACCELERATE_DOWNCAST_BF16",
        flag="--downcast_bf16",
        key="downcast_bf16",
        help="With bf16 on a TPU: hold doubles in 32 bits and floats in bfloat16.",
        group="TPU",
    )
