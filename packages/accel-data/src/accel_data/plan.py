"""Which samples of an epoch are this process's: arithmetic on positions, without walking the others' batches.

With B samples per process and P processes a step takes G = B * P samples of the global order; in step i process r has
the positions iG + rB up to iG + (r + 1)B. What remains after the full steps is dropped, handed out unevenly, or
continued with samples from the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel_data.padding import Padding

__all__ = ("ShardPlan", "shortage")


@dataclass(frozen=True)
class ShardPlan:
    """The part of one process in a global order.

    Args:
        length: samples in the order.
        batch_size: samples of one process in one step (B).
        processes: number of processes (P).
        index: which of them (r).
        even: fill up the last step with samples from the beginning.
        drop_last: leave out what does not fill a step.
        start: samples of the order that are gone already.

    Example:
        >>> plan = ShardPlan(length=10, batch_size=2, processes=2, index=1)
        >>> [plan.positions(step) for step in range(len(plan))]
        [[2, 3], [6, 7], [0, 1]]
    """

    length: int
    batch_size: int
    processes: int = 1
    index: int = 0
    even: bool = True
    drop_last: bool = False
    start: int = 0

    @property
    def step_size(self) -> int:
        """Samples of all processes in one step (G)."""
        return self.batch_size * self.processes

    @property
    def full_steps(self) -> int:
        """Steps that need no filling up."""
        return max(self.length - self.start, 0) // self.step_size

    @property
    def tail(self) -> int:
        """Samples after the full steps."""
        return max(self.length - self.start, 0) % self.step_size

    @property
    def first(self) -> int:
        """Position of this process's first sample."""
        return self.start + self.index * self.batch_size

    def __len__(self) -> int:
        return self.full_steps + self.has_tail

    @property
    def has_tail(self) -> bool:
        """Whether this process has a batch after the full steps."""
        if self.drop_last or not self.tail:
            return False
        return self.even or self.tail > self.index * self.batch_size

    def positions(self, step: int) -> list[int]:
        """Positions in the order of this process's samples in a step."""
        first = self.first + step * self.step_size
        if step < self.full_steps:
            return list(range(first, first + self.batch_size))
        return self.tail_positions()

    def tail_positions(self) -> list[int]:
        """Positions of this process's samples in the step after the full ones; positions before `start` fill it up."""
        first = self.first + self.full_steps * self.step_size
        real = list(range(first, min(first + self.batch_size, self.length)))
        if not self.even:
            return real
        cycle = min(self.step_size, self.length)
        return real + [(first + i - self.length) % cycle for i in range(len(real), self.batch_size)]

    def padding(self) -> Padding | None:
        """Padding of the step after the full ones; None when nothing is added."""
        if self.drop_last or not self.even or not self.tail:
            return None
        return Padding(self.tail, self.batch_size, self.processes)

    def remainder(self) -> int:
        """Real samples of an incomplete last step; 0 when it is complete, -1 when it is dropped."""
        return -1 if self.drop_last else self.tail


def shortage(length: int | None, processes: int, fills: bool) -> str | None:
    """Why `length` samples are too few, or None.

    Args:
        length: samples of the epoch; None when unknown.
        processes: how many share them.
        fills: whether samples from the beginning fill up a step.
    """
    if length == 0:
        return "It has no sample."
    if length is None or length >= processes or fills:
        return None
    return f"It has {length} samples for {processes} processes, so process {length} would have none."
