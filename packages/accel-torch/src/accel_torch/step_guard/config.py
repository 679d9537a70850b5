"""The settings of the guard of training steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

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
        wrong = [f"{name}={getattr(self, name)!r}" for name in ("nonfinite", "on_spike") if self._is_unknown(name)]
        least = {"window": 5, "snapshot_every": 1, "max_consecutive": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if (value is not None or name != "snapshot_every") and (as_int(value) or 0) < smallest:
                wrong.append(f"{name}={value!r}")
        if self.spike is not None and (
            isinstance(self.spike, bool)
            or not isinstance(self.spike, (int, float))
            or not 0 < self.spike < float("inf")
        ):
            wrong.append(f"spike={self.spike!r}")
        if not isinstance(self.locate, bool):
            wrong.append(f"locate={self.locate!r}")
        if wrong:
            raise SettingError(
                f"Cannot guard steps with StepGuard({', '.join(wrong)}).",
                f"nonfinite and on_spike are one of {', '.join(map(repr, _ACTIONS))}; spike is a positive number or "
                "None; window is an int of at least 5, snapshot_every and max_consecutive of at least 1; locate is a "
                "bool.",
                "Give for example StepGuard(nonfinite='skip', spike=20, on_spike='skip').",
            )
        if self.rolls_back and self.snapshot_every is None:
            raise Conflict(
                "Cannot guard steps with 'rollback'.",
                "A rollback returns to a snapshot, and snapshot_every is None, so none are taken.",
                "Give snapshot_every, the number of good steps between two snapshots, for example 100.",
            )

    def _is_unknown(self, name: str) -> bool:
        return getattr(self, name) not in _ACTIONS

    @property
    def rolls_back(self) -> bool:
        """Whether a bad step may return to a snapshot."""
        return "rollback" in (self.nonfinite, self.on_spike if self.spike is not None else "")

    @property
    def skips(self) -> bool:
        """Whether a bad step may be left out."""
        return "skip" in (self.nonfinite, self.on_spike if self.spike is not None else "")
