"""The global order of an epoch: drawn once from a sampler, and drawn again when an epoch is resumed.

Torch's own samplers give an order that can be sliced at any position; every other sampler has to be walked. Only exact
classes are sliced: a subclass may do anything in its `__iter__`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

__all__ = (
    "Draw",
    "Draws",
    "Order",
    "Permuted",
    "begin",
    "begin_walk",
    "decided_by_epoch",
    "has_own_state",
    "is_stock_batching",
    "permutation",
    "register",
    "repeatable",
    "restore_generator",
    "torchdata_sampler",
    "upcoming",
)

_FIRST_CHUNK: Final = 16
_CHUNK: Final = 1024
_SMALL: Final = 100_000_000
"""Far below where torch shuffles in another way."""


class Order(Protocol):
    """Indices of an epoch that can be sliced at any position."""

    def __len__(self) -> int: ...

    def rows(self, first: int, width: int, stride: int, count: int) -> Iterator[list[int]]:
        """`count` slices of `width` indices, `stride` positions apart, the first one at position `first`."""

    def at(self, positions: Sequence[int]) -> list[int]:
        """The indices at some positions."""

    def exhausted(self) -> None:
        """Called when the epoch was read to its end."""


class Ascending:
    """0, 1, 2, ... up to a length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def rows(self, first: int, width: int, stride: int, count: int) -> Iterator[list[int]]:
        """See `Order`."""
        return (list(range(at, at + width)) for at in range(first, first + count * stride, stride))

    def at(self, positions: Sequence[int]) -> list[int]:
        """See `Order`."""
        return list(positions)

    def exhausted(self) -> None:
        """See `Order`."""


class Permuted:
    """Indices in a tensor, turned into Python numbers a thousand slices at a time.

    Args:
        indices: 1-d.
        when_exhausted: what the stock sampler does at the end of its epoch.
    """

    def __init__(self, indices: torch.Tensor, when_exhausted: Callable[[], object] | None = None) -> None:
        self._indices = indices
        self._when_exhausted = when_exhausted

    def __len__(self) -> int:
        return self._indices.numel()

    def rows(self, first: int, width: int, stride: int, count: int) -> Iterator[list[int]]:
        """See `Order`."""
        done, chunk = 0, _FIRST_CHUNK
        while done < count:
            size = min(chunk, count - done)
            block = self._indices[first + done * stride :].as_strided((size, width), (stride, 1))
            yield from block.tolist()
            done, chunk = done + size, _CHUNK

    def at(self, positions: Sequence[int]) -> list[int]:
        """See `Order`."""
        chosen: list[int] = self._indices[torch.tensor(positions, dtype=torch.int64)].tolist()
        return chosen

    def exhausted(self) -> None:
        """See `Order`."""
        if self._when_exhausted is not None:
            self._when_exhausted()


@dataclass(frozen=True)
class Draw:
    """What an epoch's order was drawn from, enough to draw it again.

    Args:
        kind: "fixed" (always the same), "seed" (of a generator made for the epoch), "seeded" (seed and epoch),
            "generator" (its state before the epoch), "sampler" (the sampler's own state), "unknown".
        value: that seed or state.
    """

    kind: str
    value: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {"kind": self.kind, "value": self.value}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Draw:
        """The inverse of `state_dict`."""
        return cls(state["kind"], state["value"])


_UNKNOWN: Final = Draw("unknown")


class Draws:
    """The last draw of a sampler, and the one to repeat in its next epoch; shared by all who read the same sampler."""

    __slots__ = ("again", "last")

    def __init__(self) -> None:
        self.last: Draw | None = None
        self.again: Draw | None = None


def begin(sampler: Iterable[int], draws: Draws) -> Order | Iterator[int]:
    """Begin an epoch: its order, or an iterator where the sampler has to be walked.

    Args:
        sampler: gives indices.
        draws: told what was drawn; holds the draw to repeat, if any.
    """
    again, draws.again = draws.again, None
    order, draws.last = _STOCK.get(type(sampler), _walk)(sampler, again)
    return order


@contextmanager
def begin_walk(batch_sampler: Any, sampler: Any, draws: Draws) -> Iterator[None]:
    """Begin an epoch of a batch sampler that is walked.

    Args:
        batch_sampler: about to be iterated inside the block.
        sampler: the one below that gives single indices, or None.
        draws: told what was drawn; holds the draw to repeat, if any.
    """
    again, draws.again = draws.again, None
    source = batch_sampler if sampler is None or _controls_itself(batch_sampler) else sampler
    if type(source) is not RandomSampler or source.generator is not None:
        draws.last = _NOTES.get(type(source), _note)(source, again)
        yield
        return
    draws.last, source.generator = _seeded_generator(again)
    try:
        yield
    finally:
        source.generator = None


def repeatable(batch_sampler: Any, sampler: Any) -> bool:
    """Whether an epoch of this sampler, or of this batch sampler above it, can be drawn again after a resume.

    Args:
        batch_sampler: a custom one, or None.
        sampler: the one that gives single indices, or None.
    """
    if batch_sampler is not None and _controls_itself(batch_sampler):
        return True
    if batch_sampler is not None and type(sampler) is SequentialSampler:
        return False
    return sampler is not None and (type(sampler) in _STOCK or _controls_itself(sampler))


