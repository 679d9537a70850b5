"""The Accelerator, and everything public of the packages below it, under one roof."""

from __future__ import annotations

from typing import TYPE_CHECKING

import accel_bigmodel
import accel_data
import accel_ops
import accel_plugins
import accel_state
import accel_tracking
from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_bigmodel import *  # noqa: F403
    from accel_data import *  # noqa: F403
    from accel_ops import *  # noqa: F403
    from accel_plugins import *  # noqa: F403
    from accel_state import *  # noqa: F403
    from accel_torch.accelerator import Accelerator as Accelerator
    from accel_torch.local_sgd import LocalSGD as LocalSGD
    from accel_torch.misuse import MisuseWarning as MisuseWarning
    from accel_torch.profile import ProfileKwargs as ProfileKwargs
    from accel_torch.profile import ProfilerActivity as ProfilerActivity
    from accel_torch.sentinel import ReplicasDiffer as ReplicasDiffer
    from accel_tracking import *  # noqa: F403

__all__ = ["Accelerator", "LocalSGD", "MisuseWarning", "ProfileKwargs", "ProfilerActivity", "ReplicasDiffer"]
__all__ += accel_bigmodel.__all__
__all__ += accel_data.__all__
__all__ += accel_ops.__all__
__all__ += accel_plugins.__all__
__all__ += accel_state.__all__
__all__ += accel_tracking.__all__

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accel_torch.accelerator": ("Accelerator",),
        "accel_torch.profile": ("ProfileKwargs", "ProfilerActivity"),
        "accel_torch.misuse": ("MisuseWarning",),
        "accel_torch.sentinel": ("ReplicasDiffer",),
        "accel_torch.local_sgd": ("LocalSGD",),
        "accel_bigmodel": accel_bigmodel.__all__,
        "accel_data": accel_data.__all__,
        "accel_ops": accel_ops.__all__,
        "accel_plugins": accel_plugins.__all__,
        "accel_state": accel_state.__all__,
        "accel_tracking": accel_tracking.__all__,
    },
)
