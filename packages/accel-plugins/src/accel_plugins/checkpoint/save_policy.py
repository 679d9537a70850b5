"""How often a run saves automatically: plain data, without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from accel_state.errors import SettingError
from accel_state.settings.integers import as_int

__all__ = ("ContinuousSavePolicy",)

_SECONDS_OF_UNITS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class ContinuousSavePolicy:
    """Save continuously during training, as often as a fraction of the run's time allows.

    Each save begins at the first boundary between two steps at which the previous save is complete, and all saves
    together, plus one more like the last, slow the run down by at most `max_overhead`.

    Args:
        max_overhead: the fraction of the run's time that saving may cost, above 0 and at most 1.
        keep_last: number of newest checkpoints to keep.
        keep_every: a period, in seconds or as "90s", "30min", "1h", "1d". Of the older checkpoints, the first of each
            period is kept. None: keep none of them.

    Raises:
        SettingError: a value is invalid.

    Example:
        >>> ContinuousSavePolicy(keep_every="30min").period
        1800.0
    """

    max_overhead: float = 0.02
    keep_last: int = 3
    keep_every: str | float | None = "1h"

    def __post_init__(self) -> None:
        keep_last = as_int(self.keep_last)
        rules = {
            "max_overhead": (0 < self.max_overhead <= 1, "a number above 0 and at most 1, such as 0.02 for 2 %"),
            "keep_last": (keep_last is not None and keep_last >= 1, "an integer of at least 1"),
            "keep_every": (
                self.keep_every is None or _seconds(self.keep_every) > 0,
                "a positive number of seconds, a period such as '30min' or '1h', or None",
            ),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise SettingError(
                    f"Cannot use ContinuousSavePolicy({name}={getattr(self, name)!r}).",
                    f"The value must be {rule}.",
                    "Change it, or remove it to use the default.",
                )

    @property
    def period(self) -> float | None:
        """`keep_every` in seconds."""
        return None if self.keep_every is None else _seconds(self.keep_every)


def _seconds(period: str | float) -> float:
    """A period in seconds; 0 if the value is not a valid period."""
    if not isinstance(period, str):
        return float(period)
    match = re.fullmatch(rf"([0-9.]+) *({'|'.join(_SECONDS_OF_UNITS)})", period.strip())
    try:
        return float(match[1]) * _SECONDS_OF_UNITS[match[2]] if match else 0.0
    except ValueError:
        return 0.0
