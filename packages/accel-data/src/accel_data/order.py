"""The global order of an epoch: a sampler draws it once, and it can be replayed when an epoch is resumed.

The order of torch's samplers and of `SeedableRandomSampler` can be sliced at any position. Every other sampler
is a custom sampler, and its indices must be enumerated. Only exact classes are sliced, because a subclass may do
anything in its `__iter__`.
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
    "LastRNG",
    "Order",
    "Permuted",
    "RNGState",
    "SeedableRandomSampler",
    "begin_epoch",
    "can_replay",
    "decided_by_epoch",
    "has_own_state",
    "is_stock",
    "is_stock_batching",
    "permutation",
    "replaying",
    "restore_generator",
    "torchdata_sampler",
    "upcoming_rng",
)

_FIRST_CHUNK_SAMPLES: Final = 16
_CHUNK_SAMPLES: Final = 1024
_INDEXABLE_TYPES: Final = (list, tuple, range)
"""Torch accepts any iterable as a sampler."""
_MAX_SHUFFLED_SAMPLES: Final = 100_000_000
"""Far below the size at which torch changes its shuffling algorithm."""


class Order(Protocol):
    """Indices of an epoch that can be sliced at any position."""

    def __len__(self) -> int: ...

    def rows(self, first: int, width: int, stride: int, count: int) -> Iterator[list[int]]:
        """Return `count` slices of `width` indices; they start at positions `first`, `first + stride` and so on."""

    def at(self, positions: Sequence[int]) -> list[int]:
        """The indices at some positions."""

    def exhausted(self) -> None:
        """Called at the end of an epoch."""


class Ascending:
    """The order 0, 1, 2, ... up to a length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def rows(self, first: int, width: int, stride: int, count: int) -> Iterator[list[int]]:
        """Ranges of consecutive integers."""
        begins = range(first, first + count * stride, stride)
        ends = range(first + width, first + width + count * stride, stride)
        return map(list, map(range, begins, ends))

    def at(self, positions: Sequence[int]) -> list[int]:
        """The positions themselves."""
        return list(positions)

    def exhausted(self) -> None:
        """Do nothing: the order is the same in every epoch."""


class Permuted:
    """Indices in a tensor, converted to Python integers a thousand slices at a time.

    Args:
        indices: the order, a tensor of shape (samples,).
        when_exhausted: called at the end of the epoch, as torch's sampler changes its state there.
    """

    def __init__(self, indices: torch.Tensor, when_exhausted: Callable[[], object] | None = None) -> None:
        self._indices = indices
        self._when_exhausted = when_exhausted

    def __len__(self) -> int:
        return self._indices.numel()

    def rows(self, first: int, width: int, stride: int, count: int) -> Iterator[list[int]]:
        """Slices of the tensor; the first few are converted in a small chunk, so that the first batch comes early."""
        done, chunk = 0, _FIRST_CHUNK_SAMPLES
        while done < count:
            size = min(chunk, count - done)
            block = self._indices[first + done * stride :].as_strided((size, width), (stride, 1))
            yield from block.tolist()
            done, chunk = done + size, _CHUNK_SAMPLES

    def at(self, positions: Sequence[int]) -> list[int]:
        """The elements of the tensor at the positions."""
        chosen: list[int] = self._indices[torch.tensor(positions, dtype=torch.int64)].tolist()
        return chosen

    def exhausted(self) -> None:
        """Call `when_exhausted`."""
        if self._when_exhausted is not None:
            self._when_exhausted()


