"""The list of a checkpoint's files with sizes and hashes, and the comparison of a folder with it.

The manifest is written last, so a folder with a manifest was complete. Reading it needs neither torch nor the saved
objects. It contains the hash of each file and those of consecutive ranges of it. Ranges of a safetensors file end at
the ends of tensors; large tensors, and other files, are divided further, so that threads and processes can share the
verification of a checkpoint before it is loaded.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import re
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

from accel_bigmodel.weight_files.names import is_safetensors, tensor_ranges
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
    "hash_of_file",
    "hash_of_range",
    "parse_manifest",
    "place_of",
    "range_ends",
    "read_manifest",
    "record_of",
    "verify",
)

FORMAT: Final = 1
_BUFFER: Final = 1 << 18
"""Bytes that are read at once; few enough to remain in a core's cache for hashing."""

_VERSIONED: Final = record({"format": integer(1)})
_FILE: Final = record(
    {"size": integer(), "xxh3_128": text("[0-9a-f]{32}")},
    {"ranges": dict_of(text("[0-9a-f]{16}"), keys=text("[0-9]{1,18}"))},
)
_SHAPE: Final = record(
    {
        "files": dict_of(_FILE),
        "facts": dict_of(anything),
        "versions": dict_of(text()),
        # Until the end of the year 9999, the limit of Python's datetime.
        "written": number(0, 253402300799),
    }
)

_OWN_HASH: Final = "xxh3_128"
_KEYS: Final = frozenset({"files", "facts", "format", "versions", "written", _OWN_HASH})

_LONGEST: Final = 1 << 24
_SHORTEST: Final = 1 << 16
"""Neighbouring tensors share a range of up to this many bytes."""
_POPULATE_READ: Final = 22
"""`MADV_POPULATE_READ` of Linux 5.14: maps pages at once, and returns an error if one cannot be read."""
_OF_ONE: Final = re.compile(r".*(?:_rank|random_states_|gradients_|__)(\d+)(?:_\d+)?\.[a-z]+")
"""Files, including shards, that only one process writes and reads; their number is its rank."""
_THREADS: Final = 2
_SMALL: Final = 1 << 24
"""Up to this many bytes are hashed without further threads."""
_FOR_TWO: Final = 1 << 22
"""From this many bytes on, hashing takes longer than starting a thread."""


@dataclass(frozen=True)
class FileRecord:
    """The size and hashes of a file.

    Args:
        size: size in bytes.
        xxh3_128: hash of the whole file.
        ranges: xxh3_64 of each range, by the byte at which it ends; ranges are consecutive from the start. None in
            manifests of older releases, which hashed only whole files.
    """

    size: int
    xxh3_128: str
    ranges: Mapping[int, str] | None = None


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
        document = asdict(self)
        for entry in document["files"].values():
            if entry["ranges"] is None:
                del entry["ranges"]
        # Values that JSON converts to strings are converted before hashing, so that the hash is the same after reading.
        document = json.loads(json.dumps(document, default=str))
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
    failed = f"Cannot read the checkpoint {printable(folder)}."
    try:
        return parse_manifest(read_limited(folder / MANIFEST_NAME), failed)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            failed,
            f"{MANIFEST_NAME} is damaged. {error}",
            "Load an older checkpoint, or remove that file to load the folder unverified.",
        ) from error


def parse_manifest(data: bytes, failed: str) -> CheckpointManifest:
    """Parse a manifest.

    Args:
        data: the result of `CheckpointManifest.text`.
        failed: first sentence of the error.

    Raises:
        ValueError: the manifest is damaged.
        CheckpointError: a newer release wrote it.
    """
    found = parse_json(data, _VERSIONED)
    if found["format"] > FORMAT:
        raise CheckpointError(
            failed,
            f"Its manifest has format {found['format']}; this release supports formats up to {FORMAT}.",
            "Update accel-plugins.",
        )
    if fault := _SHAPE(found):
        raise ValueError(f"It{fault}.")
    if unknown := sorted(found.keys() - _KEYS):
        raise ValueError(f"The manifest has the unknown key {printable(f'{unknown[0]!r:.200}')}.")
    # Manifests of earlier releases do not contain a hash of themselves.
    if found.pop(_OWN_HASH, None) not in (None, _own_hash(found)):
        raise ValueError("The contents of the manifest do not match its hash.")
    files = {name: _file_record(name, entry) for name, entry in found["files"].items()}
    return CheckpointManifest(files, found["facts"], found["versions"], float(found["written"]), found["format"])


