"""The form of a case: one row of the table of benchmarks, and the work behind it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

FIGURES: Final[Mapping[str, Callable[[float, float, float], float]]] = {
    "ours": lambda ours, peer, raw: ours,
    "ours/peer": lambda ours, peer, raw: ours / peer,
    "ours/raw": lambda ours, peer, raw: ours / raw,
    "ours - raw": lambda ours, peer, raw: ours - raw,
    "(ours - raw)/(peer - raw)": lambda ours, peer, raw: (ours - raw) / (peer - raw),
}
"""How the three sides make the figure that the limit applies to, by how the table writes it."""

SCALES: Final[Mapping[str, float]] = {"us": 1e6, "ms": 1e3, "s": 1.0, "": 1.0}


class Scope(NamedTuple):
    """What the function of a side is given.

    Args:
        kind: the side: "ours", "peer" or "raw".
        folder: of this turn, the same on all its processes; deleted afterwards.
        kept: of the whole run, the same in all turns.
    """

    kind: str
    folder: Path
    kept: Path

    def library(self, ours: str, *peer: str) -> Any:
        """The public names of a module of ours, or of modules of the original where that is measured."""
        if self.kind != "peer":
            return importlib.import_module(ours)
        names = {name: value for module in peer for name, value in vars(importlib.import_module(module)).items()}
        return SimpleNamespace(**names)


Call = Callable[[], object]
Side = Callable[[Scope], Call]
"""Prepares everything in an interpreter, and returns the call that is measured."""


@dataclass(frozen=True, eq=False)
class Work:
    """What is measured together: the same thing done by ours, by the original and by the raw operation.

    Args:
        ours: done with this library.
        peer: done with the original library, in an interpreter that has it; None where it has nothing like it.
        raw: done with neither; its rounds alternate with those of ours in the same interpreter.
        processes: how many take part in each side; their values are averaged.
        alone: in interpreters of its own, where others of its group would disturb it.
        once: each side a single time for each of its interpreters, without any call before.
        rounds: how many rounds of each side an interpreter makes at least, where they vary, or take so long that there
            would be one: then the same side would always be first.
    """

    ours: Side
    peer: Side | None = None
    raw: Side | None = None
    processes: int = field(default=1, kw_only=True)
    alone: bool = field(default=False, kw_only=True)
    once: bool = field(default=False, kw_only=True)
    rounds: int = field(default=1, kw_only=True)

    @cached_property
    def sides(self) -> dict[str, Side]:
        """The sides that there are."""
        named = {"ours": self.ours, "peer": self.peer, "raw": self.raw}
        return {kind: side for kind, side in named.items() if side is not None}


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
        group: the table it belongs to.
        name: what is done.
        unit: what is metered (a key of `METERS`), then the unit and what else a reader has to know: "CPU us per step".
        figure: how the sides are compared: a key of `FIGURES`.
        limit: the most that the figure may be; None where it is for information.
        work: what is done; several cases may read the same work.
        method: how it is measured, in one or two sentences; each is shown once for a group.
        per: how many of what the name speaks of a call of the work does.
        needs: without which it is left out: a kind of device ("cuda"); or "fabric", an interpreter with Lightning
            Fabric, which the variable BENCH_FABRIC names.
    """

    group: str
    name: str
    unit: str
    figure: str
    limit: float | None
    work: Work
    method: str
    per: int = 1
    needs: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells this row from all others."""
        return self.group, self.name, self.unit, self.figure

    @property
    def meter(self) -> str:
        """What is metered."""
        return self.unit.split()[0]

    @property
    def scale(self) -> float:
        """By how much a metered value is multiplied to be in the unit."""
        return SCALES[[*self.unit.split(), ""][1]] / self.per