class SeedableRandomSampler(RandomSampler):
    """Shuffles by `initial_seed + epoch`, so the order of an epoch is the same in every run and on every process.

    Args:
        args: arguments of `torch.utils.data.RandomSampler`.
        data_seed: the seed of epoch 0. None uses torch's initial seed.
        kwargs: arguments of `torch.utils.data.RandomSampler`.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch = 0
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed

    def __iter__(self) -> Iterator[int]:
        self.seeded_generator()
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def seeded_generator(self) -> torch.Generator:
        """The sampler's generator in its state before the epoch."""
        if self.generator is None:
            self.generator = torch.Generator()
        generator: torch.Generator = self.generator
        return generator.manual_seed(self.initial_seed + self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the next iteration as epoch number `epoch`."""
        self.epoch = epoch


@dataclass(frozen=True)
class RNGState:
    """The random state that determines the order of an epoch, enough to replay it.

    Args:
        kind: "fixed" (always the same), "seed" (of a generator created for the epoch), "seeded" (seed and epoch),
            "generator" (its state before the epoch), "sampler" (the sampler's own state), "unknown".
        value: that seed or state.
    """

    kind: str
    value: Any = None

    def state_dict(self) -> dict[str, Any]:
        """The fields as plain values and tensors."""
        return {"kind": self.kind, "value": self.value}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RNGState:
        """Create it from the result of `state_dict`."""
        return cls(state["kind"], state["value"])


_UNKNOWN_STATE: Final = RNGState("unknown")


class LastRNG:
    """The random state of the epoch that was begun last; shared by all readers of the same sampler."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: RNGState | None = None


def begin_epoch(sampler: Iterable[int], last: LastRNG, replay: RNGState | None = None) -> Order | Iterator[int]:
    """Begin an epoch; return its order, or an iterator over the indices of a custom sampler.

    Args:
        sampler: yields indices.
        last: receives the random state of this epoch.
        replay: the random state to begin from; the sampler draws a new one when None.
    """
    order, last.state = _ORDERS_OF_SAMPLERS.get(type(sampler), _enumerated)(sampler, replay)
    return order


@contextmanager
def replaying(batch_sampler: Any, sampler: Any, last: LastRNG, replay: RNGState | None = None) -> Iterator[None]:
    """Begin an epoch of a custom batch sampler, which is iterated inside the block.

    Args:
        batch_sampler: yields batches of indices.
        sampler: the sampler inside it that yields single indices, or None.
        last: receives the random state of this epoch.
        replay: the random state to begin from; the samplers draw a new one when None.
    """
    source = batch_sampler if sampler is None or _controls_itself(batch_sampler) else sampler
    if type(source) is not RandomSampler or source.generator is not None:
        last.state = _rng_of(source, replay)
        yield
        return
    last.state, source.generator = _seeded_generator(replay)
    try:
        yield
    finally:
        source.generator = None


def can_replay(batch_sampler: Any, sampler: Any) -> bool:
    """Whether an epoch of this batch sampler or sampler can be replayed after a resume.

    Args:
        batch_sampler: a custom batch sampler, or None.
        sampler: the sampler that yields single indices, or None.
    """
    if batch_sampler is not None and (_controls_itself(batch_sampler) or _is_fixed(batch_sampler)):
        return True
    if batch_sampler is not None and _is_fixed(sampler):
        return False
    return sampler is not None and (
        type(sampler) in _ORDERS_OF_SAMPLERS or _controls_itself(sampler) or _is_fixed(sampler)
    )


def decided_by_epoch(sampler: Any) -> bool:
    """Whether the order of a sampler depends only on its arguments and the epoch."""
    return type(sampler) is SeedableRandomSampler or _is_fixed(sampler)


def _is_fixed(sampler: Any) -> bool:
    """Whether a sampler has the same order in every epoch."""
    return type(sampler) is SequentialSampler or isinstance(sampler, _INDEXABLE_TYPES)


def upcoming_rng(batch_sampler: Any, sampler: Any, restored: RNGState | None = None) -> RNGState | None:
    """The random state of the next epoch; None if the sampler draws it when the epoch begins.

    Args:
        batch_sampler: a custom batch sampler, or None.
        sampler: the sampler that yields single indices, or None.
        restored: set the samplers to this state first.
    """
    source = batch_sampler if batch_sampler is not None and _controls_itself(batch_sampler) else sampler
    state = _UNKNOWN_STATE if source is None else _rng_of(source, restored)
    return None if state is _UNKNOWN_STATE else state


def _controls_itself(sampler: Any) -> bool:
    return has_own_state(sampler) or isinstance(_generator(sampler), torch.Generator)


def _sequential(sampler: SequentialSampler, replay: RNGState | None) -> tuple[Order, RNGState]:
    return Ascending(len(sampler)), RNGState("fixed")


def _random(sampler: RandomSampler, replay: RNGState | None) -> tuple[Order | Iterator[int], RNGState]:
    generator = sampler.generator
    if generator is not None:
        state = restore_generator(generator, replay)
    else:
        state, generator = _seeded_generator(replay)
    size = len(sampler.data_source)
    if sampler.replacement or sampler.num_samples != size:
        with_generator = copy.copy(sampler)
        with_generator.generator = generator
        return iter(with_generator), state
    # Torch's sampler draws a second permutation when it is exhausted; the next epoch of a kept generator depends on it.
    after = None if sampler.generator is None else lambda: permutation(size, generator)
    return Permuted(permutation(size, generator), after), state


def _seeded(sampler: SeedableRandomSampler, replay: RNGState | None) -> tuple[Order | Iterator[int], RNGState]:
    state = _seed_and_epoch(sampler, replay)
    size = len(sampler.data_source)
    if sampler.replacement or sampler.num_samples != size:
        return iter(sampler), state
    following = sampler.epoch + 1
    return Permuted(permutation(size, sampler.seeded_generator()), lambda: sampler.set_epoch(following)), state


def _seed_and_epoch(sampler: SeedableRandomSampler, replay: RNGState | None) -> RNGState:
    if replay is not None and replay.kind == "seeded":
        sampler.initial_seed, sampler.epoch = replay.value["seed"], replay.value["epoch"]
    return RNGState("seeded", {"seed": sampler.initial_seed, "epoch": sampler.epoch})


def permutation(size: int, generator: torch.Generator) -> torch.Tensor:
    """The result of `torch.randperm`, in half the memory and less than half the time if the indices fit."""
    return torch.randperm(size, generator=generator, dtype=torch.int32 if size < _MAX_SHUFFLED_SAMPLES else torch.int64)


def _enumerated(sampler: Iterable[int], replay: RNGState | None) -> tuple[Iterator[int], RNGState]:
    state = _rng_of(sampler, replay)
    return iter(sampler), state


def _rng_of(sampler: Any, replay: RNGState | None) -> RNGState:
    """The random state from which a sampler begins its next epoch; the sampler is set to `replay` first, if given."""
    if type(sampler) is SeedableRandomSampler:
        return _seed_and_epoch(sampler, replay)
    if has_own_state(sampler):
        if replay is not None and replay.kind == "sampler":
            sampler.load_state_dict(replay.value)
        return RNGState("sampler", copy.deepcopy(sampler.state_dict()))
    generator = _generator(sampler)
    if isinstance(generator, torch.Generator):
        return restore_generator(generator, replay)
    return RNGState("fixed") if isinstance(sampler, _INDEXABLE_TYPES) else _UNKNOWN_STATE


def _seeded_generator(replay: RNGState | None) -> tuple[RNGState, torch.Generator]:
    repeats = replay is not None and replay.kind == "seed"
    # Torch's sampler draws its seed in the same way, so a prepared loader shuffles like the plain one.
    seed = replay.value if replay and repeats else int(torch.empty((), dtype=torch.int64).random_().item())
    return RNGState("seed", seed), torch.Generator().manual_seed(seed)


def restore_generator(generator: torch.Generator, replay: RNGState | None) -> RNGState:
    """Set a generator to the generator state in `replay`, if it contains one, and return the generator's state."""
    if replay is not None and replay.kind == "generator":
        generator.set_state(replay.value)
    return RNGState("generator", generator.get_state())


def _generator(sampler: object) -> object:
    return getattr(sampler, "generator", None)


def has_own_state(holder: object) -> bool:
    """Whether a sampler or a data set can save its state and restore it."""
    return hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")


def is_stock(sampler: object) -> bool:
    """Whether a sampler is of a class whose order is sliced, so that it has as many indices as its length."""
    return type(sampler) in _ORDERS_OF_SAMPLERS


def is_stock_batching(batch_sampler: object) -> bool:
    """Whether a batch sampler is torch's or torchdata's, so that its batches are slices of the order."""
    return type(batch_sampler) in (BatchSampler, torchdata_sampler("BatchSampler"))


def torchdata_sampler(name: str) -> type | None:
    """A class of torchdata's samplers; None if no torchdata loader has been created."""
    return getattr(sys.modules.get("torchdata.stateful_dataloader.sampler"), name, None)


_ORDERS_OF_SAMPLERS: Final[dict[type, Callable[[Any, RNGState | None], tuple[Order | Iterator[int], RNGState]]]] = {
    SequentialSampler: _sequential,
    RandomSampler: _random,
    SeedableRandomSampler: _seeded,
}
