"""Settings of data parallelism; plain data, without torch."""

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
    """How gradients travel between processes."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


_OURS: Final = ("comm_hook", "comm_wrapper", "comm_state_option")


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """How models are wrapped in `torch.nn.parallel.DistributedDataParallel`, whose arguments most fields are.

    Args:
        dim: as there.
        broadcast_buffers: take the buffers of the first process at every forward.
        bucket_cap_mb: size in MiB of the buckets in which gradients travel.
        find_unused_parameters: look for parameters that took no part in a forward; needed when there are any.
        check_reduction: as there.
        gradient_as_bucket_view: let gradients be views of the buckets, which saves their memory once.
        static_graph: promise that every iteration uses the same parameters in the same order.
        comm_hook: compress gradients while they travel; None is NO.
        comm_wrapper: compress what the hook makes of them once more: NO, FP16 or BF16.
        comm_state_option: arguments of the `PowerSGDState` of a PowerSGD hook; None for no arguments.

    Raises:
        SettingError: a hook or wrapper of that name does not exist.
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

    def to_dict(self, ignore_keys: tuple[str, ...] = _OURS) -> dict[str, Any]:
        """Fields by name, without those that `DistributedDataParallel` does not take."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Make a `DistributedDataParallel` model send its gradients the way these settings say."""
        from accel_plugins.ddp.hooks import register

        register(model, self.comm_hook.value, self.comm_wrapper.value, self.comm_state_option)


def _hook_type(
    name: str, given: DDPCommunicationHookType | str | None, allowed: list[DDPCommunicationHookType]
) -> DDPCommunicationHookType:
    try:
        hook = DDPCommunicationHookType.NO if given is None else DDPCommunicationHookType(given)
    except ValueError:
        hook = None
    if hook is None or hook not in allowed:
        raise SettingError(
            f"Cannot use DistributedDataParallelKwargs({name}={str(given)!r}).",
            f"The value must be one of {', '.join(map(str, allowed))}.",
            "Use a member of DDPCommunicationHookType.",
        )
    return hook
