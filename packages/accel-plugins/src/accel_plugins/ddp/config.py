"""Settings of data parallelism: plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from accel_state.errors import SettingError
from accel_state.kwargs import KwargsHandler
from accel_state.labels import BaseEnum

__all__ = (
    "DDPCommunicationHookType",
    "DistributedDataParallelKwargs",
)


class DDPCommunicationHookType(BaseEnum):
    """How gradients are compressed for communication between processes."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


_HOOK_FIELDS: Final = ("comm_hook", "comm_wrapper", "comm_state_option")


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """How models are wrapped in `torch.nn.parallel.DistributedDataParallel`; most fields are its arguments.

    Args:
        dim: as in `DistributedDataParallel`.
        broadcast_buffers: broadcast the buffers of the first process at every forward.
        bucket_cap_mb: size of gradient buckets in MiB.
        find_unused_parameters: search for parameters that a forward did not use; needed if there are any.
        check_reduction: as in `DistributedDataParallel`.
        gradient_as_bucket_view: make gradients views of the buckets, which saves memory of the size of the gradients.
        static_graph: promise that every iteration uses the same parameters in the same order.
        comm_hook: the compression of gradients for communication; None means NO.
        comm_wrapper: a further compression of the hook's output: NO, FP16 or BF16.
        comm_state_option: arguments for the `PowerSGDState` of a PowerSGD hook; None: no arguments.

    Raises:
        SettingError: no hook or wrapper has that name.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: Literal[DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16] = (
        DDPCommunicationHookType.NO
    )
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = _hook_type("comm_hook", self.comm_hook, list(DDPCommunicationHookType))
        self.comm_state_option = self.comm_state_option or {}
        wrappers = [DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16]
        wrapper: Any = _hook_type("comm_wrapper", self.comm_wrapper, wrappers)
        self.comm_wrapper = wrapper

    def to_dict(self, ignore_keys: tuple[str, ...] = _HOOK_FIELDS) -> dict[str, Any]:
        """The fields that are arguments of `DistributedDataParallel`, by name."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Register the communication hook of these settings with a `DistributedDataParallel` model."""
        from accel_plugins.ddp.hooks import register

        register(model, self.comm_hook.value, self.comm_wrapper.value, self.comm_state_option)


def _hook_type(
    name: str, value: DDPCommunicationHookType | str | None, allowed: list[DDPCommunicationHookType]
) -> DDPCommunicationHookType:
    try:
        hook = DDPCommunicationHookType.NO if value is None else DDPCommunicationHookType(value)
    except ValueError:
        hook = None
    if hook is None or hook not in allowed:
        raise SettingError(
            f"Cannot use DistributedDataParallelKwargs({name}={str(value)!r}).",
            f"The value must be one of {', '.join(map(str, allowed))}.",
            "Use a member of DDPCommunicationHookType.",
        )
    return hook
