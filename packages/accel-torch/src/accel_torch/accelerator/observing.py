"""The Accelerator's page about observing a run: profiles, and what was found out about models."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from accel_state.labels import DEVICE_MAP
from accel_torch.parts import Parts

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.profiler import profile

    from accel_torch.profile import ProfileKwargs

__all__ = ("ObservingPage",)


class ObservingPage(Parts):
    """Looking at what happens."""

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """A block that is profiled on every process; gives torch's profiler.

        Args:
            profile_handler: replaces the one of the Accelerator; see `ProfileKwargs`.

        Example:
            >>> with accelerator.profile(ProfileKwargs(output_trace_dir="traces")) as profiler:
            ...     for batch in loader:
            ...         train(batch)
            ...         profiler.step()
        """
        from accel_torch.profile import ProfileKwargs, profiled

        handler = profile_handler or self._options.handler(ProfileKwargs) or ProfileKwargs()
        return profiled(self.state._process, handler)

    def verify_device_map(self, model: Module) -> bool:
        """Whether a device map spreads a model over several devices, so that it cannot train on several processes."""
        return any(len(getattr(module, DEVICE_MAP, None) or {}) > 1 for module in model.modules())
