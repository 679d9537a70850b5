"""The mixed precisions of torch: bf16 by autocast, fp16 by autocast with loss scaling.

An autocast region can be entered repeatedly, and a model's forward can run inside one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MethodType, TracebackType
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from accel_ops.conversion import convert_to_fp32
from accel_plugins.precision.base import Closure, Precision
from accel_plugins.precision.config import AutocastKwargs, GradScalerKwargs
from accel_plugins.precision.scaling import ShardGradScaler, scaled_step
from accel_state.devices.base import DeviceFamily
from accel_state.errors import NotOffered, NotReady
from accel_state.transport.base import Transport

__all__ = ("ORIGINAL_FORWARD", "Autocasting", "BFloat16", "Float16", "Region", "autocast_forward", "restore_forward")

ORIGINAL_FORWARD: Final = "_original_forward"
"""Attribute of a model with autocasting forward: its original forward."""


class _Entered(threading.local):
    def __init__(self) -> None:
        self.stack: list[torch.autocast] = []


class Region:
    """`torch.autocast` with fixed arguments that may be entered any number of times, nested and from several threads.

    Args:
        device_type: type of torch device, such as "cpu".
        dtype: the dtype of eligible operations.
        enabled: False: switch autocast off inside.
        cache_enabled: cache cast weights until the outermost region ends; None: torch's default.

    Attributes:
        free: torch contexts that are not entered at the moment; creating one takes longer than entering it.
    """

    __slots__ = ("_arguments", "_entered", "free")

    def __init__(
        self, device_type: str, dtype: torch.dtype, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        self._arguments = (device_type, dtype, enabled, cache_enabled)
        self.free: list[torch.autocast] = []
        self._entered = _Entered()

    def fresh(self) -> torch.autocast:
        """A new `torch.autocast` with these arguments."""
        return torch.autocast(*self._arguments)

    def __enter__(self) -> None:
        try:
            instance = self.free.pop()
        except IndexError:
            instance = self.fresh()
        instance.__enter__()  # type: ignore[no-untyped-call]
        self._entered.stack.append(instance)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        instance = self._entered.stack.pop()
        instance.__exit__(kind, error, trace)
        self.free.append(instance)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Region, self._arguments)


def autocast_forward(model: Module, region: Region) -> Module:
    """Make `model.forward` run inside the region and return fp32 instead of smaller float types; return the model.

    The new forward is a method of the instance: a copy of the model has a separate one, and an unpickled model has the
    forward of its class.
    """
    original = model.forward
    wrapped = functools.wraps(getattr(original, "__func__", original))(_forward_inside(region))
    setattr(model, ORIGINAL_FORWARD, original)
    setattr(model, "forward", MethodType(wrapped, model))  # noqa: B010 - a type checker refuses the assignment
    return model


def restore_forward(model: Module) -> Module:
    """Undo `autocast_forward`, if it was applied; return the model."""
    attributes = vars(model)
    original = attributes.pop(ORIGINAL_FORWARD, None)
    if original is not None:
        attributes.pop("forward", None)
        of_its_class = getattr(original, "__func__", None) is type(model).forward
        if not of_its_class:
            attributes["forward"] = original
    return model


def _forward_inside(region: Region) -> Any:
    # Without compilation this needs one call, and `is_compiling` two.
    traced, free = torch.compiler.is_dynamo_compiling, region.free

    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        original: Any = self._original_forward
        if traced():
            # Dynamo can trace torch's context, but not the code around it.
            with region.fresh():
                return convert_to_fp32(original(*args, **kwargs))
        # The code of entering the region, without the cost of calls.
        try:
            instance = free.pop()
        except IndexError:
            instance = region.fresh()
        with instance:
            output = original(*args, **kwargs)
        free.append(instance)
        if type(output) is Tensor:
            return output.float() if output.dtype in _NARROW_DTYPES else output
        return convert_to_fp32(output)

    return forward


_NARROW_DTYPES: Final = frozenset({torch.float16, torch.bfloat16})


class Autocasting(Precision):
    """Forward passes autocast to `dtype`; outputs are converted to fp32.

    Args:
        family: the family of the training device.
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
    """bf16 has the range of fp32, so the loss is not scaled."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


class Float16(Autocasting):
    """fp16 gradients can underflow, so the loss is scaled up and gradients are scaled down before the step.

    The scale is updated before the next backward, after all optimizers have stepped. After an update between two
    optimizers, the second one's gradients would be divided by a scale that the loss was not multiplied by.

    Args:
        family: the family of the training device; it creates the scaler.
        options: how to autocast.
        scaling: how to scale the loss.
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
        self._together: Transport | None = None
        self._stepped: set[int] = set()
        self._unscaled: dict[int, int] = {}
        self._overflowed: dict[int, bool] = {}
        self._backwards = 0

    @property
    def scaler(self) -> torch.amp.GradScaler:
        self._update_scale()
        return self._scaler

    def scale_by(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = self._family.grad_scaler(enabled=False) if scaler is None else scaler
        # A scaler with methods of its own decides itself.
        if self._together is not None and type(self._scaler) is torch.amp.GradScaler:
            self._scaler = ShardGradScaler(self._scaler, self._together)
        self._stepped.clear()
        self._unscaled.clear()

    def step_together(self, transport: Transport) -> None:
        if self._together is None:
            self._together = transport
            self.scale_by(self._scaler)

    def _update_scale(self) -> None:
        """Update the scale if optimizers have stepped since the last update."""
        if self._stepped:
            self._scaler.update()
            self._stepped.clear()
            self._unscaled.clear()

    def backward_scale(self, loss: Tensor) -> Tensor:
        self._update_scale()
        self._backwards += 1
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        if self._unscaled.get(id(optimizer)) == self._backwards or not self._takes_part(optimizer):
            return
        try:
            self._scaler.unscale_(optimizer)
        except RuntimeError as error:
            if id(optimizer) not in self._unscaled:
                raise
            raise NotReady(
                "Cannot unscale gradients (for clipping, for example).",
                f"They were already unscaled, and then another backward added scaled gradients: {error}.",
                "Clip or unscale only when gradients are complete: `if accelerator.sync_gradients: ...`.",
            ) from error
        self._unscaled[id(optimizer)] = self._backwards

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        if closure is not None:
            raise NotOffered(
                "Cannot call optimizer.step(closure) in fp16 mixed precision.",
                "The gradient scaler does not support closures, because they compute gradients again.",
                "Train in bf16 or full precision, or call step() without a closure.",
            )
        if not self._scaler.is_enabled() or not self._takes_part(optimizer):
            return super().step(optimizer)
        if id(optimizer) in self._stepped:
            self._update_scale()
        self._stepped.add(id(optimizer))
        return scaled_step(self._scaler, optimizer, self._overflowed.pop(id(optimizer), None))

    def overflow(self, optimizer: Optimizer) -> Tensor | None:
        overflows = list(self._scaler._found_inf_per_device(optimizer).values()) if self._scaler.is_enabled() else []
        scale = self._scaler._scale
        if not overflows or scale is None:
            return None
        any_of = torch.stack([overflow.to(scale.device) for overflow in overflows]).amax()
        return torch.stack([any_of.reshape(()), scale.reshape(())])

    def learn_overflow(self, optimizer: Optimizer, overflowed: bool) -> None:
        self._overflowed[id(optimizer)] = overflowed

    def leave_out(self, optimizer: Optimizer) -> None:
        self._scaler._per_optimizer_states.pop(id(optimizer), None)
        self._unscaled.pop(id(optimizer), None)
        self._overflowed.pop(id(optimizer), None)

    def _takes_part(self, optimizer: Optimizer) -> bool:
        """Whether the scaler steps an optimizer; if processes step together, also one without gradients here."""
        return self._together is not None or any(
            parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]
        )

    def state_dict(self) -> dict[str, object]:
        self._update_scale()
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._update_scale()
        self._scaler.load_state_dict(dict(state))
