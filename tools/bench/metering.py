"""Meters, and the one loop that measures: rounds of calls that alternate between the sides of an interpreter."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from bench.case import Call

ROUND_SECONDS: Final = 0.1
"""How long a round of calls should take; a longer call is a round by itself."""

SIDE_SECONDS: Final = 0.5
"""How long the rounds of a side should take in one interpreter."""

MOST_ROUNDS: Final = 9


class Meter(NamedTuple):
    """Reads something at the start and at the end of what is measured.

    Args:
        start: the reading at the start.
        end: the reading at the end; the difference counts.
        typical: which of the rounds counts.
    """

    start: Callable[[], float]
    end: Callable[[], float]
    typical: Callable[[Iterable[float]], float]


def cpu_seconds() -> float:
    """CPU time of this process and of those it started and waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def memory(line: str) -> float:
    """Megabytes in a line of the status that Linux keeps of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(found for found in lines if found.startswith(line)).split()[1]) * 1024 / 1e6


def forget_peak() -> float:
    """Makes the peak what is held now, and returns it."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return memory("VmRSS")


def modules() -> float:
    """How many modules are imported."""
    return len(sys.modules)


def synchronised_seconds() -> float:
    """Wall time once the GPU has done all that it was given."""
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def forget_gpu_peak() -> float:
    """Makes the peak of the GPU what is held now, and returns it."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 1e6


def gpu_peak() -> float:
    """Megabytes of the GPU that were held at most."""
    import torch

    return torch.cuda.max_memory_allocated() / 1e6


METERS: Final[Mapping[str, Meter]] = {
    # What else a machine does only adds to CPU time.
    "CPU": Meter(cpu_seconds, cpu_seconds, min),
    "wall": Meter(time.perf_counter, time.perf_counter, statistics.median),
    "MB": Meter(forget_peak, lambda: memory("VmHWM"), statistics.median),
    "modules": Meter(modules, modules, statistics.median),
    "GPU": Meter(synchronised_seconds, synchronised_seconds, statistics.median),
    "GPU-MB": Meter(forget_gpu_peak, gpu_peak, statistics.median),
}


class Reading:
    """What meters have read so far; `with` starts and stops them."""

    def __init__(self, names: Iterable[str]) -> None:
        self.totals = dict.fromkeys(names, 0.0)
        self._started: dict[str, float] = {}

    def __enter__(self) -> Reading:
        self._started = {name: METERS[name].start() for name in self.totals}
        return self

    def __exit__(self, *failure: object) -> None:
        ended = {name: METERS[name].end() for name in reversed(self.totals)}
        for name, value in ended.items():
            self.totals[name] += value - self._started[name]


_running: list[Reading] = []


@contextmanager
def paused() -> Iterator[None]:
    """Within a measured call: what is done in this context does not count."""
    for reading in _running:
        reading.__exit__()
    try:
        yield
    finally:
        for reading in _running:
            reading.__enter__()


def read(call: Call, calls: int, names: Iterable[str]) -> dict[str, float]:
    """What meters read for one of so many calls."""
    reading = Reading(names)
    _running.append(reading)
    try:
        with reading:
            for _ in range(calls):
                call()
    finally:
        _running.pop()
    return {name: total / calls for name, total in reading.totals.items()}


def warm(call: Call, agreed: Callable[[int], int]) -> float:
    """Seconds of a call that is not the first."""
    seconds = read(call, 1, ("wall",))["wall"]
    more = agreed(0 if seconds > 3 * ROUND_SECONDS else 3)
    return min(read(call, more, ("wall",))["wall"], seconds) if more else seconds


def measure(
    calls: Mapping[str, Call],
    names: Iterable[str],
    agreed: Callable[[int], int],
    once: bool = False,
    least: int = 1,
) -> dict[str, dict[str, float]]:
    """What meters read for one call, by side.

    Args:
        calls: what is measured, by side.
        names: of the meters.
        agreed: gives all processes the number of the first, since they have to make the same calls.
        once: a single call without any before.
        least: rounds of each side at least.
    """
    if once:
        return {side: read(call, 1, names) for side, call in calls.items()}
    times = {side: warm(call, agreed) for side, call in calls.items()}
    number = {side: agreed(max(1, int(ROUND_SECONDS / seconds))) for side, seconds in times.items()}
    longest = max(number[side] * seconds for side, seconds in times.items())
    rounds = agreed(max(least, min(MOST_ROUNDS, int(SIDE_SECONDS / longest))))
    seen: dict[str, list[dict[str, float]]] = {side: [] for side in calls}
    for turn in range(rounds):
        # What a round leaves behind, in caches and on the disk, is met by each side in turn.
        for side in list(calls) if turn % 2 == 0 else reversed(list(calls)):
            seen[side].append(read(calls[side], number[side], names))
    return {
        side: {name: METERS[name].typical([one[name] for one in found]) for name in found[0]}
        for side, found in seen.items()
    }