def _own_hash(document: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())


def _file_record(name: str, entry: Mapping[str, Any]) -> FileRecord:
    listed = entry.get("ranges")
    if listed is None:
        return FileRecord(entry["size"], entry["xxh3_128"])
    ranges = {int(end): digest for end, digest in listed.items()}
    if len(ranges) != len(listed) or 0 in ranges or max(ranges, default=0) != entry["size"]:
        raise ValueError(f"The ranges of {printable(f'{name:.200}')} are not those of {entry['size']} bytes.")
    return FileRecord(entry["size"], entry["xxh3_128"], dict(sorted(ranges.items())))


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
    """The size of a file and the hashes of the file and its ranges, from one pass."""
    ends = range_ends(path, path.stat().st_size)
    whole, ranges, size = xxhash.xxh3_128(), dict[int, str](), 0
    with open_regular(path) as file:
        for end in ends:
            part = xxhash.xxh3_64()
            with _mapped(file, size, end) as pages:
                if pages is not None:
                    size += _update_both(whole, part, pages)
                else:
                    for piece in _pieces(file, size, end):
                        whole.update(piece)
                        part.update(piece)
                        size += len(piece)
            ranges[end] = part.hexdigest()
    return FileRecord(size, whole.hexdigest(), ranges)


def _update_both(whole: Any, part: Any, pages: memoryview) -> int:
    """Update both hashes with some bytes, in two threads if they are many; return their number."""
    other = threading.Thread(target=whole.update, args=(pages,), name="accel-hash")
    if len(pages) >= _FOR_TWO and _starts(other):
        part.update(pages)
        other.join()
    else:
        whole.update(pages)
        part.update(pages)
    return len(pages)


def _starts(thread: threading.Thread) -> bool:
    """Start a thread; return False if that is impossible, as with Python 3.12 and newer while a program ends."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def hash_of_file(path: Path) -> str:
    """The xxh3_128 of a file."""
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        for piece in _pieces(file, 0, sys.maxsize):
            digest.update(piece)
    return digest.hexdigest()


def _damage_of_file(folder: Path, name: str, record: FileRecord, hashes: bool) -> str | None:
    shown = printable(f"{name:.200}")
    try:
        path = Path(path_inside(folder, name))
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{shown} is not a regular file."
        if status.st_size != record.size:
            return f"{shown} has {status.st_size} bytes, and {record.size} were written."
        if hashes and hash_of_file(path) != record.xxh3_128:
            return f"{shown} has changed since it was written."
    except FileNotFoundError:
        return f"{shown} is missing."
    except ValueError as error:
        return f"{error}."
    except OSError as error:
        return f"{shown} cannot be read: {error.strerror}."
    return None


def range_ends(path: Path, size: int) -> list[int]:
    """The ends of a file's ranges, in bytes from its start; the last one is its size."""
    ranges = _tensor_ranges(path).values()
    if not ranges:
        return list(_cut(0, [size]))
    first = min(begin for begin, _ in ranges)
    return [first, *_cut(first, sorted(end for _, end in ranges))]


def _cut(begin: int, marks: list[int]) -> Iterator[int]:
    """Positions with additional ones between distant neighbours, and without close ones."""
    for mark in marks:
        while mark - begin > _LONGEST:
            begin += _LONGEST
            yield begin
        if mark - begin >= _SHORTEST or (mark == marks[-1] and mark > begin):
            yield mark
            begin = mark


def _tensor_ranges(path: Path) -> Mapping[str, tuple[int, int]]:
    """The bytes of each tensor of a safetensors file, in order; none for other files, and for damaged ones."""
    if not is_safetensors(path):
        return {}
    try:
        return tensor_ranges(path)
    except CheckpointError:
        return {}


