"""Random histories of runs that keep checkpoints on one object store that fails.

In a history, runs follow each other or save at the same time: a run is killed or suspended before any request, and goes
on after others have saved. The store refuses requests, loses answers, carries requests out late, and lists what was
there some requests ago. Afterwards, when all late requests have arrived, the newest checkpoint and the one under a name
must be complete, and not older than what the store has acknowledged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from faults.sweeps import Tally

from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.manifest import CheckpointManifest, record_of
from accel_plugins.checkpoint.remote import RemoteCheckpoints
from accel_plugins.checkpoint.store import CheckpointStore, StoredFile
from accel_state.errors import CheckpointError

__all__ = ("histories",)

COUNT: Final = 2000
_LAG: Final = 30
"""Requests after which a list shows a change at the latest."""
_NAMED: Final = "latest"
_KEPT: Final = 2


class _Killed(BaseException):
    """The end of a run, at any request."""


class _Objects:
    """What all runs see, and what happens to it."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.contents: dict[str, bytes] = {}
        self.late: list[Callable[[], object]] = []
        self._shown: list[dict[str, int]] = [{}]

    def happened(self) -> None:
        """Another request was made: late ones may arrive."""
        while self.late and self.chance.random() < 0.2:
            self.late.pop(self.chance.randrange(len(self.late)))()
        self._shown = [*self._shown[-_LAG:], {name: len(content) for name, content in self.contents.items()}]

    def listed(self, lags: bool) -> dict[str, int]:
        """Names and sizes, as they are or were some requests ago."""
        return self.chance.choice(self._shown) if lags else {name: len(one) for name, one in self.contents.items()}

    def put(self, name: str, content: bytes, *, new: bool = False) -> bool:
        """Store a file; False if it had to be new and was there."""
        if new and name in self.contents:
            return False
        self.contents[name] = content
        return True


class _Store(CheckpointStore):
    """The store as one run sees it.

    Args:
        objects: what is on it.
        faulty: whether requests fail.
        before: called before each request; may raise `_Killed` or let other runs save.
    """

    def __init__(self, objects: _Objects, faulty: bool = True, before: Callable[[], None] = lambda: None) -> None:
        super().__init__("memory://store")
        self._objects, self._faulty, self._before = objects, faulty, before

    def _request(self, work: Callable[[], object]) -> object:
        """Carry a change out now, late or never, and answer or not."""
        self._before()
        self._objects.happened()
        fault = self._objects.chance.choices(("", "refused", "lost", "late"), (20, 1, 1, 1))[0] if self._faulty else ""
        if fault == "late":
            self._objects.late.append(work)
        answer = work() if fault in ("", "lost") else None
        if fault:
            raise OSError(f"the request was {fault}")
        return answer

    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        self._before()
        self._objects.happened()
        for name, size in self._objects.listed(self._faulty).items():
            if name.startswith(prefix):
                yield StoredFile(name, size, 0.0)

    def read(self, name: str, start: int, end: int) -> bytes:
        self._before()
        try:
            return self._objects.contents[name][start:end]
        except KeyError:
            raise FileNotFoundError(name) from None

    def write(self, name: str, source: Path) -> None:
        content = source.read_bytes()
        self._request(lambda: self._objects.put(name, content))

    def create(self, name: str, content: bytes) -> None:
        if self._request(lambda: self._objects.put(name, content, new=True)) is False:
            raise FileExistsError(name)

    def remove(self, names: Sequence[str]) -> None:
        self._request(lambda: [self._objects.contents.pop(name, None) for name in names])


