"""Comparing the contents of a checkpoint with the hashes of its manifest before anything is loaded from it.

The processes of a node share the work range by range: all of them read the same files through the memory of that node,
so what one has read to verify it is there when the others load it. A file of a single process is verified by that one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from accel_plugins.checkpoint.manifest import CheckpointManifest, FileRecord, hash_of_file
from accel_plugins.checkpoint.ranges import hash_of, place_of
from accel_state.untrusted import path_inside, printable

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("damage_in",)

_OF_ONE: Final = re.compile(r".*(?:_rank|random_states_|gradients_|__)(\d+)(?:_\d+)?\.[a-z]+")
"""Files that a single process writes and reads, shards among them; the number says which."""

_THREADS: Final = 2
_SMALL: Final = 1 << 24
"""Bytes that are hashed without further threads."""


@dataclass(frozen=True)
class _Range:
    """A part of a file, and the hash it should have; `end` is None where the manifest has a hash of the file alone."""

    name: str
    begin: int
    end: int | None
    expected: str
    size: int


def damage_in(folder: Path, manifest: CheckpointManifest, process: Process) -> list[str]:
    """What this process finds wrong in its share of the files; the shares of all processes are the whole checkpoint.

    Args:
        folder: the checkpoint, whose files have the sizes that the manifest says.
        manifest: its manifest.
        process: who this process is.

    Returns:
        One sentence for each damaged range, with the file and the tensor.
    """
    ranges = list(_share(manifest, process))
    if sum(one.size for one in ranges) <= _SMALL:
        found = [_damage(folder, one) for one in ranges]
    else:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="accel-verify") as threads:
            found = list(threads.map(lambda one: _damage(folder, one), ranges))
    return [sentence for sentence in found if sentence is not None]


def _share(manifest: CheckpointManifest, process: Process) -> Iterator[_Range]:
    same_processes = manifest.facts.get("world_size") == process.world_size
    topology, turn = process.topology, 0
    for name, record in sorted(manifest.files.items()):
        owner = _owner(name, process.world_size) if same_processes else None
        for one in _ranges(name, record):
            if owner is None:
                mine, turn = turn % topology.local_world_size == topology.local_rank, turn + 1
            else:
                mine = owner == process.rank
            if mine:
                yield one


def _owner(name: str, world_size: int) -> int | None:
    """The process that alone reads a file; None where all do."""
    found = _OF_ONE.fullmatch(name)
    owner = world_size if found is None else int(found[1])
    return owner if owner < world_size else None


def _ranges(name: str, record: FileRecord) -> Iterator[_Range]:
    if not record.ranges:
        yield _Range(name, 0, None, record.xxh3_128, record.size)
        return
    begin = 0
    for end, expected in record.ranges.items():
        yield _Range(name, begin, end, expected, end - begin)
        begin = end


def _damage(folder: Path, one: _Range) -> str | None:
    shown = printable(f"{one.name:.200}")
    try:
        path = Path(path_inside(folder, one.name))
        if one.end is None:
            return None if hash_of_file(path) == one.expected else f"{shown} has another content than was written."
        if hash_of(path, one.begin, one.end) == one.expected:
            return None
        place = printable(place_of(path, one.begin, one.end))
        return f"{shown} has another content than was written in {place:.300}."
    except OSError as error:
        return f"{shown} cannot be read: {error.strerror or error}."
    except ValueError as error:
        return f"{error}."
