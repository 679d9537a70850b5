"""The history of an optimizer's steps: what a good one looks like, and the verdict on the next one."""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_torch.step_guard.config import StepGuard

__all__ = ("History", "Judgement", "StepHistory")

_LEAST: Final = 5
"""Good values that precede a judged one."""

_CONSISTENT: Final = 1.4826
"""Median absolute deviations in a standard deviation of a normal distribution."""

_ROUNDING: Final = 1e-6
"""Smallest deviation, relative to the median: values that differ by rounding alone are not spikes."""


_JUMP: Final = 5.0
"""A learning rate this many times its median explains a spike."""


class Judgement(NamedTuple):
    """Why a step is bad.

    Args:
        kind, quantity, value, limit: see `StepEvent`.
    """

    kind: Literal["nonfinite", "spike"]
    quantity: Literal["loss", "norm"]
    value: float
    limit: float | None = None


class StepHistory:
    """The steps of one optimizer.

    Args:
        index: its place in the order of preparation.
        optimizer: the user's optimizer; weakly referenced.
        guard: the settings.
        steps: steps of the run before its first one.

    Attributes:
        optimizer: a weak reference to it.
        steps: its steps, also those that were left out.
        good: its good steps.
        bad_in_a_row: bad steps since the last good one; a return to a snapshot does not change it.
    """

    def __init__(self, index: int, optimizer: Optimizer, guard: StepGuard, steps: int) -> None:
        self.index, self.optimizer = index, weakref.ref(optimizer)
        self.steps, self.good, self.bad_in_a_row, self._last_bad = steps, 0, 0, 0
        self._finds_spikes = guard.spike is not None
        self._losses, self._norms = (History(guard.window, guard.spike or math.inf) for _ in range(2))
        self._rates: deque[float] = deque(maxlen=guard.window)
        self._clipped: list[int] = []
        self._outside: list[weakref.ref[Tensor]] = []

    def parameters(self) -> list[Tensor]:
        """The parameters of the optimizer."""
        optimizer = self.optimizer()
        return [] if optimizer is None else [one for group in optimizer.param_groups for one in group["params"]]

    def is_covered_by(self, clipped: list[int]) -> bool:
        """Whether parameters, given by id, include all of the optimizer's that have gradients."""
        if clipped != self._clipped:
            self._clipped, inside = clipped, set(clipped)
            self._outside = [weakref.ref(one) for one in self.parameters() if id(one) not in inside]
        return not self._outside or all((one := ref()) is None or one.grad is None for ref in self._outside)

    def judge(self, loss: float | None, norm: float) -> Judgement | None:
        """The verdict on the next step, which is counted; None if it is good, which is remembered.

        Args:
            loss: its mean loss; None if it had none.
            norm: its total gradient norm.
        """
        self.steps += 1
        verdict = self._verdict(loss, norm)
        if verdict is not None:
            self.bad_in_a_row += 1
            self._last_bad = self.steps
            return verdict
        if loss is not None:
            self._losses.add(loss)
        self._norms.add(norm)
        optimizer = self.optimizer()
        rate = None if optimizer is None else optimizer.param_groups[0].get("lr")
        if isinstance(rate, (int, float)):
            # A tensor may be on a device, where reading it would wait.
            self._rates.append(rate)
        self.good += 1
        if self.steps >= self._last_bad:
            # Else it is made again, after a return to a snapshot.
            self.bad_in_a_row = 0
        return None

    def _verdict(self, loss: float | None, norm: float) -> Judgement | None:
        if loss is not None and not math.isfinite(loss):
            return Judgement("nonfinite", "loss", loss)
        if not math.isfinite(norm):
            return Judgement("nonfinite", "norm", norm)
        if self._finds_spikes:
            if loss is not None and (limit := self._losses.exceeded_by(loss)) is not None:
                return Judgement("spike", "loss", loss, limit)
            if (limit := self._norms.exceeded_by(norm)) is not None:
                return Judgement("spike", "norm", norm, limit)
        return None

    def is_bad_loss(self, loss: float) -> bool:
        """Whether the loss of a single process or micro-batch is not finite, or above the limit of a spike."""
        return not math.isfinite(loss) or self._losses.exceeded_by(loss) is not None

    def leaves_its_course(self) -> bool:
        """Whether the learning rate jumped, or the loss or the norm rose before."""
        rates = self._rates
        jumped = bool(rates) and max(self._rate(), rates[-1]) > _JUMP * median(rates)
        return jumped or self._losses.is_rising or self._norms.is_rising

    def _rate(self) -> float:
        """The learning rate of the first group; 0 if there is none."""
        optimizer = self.optimizer()
        return 0.0 if optimizer is None else float(optimizer.param_groups[0].get("lr", 0.0))

    def state_dict(self) -> dict[str, Any]:
        """Its numbers as plain values."""
        values = {"loss": [*self._losses.values], "norm": [*self._norms.values], "rates": [*self._rates]}
        return {"steps": self.steps, "good": self.good, **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.steps, self.good = int(state["steps"]), int(state["good"])
        self._losses.replace(state["loss"])
        self._norms.replace(state["norm"])
        self._rates = deque(state["rates"], maxlen=self._rates.maxlen)


class History:
    """The last good values, of which the median and the median absolute deviation (MAD) follow.

    A value is a spike if it exceeds `median + spike * 1.4826 * MAD`, once five good values precede it.

    Args:
        window: the number of values.
        spike: see above.

    Example:
        >>> history = History(window=128, spike=10.0)
        >>> for value in (1.0, 1.1, 0.9, 1.2, 1.0):
        ...     history.add(value)
        >>> history.exceeded_by(2.0)
        >>> round(history.exceeded_by(9.0), 3)
        2.483
    """

    def __init__(self, window: int, spike: float) -> None:
        self._window, self._scale = window, spike * _CONSISTENT
        self.values: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        """Add a good value; the oldest one beyond the window is forgotten."""
        values, ordered = self.values, self._sorted
        if len(values) == self._window:
            del ordered[bisect_left(ordered, values.popleft())]
        values.append(value)
        insort(ordered, value)

    def replace(self, values: Iterable[float]) -> None:
        """Have other values."""
        self.values = deque(list(values)[-self._window :])
        self._sorted = sorted(self.values)

    def exceeded_by(self, value: float) -> float | None:
        """The limit, if the value exceeds it."""
        ordered = self._sorted
        count = len(ordered)
        if count < _LEAST:
            return None
        half = count // 2
        middle = ordered[half] if count % 2 else (ordered[half - 1] + ordered[half]) / 2
        if value <= middle:
            return None
        # With at least this deviation the value is not a spike; counting is faster than computing the deviation.
        enough = (value - middle) / self._scale
        nearer = bisect_left(ordered, middle + enough) - bisect_right(ordered, middle - enough)
        if nearer <= (count - 1) // 2:
            return None
        limit = middle + self._scale * max(_deviation(ordered, middle), _ROUNDING * abs(middle))
        return limit if value > limit else None

    @property
    def is_rising(self) -> bool:
        """Whether the last value is the largest one, and far from most others."""
        if len(self.values) < _LEAST:
            return False
        last, middle = self.values[-1], median(self._sorted)
        return last == self._sorted[-1] and last > middle + 3 * _CONSISTENT * _deviation(self._sorted, middle)


def _deviation(ordered: list[float], middle: float) -> float:
    """The median absolute deviation."""
    return median(abs(other - middle) for other in ordered)