class _History:
    """Runs that save to one store.

    Args:
        folder: for local checkpoints.
        seed: of everything that happens.

    Attributes:
        acknowledged: by name, epoch and number of the newest save that the store has acknowledged; numbered checkpoints
            count together.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._chance = random.Random(seed)
        self._folder, self._saves = folder, 0
        self._objects = _Objects(self._chance)
        self.acknowledged: dict[str, tuple[int, int]] = {}

    def run(self, depth: int = 0) -> None:
        """One run: it takes up where the newest checkpoint is, or further back, and saves until it is killed."""
        remote = RemoteCheckpoints(_Store(self._objects, before=lambda: self._strike(depth)), deadline=0.0)
        try:
            self._save_often(remote)
        except _Killed:
            pass

    def _strike(self, depth: int) -> None:
        if self._chance.random() < 0.01:
            raise _Killed
        if depth < 2 and self._chance.random() < 0.01:
            # Suspended: others save meanwhile.
            self.run(depth + 1)

    def _save_often(self, remote: RemoteCheckpoints) -> None:
        try:
            newest = remote.newest()
        except CheckpointError:
            return
        number = 0 if newest is None else max(0, newest.number - self._chance.choice((-1, 0, 3)))
        for _ in range(self._chance.randint(1, 6)):
            name = self._chance.choice((f"checkpoint_{number}", _NAMED))
            number += 1
            self._saves += 1
            # Others may save in between.
            data = f"{self._saves:032x}"
            folder = _local(self._folder / f"save_{self._saves}", self._saves)
            for _ in range(2):
                try:
                    remote.upload(folder, name, data)
                    self._acknowledge(name, data)
                    remote.remove_oldest(_KEPT)
                    break
                except CheckpointError:
                    # It is copied with the next attempt, or not at all.
                    continue

    def _acknowledge(self, name: str, data: str) -> None:
        """Note the order of a save, by what is on the store."""
        keys = [
            (int(file.rpartition("/")[2][9:17]), int(file.rpartition("/")[2][18:26]))
            for file, content in self._objects.contents.items()
            if "/manifest-" in file and data.encode() in content
        ]
        epoch, generation = max(keys, default=(0, 0))
        kind, key = (_NAMED, (epoch, generation)) if name == _NAMED else ("", (epoch, int(name.rpartition("_")[2])))
        self.acknowledged[kind] = max(key, self.acknowledged.get(kind, key))

    def wrong(self) -> str | None:
        """What is wrong with what a later run finds."""
        for late in self._objects.late:
            late()
        remote = RemoteCheckpoints(_Store(self._objects, faulty=False))
        newest, expected = remote.newest(), self.acknowledged.get("")
        if expected is not None:
            if newest is None:
                return f"no checkpoint is found, and {expected} was acknowledged"
            if (newest.epoch, newest.number) < expected:
                return f"the newest one is {newest.epoch, newest.number}, and {expected} was acknowledged"
            if not remote.verify(newest, hashes=True).good:
                return f"the newest one is damaged: {remote.verify(newest).damage}"
        if _NAMED in self.acknowledged:
            named = next(iter(remote.committed(_NAMED)), None)
            if named is None or (named.epoch, named.generation) < self.acknowledged[_NAMED]:
                return f"{_NAMED} is not the one that was acknowledged"
            if not remote.verify(named, hashes=True).good:
                return f"{_NAMED} is damaged: {remote.verify(named).damage}"
        return None


def _local(folder: Path, number: int) -> Path:
    """A local checkpoint of two small files."""
    folder.mkdir(parents=True)
    for name in ("model.bin", "optimizer.bin"):
        (folder / name).write_text(f"{name} {number}", encoding="utf-8")
    files = {path.name: record_of(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST_NAME).write_text(CheckpointManifest(files, written=float(number)).text(), encoding="utf-8")
    return folder


def histories(folder: Path, every: int) -> Tally:
    """Random histories of runs on one store.

    Args:
        folder: for local checkpoints.
        every: of so many histories one is tried.
    """
    tally = Tally("history of lost answers, late requests, lagging lists, suspended and killed runs")
    for seed in range(0, COUNT, every):
        history = _History(folder / str(seed), seed)
        for _ in range(3):
            history.run()
        tally.count(f"history {seed}", history.wrong())
    return tally
