"""Detects what makes two runs of one script differ without a plan: clocks, ranks and unseeded generators.

Each read is recorded with the script's line. A varied run has another clock and other seeds; a script that computes
other results with them cannot be compared. In a run with another rank, the script reads that rank.
"""

from __future__ import annotations

import datetime
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from accel_torch.check_resume.digests import digests_of

__all__ = ("Variation", "states")

_CLOCKS: Final = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")
_RANKS: Final = (
    "process_index",
    "local_process_index",
    "is_main_process",
    "is_local_main_process",
    "is_last_process",
    "data_parallel_rank",
    "data_parallel_shard_rank",
    "tensor_parallel_rank",
    "context_parallel_rank",
    "sequence_parallel_rank",
)
_SHIFT: Final = 86_400.0 * 40
"""Seconds by which a varied clock is ahead, and the factor of its speed."""

_PACE: Final = 100_000.0
_SEED: Final = 90_713


class Variation:
    """Records what the script reads, and varies it.

    Args:
        script: the script's file. Its reads and those of other modules in its folder are recorded.
        varied: change clocks and seeds.
        rank: the rank that the script reads; 0 for the true one.
    """

    def __init__(self, script: str, varied: bool = False, rank: int = 0) -> None:
        self._folder = str(Path(script).resolve().parent) + os.sep
        self._varied, self._rank = varied, rank
        self._reads: dict[tuple[str, str], None] = {}
        self._seeded: set[str] = set()
        self._begun: dict[str, str] = {}

    def install(self) -> None:
        """Replace clocks, generators and ranks until the process ends."""
        if self._varied:
            random.seed(_SEED)
            np.random.seed(_SEED)
            torch.manual_seed(_SEED)
        self._watch_clocks()
        self._watch_ranks()
        self._watch_generators()
        self._begun = states()

    def reads(self) -> list[list[str]]:
        """(what, place) of all reads so far, including generators used without a seed."""
        self._note_unseeded(name for name in self._begun if name not in self._seeded)
        return [list(pair) for pair in self._reads]

    def _note_unseeded(self, names: Iterable[str]) -> None:
        """Record the generators that were used since the script began."""
        if self._begun:
            now = states()
            for name in names:
                if now[name] != self._begun[name]:
                    self._note(f"the generator of {name} without a seed", "")

    # ------------------------------------------------------------------ where something is read

    def _place(self) -> str | None:
        """The calling line of the script, or None if the caller is another module."""
        frame = sys._getframe(2)
        name = frame.f_code.co_filename
        if not name.startswith(self._folder) or "site-packages" in name:
            return None
        return f"{Path(name).name}:{frame.f_lineno}"

    def _note(self, what: str, place: str) -> None:
        self._reads[what, place] = None

    def _watch_clocks(self) -> None:
        began = time.monotonic()
        for name in _CLOCKS:
            setattr(time, name, self._clock(name, getattr(time, name), began))

        variation, real = self, datetime.datetime

        class Dated(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                place = variation._place()
                if place is None:
                    return real.now(tz)
                variation._note("the clock", place)
                return real.now(tz) + datetime.timedelta(days=40 if variation._varied else 0)

        # Scripts import it after this.
        Dated.__name__ = Dated.__qualname__ = "datetime"
        datetime.datetime = Dated  # type: ignore[misc]

    def _clock(self, name: str, read: Callable[[], Any], began: float) -> Callable[[], Any]:
        unit = 1_000_000_000 if name.endswith("_ns") else 1
        monotonic = time.monotonic

        def clock() -> Any:
            place = self._place()
            if place is None:
                return read()
            self._note("the clock", place)
            if not self._varied:
                return read()
            later = (_SHIFT + _PACE * (monotonic() - began)) * unit
            return read() + (int(later) if unit > 1 else later)

        return clock

    def _watch_generators(self) -> None:
        def seeding(name: str, seed: Callable[..., Any]) -> Callable[..., Any]:
            def seeded(*arguments: Any, **options: Any) -> Any:
                if (arguments or options) and name not in self._seeded:
                    self._note_unseeded([name])
                    self._seeded.add(name)
                return seed(*arguments, **options)

            return seeded

        random.seed = seeding("random", random.seed)
        np.random.seed = seeding("numpy", np.random.seed)
        torch.manual_seed = seeding("torch", torch.manual_seed)

        def made(what: str, make: Callable[..., Any]) -> Callable[..., Any]:
            def maker(*arguments: Any, **options: Any) -> Any:
                place = self._place()
                if place is not None and not any(value is not None for value in (*arguments, *options.values())):
                    self._note(f"{what} without a seed", place)
                return make(*arguments, **options)

            return maker

        np.random.default_rng = made("numpy.random.default_rng()", np.random.default_rng)
        real = random.Random

        class Random(real):  # type: ignore[misc, valid-type]
            def __new__(cls, *arguments: Any, **options: Any) -> Any:
                place = variation._place()
                if place is not None and not arguments and not options:
                    variation._note("random.Random() without a seed", place)
                return super().__new__(cls, *arguments, **options)

        variation = self
        random.Random = Random  # type: ignore[misc]

    def _watch_ranks(self) -> None:
        from accel_state.process import PartialState
        from accel_state.run_state import AcceleratorState
        from accel_torch.accelerator import Accelerator

        for kind in (Accelerator, PartialState, AcceleratorState):
            for name in _RANKS:
                found = getattr(kind, name, None)
                if isinstance(found, property):
                    setattr(kind, name, property(self._rank_of(name, found.fget), found.fset))
        if torch.distributed.is_available():
            get_rank = torch.distributed.get_rank

            def get_rank_noted(*arguments: Any, **options: Any) -> Any:
                place = self._place()
                if place is None:
                    return get_rank(*arguments, **options)
                self._note("get_rank()", place)
                return self._rank or get_rank(*arguments, **options)

            torch.distributed.get_rank = get_rank_noted

    def _rank_of(self, name: str, read: Any) -> Callable[[Any], Any]:
        def rank(owner: Any) -> Any:
            place = self._place()
            if place is None:
                return read(owner)
            self._note(name, place)
            if not self._rank:
                return read(owner)
            return name == "is_last_process" if name.startswith("is_") else self._rank

        return rank


def states() -> dict[str, str]:
    """Digests of the generators of random, numpy and torch."""
    return {
        "random": str(hash(random.getstate())),
        "numpy": digests_of(np.random.get_state(legacy=False))["state.key"],
        "torch": digests_of(torch.get_rng_state())["value"],
    }
