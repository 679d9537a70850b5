"""Settings of mixed precision; plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.errors import SettingError
from accel_state.kwargs import KwargsHandler

__all__ = ("AutocastKwargs", "GradScalerKwargs")


@dataclass
class AutocastKwargs(KwargsHandler):
    """How forward passes autocast.

    Args:
        enabled: False computes in the dtype of the weights.
        cache_enabled: keep the weights cast during one forward; None leaves it to torch.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """How the loss is scaled when training in fp16; the arguments of `torch.amp.GradScaler`.

    Args:
        init_scale: factor at the start.
        growth_factor: what the scale is multiplied by after `growth_interval` steps without overflow.
        backoff_factor: what it is multiplied by after an overflow.
        growth_interval: steps without overflow before the scale grows.
        enabled: False trains without scaling.

    Raises:
        SettingError: a factor is in a range in which the scale would not move as described.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        rules = {
            "init_scale": (self.init_scale > 0, "more than 0"),
            "growth_factor": (self.growth_factor > 1, "more than 1"),
            "backoff_factor": (0 < self.backoff_factor < 1, "between 0 and 1"),
            "growth_interval": (self.growth_interval >= 1, "at least 1"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise SettingError(
                    f"Cannot use GradScalerKwargs({name}={getattr(self, name)!r}).",
                    f"It has to be {rule}.",
                    "Leave it out for torch's default.",
                )