def decided_by_epoch(sampler: Any) -> bool:
    """Whether the number of the epoch, with what the sampler was made with, is all that its order depends on."""
    return type(sampler) in _BY_EPOCH


def upcoming(batch_sampler: Any, sampler: Any, restored: Draw | None = None) -> Draw | None:
    """What the next epoch will be drawn from; None where that is decided when it begins.

    Args:
        batch_sampler: a custom one, or None.
        sampler: the one that gives single indices, or None.
        restored: what it shall be drawn from.
    """
    source = batch_sampler if batch_sampler is not None and _controls_itself(batch_sampler) else sampler
    draw = _UNKNOWN if source is None else _NOTES.get(type(source), _note)(source, restored)
    return None if draw is _UNKNOWN else draw


def _controls_itself(sampler: Any) -> bool:
    return has_own_state(sampler) or isinstance(_generator(sampler), torch.Generator)


def register(
    sampler_class: type,
    start: Callable[[Any, Draw | None], tuple[Order | Iterator[int], Draw]],
    note: Callable[[Any, Draw | None], Draw],
) -> None:
    """Tell of an exact sampler class, whose order the epoch decides, how its epoch is begun.

    Args:
        sampler_class: the class.
        start: begins an epoch, as drawn before if a draw is given.
        note: what an epoch is drawn from, for when something above the sampler is walked.
    """
    _STOCK[sampler_class] = start
    _NOTES[sampler_class] = note
    _BY_EPOCH.add(sampler_class)


def _sequential(sampler: SequentialSampler, again: Draw | None) -> tuple[Order, Draw]:
    return Ascending(len(sampler)), Draw("fixed")


def _random(sampler: RandomSampler, again: Draw | None) -> tuple[Order | Iterator[int], Draw]:
    generator = sampler.generator
    if generator is not None:
        draw = restore_generator(generator, again)
    else:
        draw, generator = _seeded_generator(again)
    size = len(sampler.data_source)
    if sampler.replacement or sampler.num_samples != size:
        with_generator = copy.copy(sampler)
        with_generator.generator = generator
        return iter(with_generator), draw
    # Torch's sampler draws a second permutation when it has run out; the next epoch of a kept generator depends on it.
    after = None if sampler.generator is None else lambda: permutation(size, generator)
    return Permuted(permutation(size, generator), after), draw


def permutation(size: int, generator: torch.Generator) -> torch.Tensor:
    """What `torch.randperm` gives, in half the memory and less than half the time where the indices fit."""
    return torch.randperm(size, generator=generator, dtype=torch.int32 if size < _SMALL else torch.int64)


def _walk(sampler: Iterable[int], again: Draw | None) -> tuple[Iterator[int], Draw]:
    draw = _note(sampler, again)
    return iter(sampler), draw


def _note(sampler: Any, again: Draw | None) -> Draw:
    if has_own_state(sampler):
        if again is not None and again.kind == "sampler":
            sampler.load_state_dict(again.value)
        return Draw("sampler", copy.deepcopy(sampler.state_dict()))
    generator = _generator(sampler)
    if isinstance(generator, torch.Generator):
        return restore_generator(generator, again)
    return _UNKNOWN


def _seeded_generator(again: Draw | None) -> tuple[Draw, torch.Generator]:
    repeats = again is not None and again.kind == "seed"
    # The draw that torch's sampler makes, so that a prepared loader shuffles as the plain one does.
    seed = again.value if again and repeats else int(torch.empty((), dtype=torch.int64).random_().item())
    return Draw("seed", seed), torch.Generator().manual_seed(seed)


def restore_generator(generator: torch.Generator, again: Draw | None) -> Draw:
    """Set a generator to the state of a draw, if it is one of a generator; the state it then has."""
    if again is not None and again.kind == "generator":
        generator.set_state(again.value)
    return Draw("generator", generator.get_state())


def _generator(sampler: object) -> object:
    return getattr(sampler, "generator", None)


def has_own_state(part: object) -> bool:
    """Whether a sampler or a data set tells its state and goes back to it."""
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def is_stock_batching(batch_sampler: object) -> bool:
    """Whether a batch sampler is torch's, or torchdata's of the same behaviour: batches are slices of the order."""
    return type(batch_sampler) in (BatchSampler, torchdata_sampler("BatchSampler"))


def torchdata_sampler(name: str) -> type | None:
    """A class of torchdata's samplers; None where no loader of torchdata has been made."""
    return getattr(sys.modules.get("torchdata.stateful_dataloader.sampler"), name, None)


_STOCK: dict[type, Callable[[Any, Draw | None], tuple[Order | Iterator[int], Draw]]] = {
    SequentialSampler: _sequential,
    RandomSampler: _random,
}
_NOTES: dict[type, Callable[[Any, Draw | None], Draw]] = {}
_BY_EPOCH: set[type] = {SequentialSampler}
