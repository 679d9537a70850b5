"""The interface of a precision: how forward, backward and the optimizer step are computed.

The class itself is the answer for full precision; others override what they do differently. A strategy that owns the
duty PRECISION reads `name` and `dtype` and does the rest by itself.
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

__all__ = ("Closure", "Precision")

Closure = Callable[[], Any]

_NOTHING: AbstractContextManager[None] = nullcontext()


class Precision:
    """Full precision, and what every other precision overrides.

    Attributes:
        name: "no", "fp16", "bf16" or "fp8".
        dtype: what forward passes compute in; None is the dtype of the weights.
        library: what computes in 8 bits.
        excludes: axes of the mesh that it does not work with.
        swaps_modules: whether `setup` is called also where the strategy owns the duty PRECISION: it exchanges
            layers of the model, which no strategy does.
    """

    name: ClassVar[str] = "no"
    dtype: ClassVar[torch.dtype | None] = None
    library: ClassVar[FP8BackendType | None] = None
    excludes: ClassVar[frozenset[Axis]] = frozenset()
    swaps_modules: ClassVar[bool] = False

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The scaler of the loss, up to date, or None when nothing is scaled."""
        return None

    @property
    def autocasts(self) -> bool:
        """Whether forward passes autocast."""
        return self.dtype is not None

    def switch_autocast(self, on: bool) -> None:
        """Autocast models that are prepared from now on, and regions, or do not.

        Raises:
            Conflict: this precision has no dtype to autocast to, or always autocasts.
        """
        if on != self.autocasts:
            raise Conflict(
                f"Cannot switch autocasting {'on' if on else 'off'} in a run with mixed_precision={self.name!r}.",
                "This precision needs autocasting." if self.autocasts else "This precision has no dtype for it.",
                "Give mixed_precision='bf16' or 'fp16' to the Accelerator.",
            )

    def autocast_by(self, options: AutocastKwargs | None) -> None:
        """Autocast models that are prepared from now on, and regions, in another way."""

    def scale_by(self, scaler: torch.amp.GradScaler | None) -> None:
        """Scale the loss by another scaler from the next backward on; by none where it is None.

        Raises:
            Conflict: this precision scales no loss.
        """
        if scaler is not None:
            raise Conflict(
                f"Cannot assign a gradient scaler in a run with mixed_precision={self.name!r}.",
                "Only fp16 scales the loss.",
                "Give mixed_precision='fp16' to the Accelerator.",
            )

    def check(self, bundle: Bundle) -> None:
        """Refuse what cannot work; called by `prepare` before anything is touched. Must change nothing."""

    def setup(self, bundle: Bundle, per_parameter_sharding: bool = False) -> None:
        """Make the models of a bundle compute in this precision.

        Called by `prepare`, where the backend's manifest puts it. Replaces items of the bundle's lists; parameters that
        are replaced keep their names. `per_parameter_sharding` is what the strategy says of itself.
        """
        bundle.models[:] = [self.prepare(model) for model in bundle.models]

    def prepare(self, model: Module) -> Module:
        """Make the model's forward compute in this precision.

        Called once for each model. May change the model in place.
        """
        return model

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A context in which operations compute in this precision; may be entered any number of times."""
        return _NOTHING

    def backward_scale(self, loss: Tensor) -> Tensor:
        """The loss as backward has to see it. Called by the strategy before every backward."""
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the optimizer's gradients to their true size, in place; once per step, a repeated call changes nothing.

        Called before gradients are clipped or looked at.
        """

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Step the user's optimizer; False when the step was skipped because gradients overflowed."""
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold; empty when there is nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
