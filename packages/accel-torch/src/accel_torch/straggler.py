"""Finds the process that the others wait for: one table at the end of a run with the time of each process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from accel_ops import gather_object
from accel_state import current
from accel_torch.hooks import Hook
from accel_torch.stopwatch import SHARES, Stopwatch, TimedSource, TimedTransport

if TYPE_CHECKING:
    from torch import Tensor

    from accel_plugins.bundle import Bundle

__all__ = ("StragglerReport", "shares", "table")


class StragglerReport(Hook):
    """Measures the loaders, models, backward passes, collectives and checkpoints of one Accelerator.

    If gradients are averaged, a backward pass ends with waiting, after this process has computed all its gradients. On
    asynchronous devices, the times are those of the Python process, which only enqueues work.
    """

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()
        self._gradient_hook: Any = None

    def start_process(self) -> None:
        """Measure all collectives of this process from now on."""
        process = current.process()
        current.set_process(process._replace(transport=TimedTransport(process.transport, self.stopwatch)))

    def before_backward(self, loss: Tensor) -> None:
        """Measure a backward pass, and its end from when this process has computed its own gradients."""
        if loss.requires_grad:
            self._gradient_hook = loss.register_hook(_when_own_gradients_are_computed(self.stopwatch))  # type: ignore[no-untyped-call]
        self.stopwatch.start("backward")

    def after_backward(self, loss: Tensor) -> None:
        """End the measurement of a backward pass."""
        self.stopwatch.stop()
        if self._gradient_hook is not None:
            self._gradient_hook.remove()
            self._gradient_hook = None

    def before_save(self) -> None:
        """Measure a save."""
        self.stopwatch.start("saving")

    def after_save(self) -> None:
        """End the measurement of a save."""
        self.stopwatch.stop()

    def after_prepare(self, session: Any, bundle: Bundle) -> None:
        """Measure the forward passes of newly prepared models."""
        for model in bundle.models:
            model.register_forward_pre_hook(lambda *_: self.stopwatch.start("forward"))
            model.register_forward_hook(lambda *_: self.stopwatch.stop(), always_call=True)

    def loader_prepared(self, session: Any, loader: Any) -> None:
        """Measure the reading of a newly prepared loader."""
        if hasattr(loader, "source"):
            loader.source = TimedSource(loader.source, self.stopwatch)

    def tell(self, log: Callable[[dict[str, float]], None], prints: bool) -> None:
        """Log the shares of all processes and print them as a table; called on every process.

        Args:
            log: the function that logs values by name.
            prints: whether this process prints the table.
        """
        everyones: list[dict[str, float]] = gather_object([self.stopwatch.read()])
        log(shares(everyones))
        if prints:
            print(table(everyones))  # noqa: T201 - this is what it is for


def _when_own_gradients_are_computed(stopwatch: Stopwatch) -> Any:
    def begin(gradient: Tensor) -> None:
        # Callbacks run in the order in which they were queued, and those that wait for other processes are queued
        # later.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: stopwatch.become("waiting"))

    return begin


def shares(everyones: list[dict[str, float]]) -> dict[str, float]:
    """The values to log: each share of each process, as a fraction of its time."""
    return {
        f"time_share/process_{rank}/{share}": seconds[share] / max(sum(seconds.values()), 1e-9)
        for rank, seconds in enumerate(everyones)
        for share in SHARES
    }


def table(everyones: list[dict[str, float]]) -> str:
    """A table with one line for each process, and the process that waits least: the others wait for it."""
    lines = [f"{'process':>7}{'seconds':>10}" + "".join(f"{share:>10}" for share in SHARES)]
    for rank, seconds in enumerate(everyones):
        total = max(sum(seconds.values()), 1e-9)
        lines.append(f"{rank:>7}{total:>10.1f}" + "".join(f"{seconds[share] / total:>10.1%}" for share in SHARES))
    if len(everyones) > 1:
        waits = [seconds["waiting"] for seconds in everyones]
        least = waits.index(min(waits))
        lines.append(f"Process {least} waits least ({min(waits):.1f} s; the most is {max(waits):.1f} s).")
    return "\n".join(lines)
