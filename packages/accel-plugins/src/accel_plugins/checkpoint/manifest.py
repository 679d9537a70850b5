"""The list of a checkpoint's files with sizes and hashes, and the comparison of a folder with it.

The manifest is written last, so a folder with a manifest was complete. Reading it needs neither torch nor the saved
objects. The processes of a node share the verification of a checkpoint before it is loaded, file by file.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

from accel_plugins.checkpoint.files import MANIFEST_NAME, walk
from accel_state.errors import CheckpointError
from accel_state.untrusted import (
    anything,
    dict_of,
    integer,
    number,
    open_regular,
    parse_json,
    path_inside,
    printable,
    read_limited,
    record,
    text,
)

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = (
    "CheckpointManifest",
    "FileRecord",
    "Verdict",
    "damage_in",
    "parse_manifest",
    "read_manifest",
    "record_of",
    "verify",
)

FORMAT: Final = 1
_BUFFER_BYTES: Final = 1 << 18
"""Bytes that are read at once; few enough to remain in a core's cache for hashing."""

_VERSION_SHAPE: Final = record({"format": integer(1)})
_FILE_SHAPE: Final = record({"size": integer(), "xxh3_128": text("[0-9a-f]{32}")})
_MANIFEST_SHAPE: Final = record(
    {
        "files": dict_of(_FILE_SHAPE),
        "facts": dict_of(anything),
        "versions": dict_of(text()),
        # Until the end of the year 9999, the limit of Python's datetime.
        "written": number(0, 253402300799),
    }
)

_OWN_HASH: Final = "xxh3_128"
_MANIFEST_KEYS: Final = frozenset({"files", "facts", "format", "versions", "written", _OWN_HASH})

_RANK_FILE_NAME: Final = re.compile(r".*(?:_rank|random_states_|gradients_|__)(\d+)(?:_\d+)?\.[a-z]+")
"""Files, including shards, that only one process writes and reads; their number is its rank."""
_HASH_THREADS: Final = 2
_MAX_UNTHREADED_BYTES: Final = 1 << 24
"""Up to this many bytes are hashed without further threads."""


@dataclass(frozen=True)
class FileRecord:
    """The size and the hash of a file.

    Args:
        size: size in bytes.
        xxh3_128: hash of its content.
    """

    size: int
    xxh3_128: str


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of a complete checkpoint.

    Args:
        files: the files by path relative to the folder, with forward slashes.
        facts: data about the run: world size, step, mesh, position, seed.
        versions: versions of the libraries that wrote it.
        written: time of writing, in seconds since 1970.
        format: version of this layout.
    """

    files: Mapping[str, FileRecord]
    facts: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    written: float = 0.0
    format: int = FORMAT

    def text(self) -> str:
        """As JSON, with a hash of all other entries."""
        # Values that JSON converts to strings are converted before hashing, so that the hash is the same after reading.
        document = json.loads(json.dumps(asdict(self), default=str))
        return json.dumps({**document, _OWN_HASH: _own_hash(document)}, indent=2, sort_keys=True) + "\n"

    @property
    def size(self) -> int:
        """The total size of all files in bytes."""
        return sum(record.size for record in self.files.values())


@dataclass(frozen=True)
class Verdict:
    """The comparison of a folder with its manifest.

    Args:
        manifest: the manifest, or None when the folder has none.
        damage: descriptions of damage, one sentence each; empty if there is none.
        extra: files that the manifest does not list; they do not count as damage.
    """

    manifest: CheckpointManifest | None
    damage: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether the folder is a complete checkpoint of this library."""
        return self.manifest is not None and not self.damage


