"""The mixed precisions that torch brings: bf16 by autocast, fp16 by autocast with a scaled loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from accel_plugins.precision.autocast import Region, autocast_forward
from accel_plugins.precision.base import Closure, Precision
from accel_plugins.precision.config import AutocastKwargs, GradScalerKwargs
from accel_state.devices.base import DeviceFamily
from accel_state.errors import NotOffered, NotReady

__all__ = ("Autocasting", "BFloat16", "Float16")


class Autocasting(Precision):
    """Forward passes autocast to `dtype`; outputs come back in fp32.

    Args:
        family: family of the device that computes.
        options: how to autocast; `accelerator.autocast` may override it for one region.
    """

    dtype: ClassVar[torch.dtype]

    def __init__(self, family: DeviceFamily, options: AutocastKwargs | None = None) -> None:
        self._family = family
        self._on = True
        self.autocast_by(options)

    @property
    def autocasts(self) -> bool:
        return self._on

    def switch_autocast(self, on: bool) -> None:
        self._on = on
        self._region = self._make(self._options)

    def autocast_by(self, options: AutocastKwargs | None) -> None:
        self._options = options or AutocastKwargs()
        self._region = self._make(self._options)

    def _make(self, options: AutocastKwargs) -> Region:
        return Region(self._family.name, self.dtype, options.enabled and self._on, options.cache_enabled)

    def prepare(self, model: Module) -> Module:
        return autocast_forward(model, self._region)

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        return self._region if options is None or options == self._options else self._make(options)


class BFloat16(Autocasting):
    """bf16 has the range of fp32, so nothing has to be scaled."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


class Float16(Autocasting):
    """fp16 gradients underflow, so the loss is scaled up and the gradients are scaled down before the step.

    The scale is updated before the next backward, after all optimizers have stepped: an update between two optimizers
    would divide the second one's gradients by another number than the loss was multiplied by.

    Args:
        family: family of the device that computes; it makes the scaler.
        options: how to autocast.
        scaling: how to scale.
    """

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16

    def __init__(
        self,
        family: DeviceFamily,
        options: AutocastKwargs | None = None,
        scaling: GradScalerKwargs | None = None,
    ) -> None:
        super().__init__(family, options)
        self._scaler = family.grad_scaler(**(scaling or GradScalerKwargs()).to_kwargs())
        self._stepped: set[int] = set()
        self._unscaled: dict[int, int] = {}
        self._backwards = 0

    @property
    def scaler(self) -> torch.amp.GradScaler:
        self._settle()
        return self._scaler

    def scale_by(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = self._family.grad_scaler(enabled=False) if scaler is None else scaler
        self._stepped.clear()
        self._unscaled.clear()

    def _settle(self) -> None:
        """Update the scale when optimizers have stepped since the last update."""
        if self._stepped:
            self._scaler.update()
            self._stepped.clear()
            self._unscaled.clear()

    def backward_scale(self, loss: Tensor) -> Tensor:
        self._settle()
        self._backwards += 1
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        if self._unscaled.get(id(optimizer)) == self._backwards or not _has_gradients(optimizer):
            return
        try:
            self._scaler.unscale_(optimizer)
        except RuntimeError as error:
            if id(optimizer) not in self._unscaled:
                raise
            raise NotReady(
                "Cannot unscale gradients (for clipping, for example).",
                f"They were unscaled before and another backward has added scaled ones: {error}.",
                "Clip or unscale only when gradients are complete: `if accelerator.sync_gradients: ...`.",
            ) from error
        self._unscaled[id(optimizer)] = self._backwards

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        if closure is not None:
            raise NotOffered(
                "optimizer.step(closure) was called in fp16 mixed precision.",
                "A closure computes gradients again, and the scaler cannot follow that.",
                "Train in bf16 or full precision, or call step() without a closure.",
            )
        if not self._scaler.is_enabled() or not _has_gradients(optimizer):
            return super().step(optimizer)
        if id(optimizer) in self._stepped:
            self._settle()
        self._scaler.step(optimizer)
        self._stepped.add(id(optimizer))
        return not any(found.item() for found in self._scaler._found_inf_per_device(optimizer).values())

    def state_dict(self) -> dict[str, object]:
        self._settle()
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._settle()
        self._scaler.load_state_dict(dict(state))


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