def place_of(path: Path, begin: int, end: int) -> str:
    """A description of a range: names of its tensors if the file has them, else the bytes."""
    names = [name for name, (first, last) in _tensor_ranges(path).items() if first < end and last > begin]
    if not names:
        return f"the bytes {begin} to {end}"
    shown = repr(names[0]) if len(names) == 1 else f"one of {names[0]!r} to {names[-1]!r}"
    return f"{shown} (bytes {begin} to {end})"


def hash_of_range(path: Path, begin: int, end: int) -> str:
    """The xxh3_64 of a range, memory-mapped if possible, because reading copies it and takes twice as long.

    Raises:
        OSError: the range cannot be read.
    """
    with open_regular(path) as file:
        digest = xxhash.xxh3_64()
        with _mapped(file, begin, end) as pages:
            for piece in _pieces(file, begin, end) if pages is None else (pages,):
                digest.update(piece)
        return digest.hexdigest()


@contextmanager
def _mapped(file: FileIO, begin: int, end: int) -> Iterator[memoryview | None]:
    """The memory-mapped bytes of a range; None if they are few, or if mapping is not supported."""
    advise = _advise()
    if advise is None or end - begin < _BUFFER:
        yield None
        return
    start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        # A private mapping, which ctypes accepts as writable.
        pages = mmap.mmap(file.fileno(), end - start, access=mmap.ACCESS_COPY, offset=start)
    except (OSError, ValueError):
        yield None
        return
    with pages:
        first = ctypes.c_char.from_buffer(pages)
        populated = advise(ctypes.addressof(first), end - start, _POPULATE_READ) == 0
        del first
        if not populated:
            # Access to an unreadable page would kill the process.
            yield None
            return
        with memoryview(pages) as whole, whole[begin - start :] as part:
            yield part


@cache
def _advise() -> Any:
    try:
        advise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


def _pieces(file: FileIO, begin: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes of a range up to the end of the file, in one reused buffer."""
    buffer = memoryview(bytearray(min(_BUFFER, end - begin)))
    file.seek(begin)
    while begin < end and (count := file.readinto(buffer[: end - begin])):
        yield buffer[:count]
        begin += count


@dataclass(frozen=True)
class _Range:
    """A range of a file with its expected hash; `end` is None if the manifest has only a hash of the whole file."""

    name: str
    begin: int
    end: int | None
    expected: str
    size: int


def damage_in(folder: Path, manifest: CheckpointManifest, process: Process) -> list[str]:
    """Verify this process's share of the files; all processes together verify the whole checkpoint.

    Args:
        folder: the checkpoint; its files must have the sizes in the manifest.
        manifest: its manifest.
        process: this process.

    Returns:
        One sentence for each damaged range, with the file and the tensor.
    """
    ranges = list(_share(manifest, process))
    if sum(one.size for one in ranges) <= _SMALL:
        found = [_damage_of_range(folder, one) for one in ranges]
    else:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="accel-verify") as threads:
            found = list(threads.map(lambda one: _damage_of_range(folder, one), ranges))
    return [sentence for sentence in found if sentence is not None]


def _share(manifest: CheckpointManifest, process: Process) -> Iterator[_Range]:
    same_processes = manifest.facts.get("world_size") == process.world_size
    topology, turn = process.topology, 0
    for name, entry in sorted(manifest.files.items()):
        owner = _owner(name, process.world_size) if same_processes else None
        for one in _ranges(name, entry):
            if owner is None:
                mine, turn = turn % topology.local_world_size == topology.local_rank, turn + 1
            else:
                mine = owner == process.rank
            if mine:
                yield one


def _owner(name: str, world_size: int) -> int | None:
    """The rank of the only process that reads a file; None if all read it."""
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


def _damage_of_range(folder: Path, one: _Range) -> str | None:
    shown = printable(f"{one.name:.200}")
    try:
        path = Path(path_inside(folder, one.name))
        if one.end is None:
            return None if hash_of_file(path) == one.expected else f"{shown} has changed since it was written."
        if hash_of_range(path, one.begin, one.end) == one.expected:
            return None
        place = printable(place_of(path, one.begin, one.end))
        return f"{shown} has changed since it was written, in {place:.300}."
    except OSError as error:
        return f"{shown} cannot be read: {error.strerror or error}."
    except ValueError as error:
        return f"{error}."
