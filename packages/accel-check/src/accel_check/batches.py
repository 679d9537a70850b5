"""What loaders yield: recorded in a run of several processes, and joined for the one process that follows it.

Each pass over a `DataLoader` is known by the line of the script that began it, and by how many passes that line began
before. A recorded pass keeps the samples that the script's collate function took. The one process collates the joined
samples of all processes with the same function, so that padding and augmentations are right.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from accel_check.digests import digest, sample_digests
from accel_check.records import read, write_record

__all__ = ("Batches", "EndOfReplay", "Feed", "in_prepared_loader", "join_shards", "place_in_script", "widened")


class Feed(NamedTuple):
    """The files of one recorded pass over a loader.

    Args:
        folder: the folder of the rank.
        key: the place and the count of the pass.
    """

    folder: Path
    key: str

    def path(self, number: int) -> Path:
        """The file of a batch."""
        name = "".join(letter if letter.isalnum() else "_" for letter in self.key)
        return self.folder / "feeds" / f"{name}_{number}.pt"


class _Carried(NamedTuple):
    batch: Any
    samples: Any


class _Collate:
    """A collate function that also passes on what it took; it crosses to the workers."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        return _Carried(self.collate(samples), samples)


def place_in_script(folder: str) -> str:
    """The innermost running line of a script, or of another module in its folder."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(folder) and "site-packages" not in name:
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def in_prepared_loader(depth: int) -> bool:
    """Whether a prepared loader of our library, which is followed itself, called the function `depth` calls away."""
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith("accel_data")


class Batches:
    """Records the passes over loaders, or replays those of another run.

    Args:
        script_folder: the folder of the script.
        records: the folder of this rank.
        replayed: the folders of the ranks whose samples are joined; empty in the run that is recorded.
        batch_given: called with the key of a pass and the digests of the samples of each batch that the script gets.
        keeps: whether the samples are written for another run.
    """

    def __init__(
        self,
        script_folder: str,
        records: Path,
        replayed: list[Path],
        batch_given: Callable[[str, list[str]], None],
        keeps: bool = True,
    ) -> None:
        self._keeps = keeps
        self._script_folder, self._records, self._replayed, self._batch_given = (
            script_folder,
            records,
            replayed,
            batch_given,
        )
        self._passes: Counter[str] = Counter()
        self._lengths: dict[str, int] = {}
        self._replayed_lengths: dict[str, int] = read(replayed[0] / "lengths.pt") if replayed else {}
        self._orders: dict[str, list[list[str]]] = {}
        self._with_epoch: set[int] = set()
        self._kept: list[Any] = []
        self.repeats = 0
        self.padding = 0
        self.recording = True
        self.shuffled_without_epoch = False

    # ------------------------------------------------------------------ torch's own loaders

    def install(self) -> None:
        """Follow every `DataLoader` and `DistributedSampler` of this process."""
        iterate, length = DataLoader.__iter__, DataLoader.__len__

        def followed(loader: Any) -> Any:
            if in_prepared_loader(2):
                return iterate(loader)
            return self._replay(loader) if self._replayed else self._record(loader, iterate)

        DataLoader.__iter__ = followed  # type: ignore[method-assign]
        DataLoader.__len__ = self._length_of("len", length)  # type: ignore[method-assign]
        DistributedSampler.__len__ = self._length_of("sampler", DistributedSampler.__len__)  # type: ignore[method-assign]
        set_epoch = DistributedSampler.set_epoch

        def set_and_note(sampler: Any, epoch: int) -> None:
            self._with_epoch.add(id(sampler))
            self._kept.append(sampler)
            set_epoch(sampler, epoch)

        DistributedSampler.set_epoch = set_and_note  # type: ignore[method-assign, assignment]

    def _length_of(self, what: str, length: Callable[[Any], int]) -> Callable[[Any], int]:
        calls: Counter[str] = Counter()

        def answer(one: Any) -> int:
            if in_prepared_loader(2):
                return length(one)
            place = f"{what} {place_in_script(self._script_folder)}"
            calls[place] += 1
            key = f"{place} {calls[place]}"
            if self._replayed:
                # The last answer of a line that the other run reached less often.
                return self._replayed_lengths.get(key, self._replayed_lengths.get(place, length(one)))
            self._lengths[key] = self._lengths[place] = length(one)
            return self._lengths[key]

        return answer

    def _key(self) -> str:
        place = place_in_script(self._script_folder)
        self._passes[place] += 1
        return f"{place} {self._passes[place]}"

    def _record(self, loader: Any, iterate: Callable[[Any], Any]) -> Any:
        key, collate = self._key(), loader.collate_fn
        if not isinstance(collate, _Collate):
            loader.collate_fn = _Collate(collate)
        try:
            inner = iterate(loader)
        finally:
            loader.collate_fn = collate
        self._watch_order(loader)
        return _Pass(inner, self._taken(loader, key, inner))

    def _watch_order(self, loader: Any) -> None:
        sampler = getattr(loader, "sampler", None)
        if not isinstance(sampler, DistributedSampler):
            return
        if sampler.shuffle and id(sampler) not in self._with_epoch:
            self.shuffled_without_epoch = True
        self.padding = max(self.padding, sampler.total_size - len(sampler.dataset))  # type: ignore[arg-type]

    def _taken(self, loader: Any, key: str, inner: Any) -> Iterator[Any]:
        feed, batched = Feed(self._records, key), loader._auto_collation
        order: list[str] = []
        for number, item in enumerate(inner):
            batch, samples = item
            ids = list(map(digest, samples)) if batched else sample_digests(samples)
            order += ids
            if self.recording:
                if self._keeps:
                    write_record(feed.path(number), (batched, _cloned(samples)))
                self._batch_given(key, ids)
            yield widened(batch)
        self._compare_orders(loader, key.rpartition(" ")[0], order)

    def _compare_orders(self, loader: Any, place: str, order: list[str]) -> None:
        """Count passes with the order of the pass before, although the sampler shuffles."""
        sampler = getattr(loader, "sampler", None)
        shuffles = isinstance(sampler, (DistributedSampler, RandomSampler)) and getattr(sampler, "shuffle", True)
        before = self._orders.setdefault(place, [])
        if shuffles and before and before[-1] == order and len(set(order)) > 2:
            self.repeats += 1
        before.append(order)

    def _replay(self, loader: Any) -> Any:
        key = self._key()
        feeds = [Feed(folder, key) for folder in self._replayed]
        if not any(feed.path(0).is_file() for feed in feeds):
            # The other run did not read it within the compared steps.
            raise EndOfReplay(key)
        return _Pass(None, self._joined(loader, feeds))

    def _joined(self, loader: Any, feeds: list[Feed]) -> Iterator[Any]:
        number = 0
        while True:
            parts = [read(path) for feed in feeds if (path := feed.path(number)).is_file()]
            if not parts:
                return
            self._batch_given(feeds[0].key, [])
            if parts[0][0]:
                batch = loader.collate_fn([sample for _, samples in parts for sample in samples])
            else:
                batch = loader.collate_fn(join_shards([samples for _, samples in parts]))
            yield widened(batch)
            number += 1

    # ------------------------------------------------------------------ prepared loaders, which yield whole batches

    def record_batch(self, key: str, number: int, batch: Any, ids: list[str]) -> None:
        """Record a batch of a prepared loader."""
        if self.recording:
            if self._keeps:
                write_record(Feed(self._records, key).path(number), (False, _cloned(batch)))
            self._batch_given(key, ids)

    def joined_batch(self, key: str, number: int) -> Any:
        """The joined batch of a prepared loader; None if the other run did not read it."""
        paths = [Feed(folder, key).path(number) for folder in self._replayed]
        parts = [read(path)[1] for path in paths if path.is_file()]
        return join_shards(parts) if parts else None

    def finish(self) -> None:
        """Write the lengths that the script has asked for."""
        write_record(self._records / "lengths.pt", self._lengths)


class EndOfReplay(SystemExit):
    """Raised when the one process reads a loader that the other run did not read within the compared steps."""


class _Pass:
    """One pass over a loader; has the attributes of torch's own iterator."""

    def __init__(self, inner: Any, batches: Iterator[Any]) -> None:
        self._inner, self._batches = inner, batches

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _cloned(value: Any) -> Any:
    # A view would take its whole storage into the file.
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def widened(batch: Any) -> Any:
    """A batch whose numbers have 64 bits where the script's models have, as far as they had 32."""
    if torch.get_default_dtype() is not torch.float64:
        return batch
    return pytree.tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 else leaf, batch
    )


def join_shards(parts: list[Any]) -> Any:
    """Concatenate the shards of a batch: tensors along their first dimension, and lists of other objects.

    Raises:
        RuntimeError: tensors differ in their other dimensions.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts) if first.ndim else first
    if isinstance(first, dict):
        values = {key: join_shards([part[key] for part in parts]) for key in first}
        kind: Any = type(first)
        return values if kind is dict else kind(values)
    if isinstance(first, (list, tuple)):
        if any(isinstance(item, (torch.Tensor, dict, list, tuple)) for item in first):
            items = [join_shards(list(column)) for column in zip(*parts, strict=True)]
        else:
            items = [item for part in parts for item in part]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first
