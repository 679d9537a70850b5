"""The ways in which gradients can travel between processes, by name."""

from __future__ import annotations

from accel_state.labels import BaseEnum

__all__ = ("DDPCommunicationHookType",)


class DDPCommunicationHookType(BaseEnum):
    """How gradients travel between processes."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"
