"""The settings of the guard of training steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from accel_state.errors import Conflict, SettingError
from accel_state.kwargs import KwargsHandler
from accel_state.settings.integers import as_int

__all__ = ("Action", "StepGuard")

Action = Literal["raise", "skip", "rollback"]

_ACTIONS: Final[tuple[Action, ...]] = ("raise", "skip", "rollback")


@dataclass
class StepGuard(KwargsHandler):
    """Judges each optimizer step before it is made: whether it is finite, and whether it is a spike.

    All processes decide alike. What is done with a bad step:

    - "raise" raises `NonFiniteStep` or `SpikeStep` on every process, before weights change.
    - "skip" leaves the step out: optimizer, scheduler and averages do not move, and gradients are cleared.
    - "rollback" returns to the last snapshot, and the loader yields the batches since then again, without those of the
      bad step.

    `accelerator.guard.events` lists the bad steps, and `events.jsonl` in the project folder has a line for each.

    Args:
        nonfinite: what to do with a step whose loss or gradient norm is NaN or infinite.
        spike: a step is a spike if its loss or its gradient norm exceeds the median of the last good steps by more than
            this many robust standard deviations (1.4826 times the median absolute deviation). 20 is a cautious value.
            None: spikes are not judged.
        on_spike: what to do with a spike.
        window: the number of good steps with which a step is compared; at least five precede a judged one.
        snapshot_every: with "rollback", the number of good steps between two snapshots in host memory.
        max_consecutive: this many bad steps in a row raise, whatever the actions are.
        locate: after a bad step, repeat the forward pass to name the first module whose output was not finite. The
            inputs of the model are kept until the step.

    Raises:
        SettingError: a value is out of range.
        Conflict: "rollback" without `snapshot_every`.

    Example:
        >>> accelerator = Accelerator(kwargs_handlers=[StepGuard(nonfinite="skip", spike=20, on_spike="skip")])
    """

    nonfinite: Action = "raise"
    spike: float | None = None
    on_spike: Action = "raise"
    window: int = 128
    snapshot_every: int | None = None
    max_consecutive: int = 3
    locate: bool = False

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in _VALID}
        wrong = [f"{name}={value!r}" for name, value in values.items() if not _VALID[name](value)]
        if wrong:
            raise SettingError(
                f"Cannot guard steps with StepGuard({', '.join(wrong)}).",
                f"nonfinite and on_spike are one of {', '.join(map(repr, _ACTIONS))}; spike is a positive number or "
                "None; window is an int of at least 5, snapshot_every and max_consecutive of at least 1; locate is a "
                "bool.",
                "Give for example StepGuard(nonfinite='skip', spike=20, on_spike='skip').",
            )
        if "rollback" in self.actions and self.snapshot_every is None:
            raise Conflict(
                "Cannot guard steps with 'rollback'.",
                "A rollback returns to a snapshot, and snapshot_every is None, so none are taken.",
                "Give snapshot_every, the number of good steps between two snapshots, for example 100.",
            )

    @property
    def actions(self) -> set[Action]:
        """What may be done with a bad step."""
        return {self.nonfinite} if self.spike is None else {self.nonfinite, self.on_spike}


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


_VALID: Final[Mapping[str, Callable[[Any], bool]]] = {
    "nonfinite": lambda value: value in _ACTIONS,
    "spike": lambda value: value is None or _is_positive(value),
    "on_spike": lambda value: value in _ACTIONS,
    "window": lambda value: (as_int(value) or 0) >= 5,
    "snapshot_every": lambda value: value is None or (as_int(value) or 0) >= 1,
    "max_consecutive": lambda value: (as_int(value) or 0) >= 1,
    "locate": lambda value: isinstance(value, bool),
}
"""Whether a value of each setting is valid."""