def read_manifest(folder: Path) -> CheckpointManifest | None:
    """The manifest of a folder, or None when it has none.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    failure = f"Cannot read the checkpoint {printable(folder)}."
    try:
        return parse_manifest(read_limited(folder / MANIFEST_NAME), failure)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            failure,
            f"{MANIFEST_NAME} is damaged. {error}",
            "Load an older checkpoint, or remove that file to load the folder unverified.",
        ) from error


def parse_manifest(data: bytes, failure: str) -> CheckpointManifest:
    """Parse a manifest.

    Args:
        data: the result of `CheckpointManifest.text`.
        failure: first sentence of the error.

    Raises:
        ValueError: the manifest is damaged.
        CheckpointError: a newer release wrote it.
    """
    entries = parse_json(data, _VERSION_SHAPE)
    if entries["format"] > FORMAT:
        raise CheckpointError(
            failure,
            f"Its manifest has format {entries['format']}; this release supports formats up to {FORMAT}.",
            "Update accel-plugins.",
        )
    if fault := _MANIFEST_SHAPE(entries):
        raise ValueError(f"It{fault}.")
    if unknown := sorted(entries.keys() - _MANIFEST_KEYS):
        raise ValueError(f"The manifest has the unknown key {printable(f'{unknown[0]!r:.200}')}.")
    # Manifests of earlier releases do not contain a hash of themselves.
    if entries.pop(_OWN_HASH, None) not in (None, _own_hash(entries)):
        raise ValueError("The contents of the manifest do not match its hash.")
    files = {name: FileRecord(entry["size"], entry["xxh3_128"]) for name, entry in entries["files"].items()}
    return CheckpointManifest(
        files, entries["facts"], entries["versions"], float(entries["written"]), entries["format"]
    )


def _own_hash(document: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())


def verify(folder: Path, *, hashes: bool = False) -> Verdict:
    """Compare a folder with its manifest: sizes, and with `hashes` also contents.

    Any error during the comparison counts as damage, so that an older checkpoint can be used.
    """
    try:
        return _verify(folder, hashes)
    except CheckpointError as error:
        return Verdict(None, (error.obstacle,))
    except Exception as error:
        return Verdict(None, (f"The folder cannot be checked: {type(error).__name__}: {printable(error)}.",))


def _verify(folder: Path, hashes: bool) -> Verdict:
    manifest = read_manifest(folder)
    if manifest is None:
        return Verdict(None)
    damage = tuple(
        sentence
        for name, record in sorted(manifest.files.items())
        if (sentence := _damage_of_file(folder, name, record, hashes)) is not None
    )
    present = {path.relative_to(folder).as_posix() for path in walk(folder)}
    return Verdict(manifest, damage, tuple(sorted(present - {*manifest.files, MANIFEST_NAME})))


def record_of(path: Path) -> FileRecord:
    """The size and the hash of a file."""
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_BUFFER_BYTES))
    with open_regular(path) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


def _damage_of_file(folder: Path, name: str, record: FileRecord, hashes: bool) -> str | None:
    shown = printable(f"{name:.200}")
    try:
        path = Path(path_inside(folder, name))
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{shown} is not a regular file."
        if status.st_size != record.size:
            return f"{shown} has {status.st_size} bytes, and {record.size} were written."
        if hashes and record_of(path) != record:
            return f"{shown} has changed since it was written."
    except FileNotFoundError:
        return f"{shown} is missing."
    except ValueError as error:
        return f"{error}."
    except OSError as error:
        return f"{shown} cannot be read: {error.strerror}."
    return None


def damage_in(folder: Path, manifest: CheckpointManifest, process: Process) -> list[str]:
    """Verify this process's share of the files; all processes together verify the whole checkpoint.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        process: this process.

    Returns:
        One sentence for each damaged file.
    """
    names = _share(manifest, process)

    def damage(name: str) -> str | None:
        return _damage_of_file(folder, name, manifest.files[name], hashes=True)

    if sum(manifest.files[name].size for name in names) <= _MAX_UNTHREADED_BYTES:
        sentences = list(map(damage, names))
    else:
        with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="accel-verify") as threads:
            sentences = list(threads.map(damage, names))
    return [sentence for sentence in sentences if sentence is not None]


def _share(manifest: CheckpointManifest, process: Process) -> list[str]:
    """The files that this process verifies, largest first: its own ones, and an equal part of those that all read."""
    same_processes = manifest.facts.get("world_size") == process.world_size
    topology, mine = process.topology, list[str]()
    load = [0] * topology.local_world_size
    for name, entry in sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0])):
        owner = _owner(name, process.world_size) if same_processes else None
        if owner is not None:
            is_mine = process.rank == owner
        else:
            reader = min(range(len(load)), key=lambda rank: load[rank])
            load[reader] += entry.size
            is_mine = reader == topology.local_rank
        if is_mine:
            mine.append(name)
    return mine


def _owner(name: str, world_size: int) -> int | None:
    """The rank of the only process that reads a file; None if all read it."""
    match = _RANK_FILE_NAME.fullmatch(name)
    owner = world_size if match is None else int(match[1])
    return owner if owner < world_size else None
