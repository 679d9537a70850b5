"""Steps with a gradient scaler: when they wait for the device, and which processes skip together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from accel_state.errors import NotOffered

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_state.transport.base import Transport

__all__ = ("ShardGradScaler", "SteppedOnDevice", "scaled_step")


def scaled_step(scaler: torch.amp.GradScaler, optimizer: Optimizer, overflowed: bool | None = None) -> bool:
    """Step an optimizer whose gradients are scaled; return False when the step was skipped.

    Args:
        scaler: the scaler.
        optimizer: the user's optimizer.
        overflowed: whether the gradients overflowed, if that was read already; then this does not wait.

    It waits for the device once, to decide whether to step. A fused optimizer decides on the device: the result is then
    a `SteppedOnDevice`, which waits when it is read.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False) or type(scaler).step is not torch.amp.GradScaler.step:
        scaler.step(optimizer)
        if overflowed is not None:
            return not overflowed
        # Copies, because the scaler adds up the overflows of several optimizers in place.
        overflows = [overflow.clone() for overflow in scaler._found_inf_per_device(optimizer).values()]
        return cast("bool", SteppedOnDevice(overflows))
    # The same as `scaler.step`, which does not return whether it has stepped.
    if not scaler._found_inf_per_device(optimizer):
        scaler.unscale_(optimizer)
    if overflowed is None:
        overflowed = any(overflow.item() for overflow in scaler._found_inf_per_device(optimizer).values())
    if overflowed:
        return False
    optimizer.step()
    return True


class SteppedOnDevice:
    """Whether a step was made, where a kernel of the device decides that; reading it waits for the device.

    Args:
        overflows: one for each device; not 0 if gradients overflowed.
    """

    __slots__ = ("_overflows", "_skipped")

    def __init__(self, overflows: list[Tensor]) -> None:
        self._overflows, self._skipped = overflows, False

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped."""
        if self._overflows:
            self._skipped = any(overflow.item() for overflow in self._overflows)
            self._overflows = []
        return self._skipped

    def __bool__(self) -> bool:
        return not self.skipped


class ShardGradScaler(torch.amp.GradScaler):
    """A gradient scaler of which all processes skip a step if the gradients of one of them overflowed.

    Each process has other shards, so a plain scaler sees only some of the overflows. torch combines those along the
    mesh of the first gradient, which may lack axes that shard others, and refuses plain gradients beside DTensors.

    Args:
        plain: the scaler whose scale and options it takes over.
        transport: connects the processes that step together.
    """

    def __init__(self, plain: torch.amp.GradScaler, transport: Transport) -> None:
        super().__init__(transport.device.type, enabled=plain.is_enabled())
        if plain.is_enabled():
            self.load_state_dict(plain.state_dict())
        self._transport = transport

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the local shards; return whether those of any process overflowed.

        torch calls this before each step, also on a process without gradients.
        """
        overflows = [found_inf]
        for (device, dtype), shards in _shards_by_kind(optimizer).items():
            if dtype is torch.float16 and not allow_fp16:
                raise NotOffered(
                    f"Cannot unscale the gradients of {type(optimizer).__name__}.",
                    "They are in fp16, in which small gradients become zero when they are unscaled.",
                    "Keep the weights in fp32; mixed_precision='fp16' computes in fp16 all the same.",
                )
            overflow = torch.zeros_like(found_inf, device=device)
            native: Any = torch
            native._amp_foreach_non_finite_check_and_unscale_(shards, overflow, inv_scale.to(device))
            overflows.append(overflow.to(found_inf.device))
        # 1 and not a count: fused optimizers skip at exactly 1.
        together = torch.stack(overflows).amax(0)
        self._transport.all_reduce(together, "max").wait()
        return {together.device: together}


def _shards_by_kind(optimizer: Optimizer) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """The local shards of an optimizer's gradients, by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            shard: Tensor = gradient.to_local() if hasattr(gradient, "placements") else gradient.detach()
            shard = shard._values() if shard.is_sparse else shard
            groups.setdefault((shard.device, shard.dtype), []).append(shard)
    return groups
