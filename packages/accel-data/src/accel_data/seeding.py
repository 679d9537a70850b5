"""Random draws inside a data set that depend only on seed, epoch and sample, so that they are the same after a resume.

While a sample is read, Python's, numpy's and torch's generators are seeded for it; then they are restored. This costs
some tens of microseconds per sample.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from accel_data.order import has_own_state
from accel_data.streams import seed_stream

__all__ = ("SampleSeed", "SeededSamples", "SeededStream")

_SEED_COUNT: Final = 2**32


class SampleSeed:
    """Seed and epoch, which determine the seeds of samples.

    Args:
        seed: the run's seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.epoch = 0

    def key(self, *place: int) -> int:
        """A 64-bit hash of seed, epoch and place."""
        text = ",".join(map(str, (self.seed, self.epoch, *place)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def with_keys(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """The batches with the key of its sample beside each index, since DataLoader workers do not know the epoch."""
        return ([(self.key(index), index) for index in batch] for batch in batches)


class SeededBlock:
    """A block in which the generators are seeded from a key; their states are restored afterwards."""

    __slots__ = ("key", "numpy", "numpy_state", "python_state", "torch_state")

    def __init__(self, key: int) -> None:
        self.key = key

    def __enter__(self) -> None:
        self.numpy: Any = sys.modules.get("numpy")
        self.python_state, self.torch_state = random.getstate(), torch.get_rng_state()
        random.seed(self.key)
        torch.default_generator.manual_seed(self.key)
        if self.numpy is not None:
            self.numpy_state = self.numpy.random.get_state()
            self.numpy.random.seed(self.key % _SEED_COUNT)

    def __exit__(self, *_: object) -> None:
        random.setstate(self.python_state)
        torch.set_rng_state(self.torch_state)
        if self.numpy is not None:
            self.numpy.random.set_state(self.numpy_state)


class SeededSamples(Dataset[Any]):
    """A data set that seeds the generators before it reads a sample, if the index comes with a key.

    Args:
        dataset: the data set; its attributes can be read here.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @classmethod
    def of(cls, dataset: Any) -> SeededSamples:
        """Wrap a data set; the wrapper saves state if the data set does."""
        return ResumableSamples(dataset) if has_own_state(dataset) else cls(dataset)

    def __getitem__(self, index: Any) -> Any:
        if type(index) is not tuple:
            return self.dataset[index]
        key, own = index
        with SeededBlock(key):
            return self.dataset[own]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # A method that reads many samples at once cannot seed each of them.
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)


class ResumableSamples(SeededSamples):
    """`SeededSamples` of a data set that can save state; torchdata requires that the wrapper defines the methods."""

    def state_dict(self) -> Any:
        """The state of the data set."""
        return self.dataset.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore a state of the data set."""
        self.dataset.load_state_dict(state_dict)


class SeededStream(IterableDataset[Any]):
    """A stream that seeds the generators from a sample's position before it reads the sample.

    Args:
        dataset: the stream; its attributes can be read here.
        sample_seed: seed and epoch.
    """

    def __init__(self, dataset: Any, sample_seed: SampleSeed) -> None:
        self.dataset = dataset
        self.sample_seed = sample_seed
        self._start = self._read = 0

    @classmethod
    def of(cls, dataset: Any, sample_seed: SampleSeed) -> SeededStream:
        """Wrap a stream; the wrapper saves state if the stream does."""
        return (ResumableStream if has_own_state(dataset) else cls)(dataset, sample_seed)

    def set_epoch(self, epoch: int) -> None:
        """Use the seeds of this epoch, and pass the epoch on to the stream or to its generator."""
        self.sample_seed.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        seed_stream(self.dataset, epoch)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, samples = (0 if worker is None else worker.id), None
        self._read, self._start = self._start, 0
        for position in itertools.count(self._read):
            with SeededBlock(self.sample_seed.key(number, position)):
                try:
                    samples = iter(self.dataset) if samples is None else samples
                    sample = next(samples)
                except StopIteration:
                    return
            self._read = position + 1
            yield sample

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)


class ResumableStream(SeededStream):
    """A `SeededStream` of a stream that can save state; the state includes the number of samples read."""

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream, and how many samples were read."""
        return {"stream": self.dataset.state_dict(), "read": self._read}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a position in the next iteration."""
        self.dataset.load_state_dict(state_dict["stream"])
        self._start = state_dict["read"]
