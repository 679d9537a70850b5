"""The interface of a precision: how forward, backward and the optimizer step are computed.

The class itself implements full precision; subclasses override what differs. A strategy with the capability
`own_precision` reads only `name` and `dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from accel_plugins.manifest import Axis
from accel_state.errors import Conflict

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_plugins.precision.config import AutocastKwargs, FP8BackendType
    from accel_state.transport.base import Transport

__all__ = ("Closure", "Precision")

Closure = Callable[[], Any]

_NULL_CONTEXT: AbstractContextManager[None] = nullcontext()


class Precision:
    """Full precision, and the base class of all other precisions.

    Attributes:
        name: "no", "fp16", "bf16" or "fp8".
        dtype: the dtype of forward passes; None: that of the weights.
        library: the library for 8-bit training.
        excludes: mesh axes that it does not work with.
        swaps_modules: whether `setup` replaces layers of the model. It is then called even if the backend has
            `own_precision`.
    """

    name: ClassVar[str] = "no"
    dtype: ClassVar[torch.dtype | None] = None
    library: ClassVar[FP8BackendType | None] = None
    excludes: ClassVar[frozenset[Axis]] = frozenset()
    swaps_modules: ClassVar[bool] = False

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler with its current scale, or None when the loss is not scaled."""
        return None

    @property
    def autocasts(self) -> bool:
        """Whether forward passes autocast."""
        return self.dtype is not None

    def switch_autocast(self, on: bool) -> None:
        """Switch autocasting on or off for models that are prepared later, and for regions.

        Raises:
            Conflict: this precision has no dtype to autocast to, or always autocasts.
        """
        if on != self.autocasts:
            raise Conflict(
                f"Cannot switch autocasting {'on' if on else 'off'} in a run with mixed_precision={self.name!r}.",
                "This precision requires autocasting." if self.autocasts else "This precision does not autocast.",
                "Pass mixed_precision='bf16' or 'fp16' to the Accelerator.",
            )

    def autocast_by(self, options: AutocastKwargs | None) -> None:
        """Set autocast options for models that are prepared later, and for regions."""

    def scale_by(self, scaler: torch.amp.GradScaler | None) -> None:
        """Use another loss scaler from the next backward on; None: do not scale.

        Raises:
            Conflict: this precision does not scale the loss.
        """
        if scaler is not None:
            raise Conflict(
                f"Cannot assign a gradient scaler in a run with mixed_precision={self.name!r}.",
                "Only fp16 training scales the loss.",
                "Pass mixed_precision='fp16' to the Accelerator.",
            )

    def step_together(self, transport: Transport) -> None:
        """Skip a step on all processes of the transport if the gradients of one of them overflowed.

        Called by a strategy whose processes have different shards of the gradients, when it is created.
        """

    def check(self, bundle: Bundle) -> None:
        """Raise if a bundle cannot train in this precision. Called by `prepare` first; must not change the bundle."""

    def setup(self, bundle: Bundle, per_parameter_sharding: bool = False) -> None:
        """Convert the models of a bundle to this precision.

        Called by `prepare`, in the phase that the manifest declares. Replaces items of the bundle's lists; replaced
        parameters keep their names. `per_parameter_sharding` is a capability of the backend.
        """
        bundle.models[:] = [self.prepare(model) for model in bundle.models]

    def prepare(self, model: Module) -> Module:
        """Make the model's forward compute in this precision.

        Called once for each model. May change the model in place.
        """
        return model

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A context in which operations compute in this precision. It may be entered repeatedly and nested."""
        return _NULL_CONTEXT

    def backward_scale(self, loss: Tensor) -> Tensor:
        """The loss, multiplied by the loss scale. Called by the strategy before every backward."""
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the loss scale, in place; repeated calls for a step have no effect.

        Called before gradients are clipped or read.
        """

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Step the user's optimizer; return False when the step was skipped because gradients overflowed.

        The result may be an object that waits for the device when it is read as a bool.
        """
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def overflow(self, optimizer: Optimizer) -> Tensor | None:
        """Two numbers on the device: 1 if an optimizer's gradients overflowed, else 0, and the loss scale.

        Called after gradients are unscaled, before the step. None if this precision does not scale the loss.
        """
        return None

    def learn_overflow(self, optimizer: Optimizer, overflowed: bool) -> None:
        """Learn what `overflow` returned, from a caller who has read it, so that `step` does not read it again."""

    def leave_out(self, optimizer: Optimizer) -> None:
        """Forget that an optimizer's gradients were unscaled, because its step is left out; the scale stays."""

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; empty when there is none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
