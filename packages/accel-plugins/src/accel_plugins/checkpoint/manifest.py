"""The list of a checkpoint's files with sizes and hashes, and the comparison of a folder with it.

It is written last, so a folder that has one was complete. Reading it needs neither torch nor the objects inside.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.ranges import range_ends
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

__all__ = (
    "CheckpointManifest",
    "FileRecord",
    "Verdict",
    "hash_of_file",
    "parse_manifest",
    "read_manifest",
    "record_of",
    "verify",
    "walk",
)

FORMAT: Final = 1
_BUFFER: Final = 1 << 18
"""Bytes that are read at once; few enough to be hashed from the cache of a core."""

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
        # Until the end of the year 9999, after which no calendar here goes on.
        "written": number(0, 253402300799),
    }
)


@dataclass(frozen=True)
class FileRecord:
    """Size and hashes of one file.

    Args:
        size: in bytes.
        xxh3_128: of the whole file.
        ranges: xxh3_64 of each range by the byte where it ends; ranges follow each other from the start. None in
            manifests of releases that hashed whole files alone.
    """

    size: int
    xxh3_128: str
    ranges: Mapping[int, str] | None = None


@dataclass(frozen=True)
class CheckpointManifest:
    """What a complete checkpoint holds.

    Args:
        files: by path relative to the folder, with forward slashes.
        facts: what the writer knew: world size, step, mesh, position, seed.
        versions: of the libraries that wrote it.
        written: seconds since 1970.
        format: version of this layout.
    """

    files: Mapping[str, FileRecord]
    facts: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    written: float = 0.0
    format: int = FORMAT

    def text(self) -> str:
        """As JSON."""
        document = asdict(self)
        for entry in document["files"].values():
            if entry["ranges"] is None:
                del entry["ranges"]
        return json.dumps(document, indent=2, sort_keys=True, default=str) + "\n"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())


@dataclass(frozen=True)
class Verdict:
    """How a folder compares with its manifest.

    Args:
        manifest: what was read, or None when the folder has none.
        damage: what is wrong, one sentence each; empty when nothing is.
        extra: files that the manifest does not list; they are not damage.
    """

    manifest: CheckpointManifest | None
    damage: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether the folder is a complete checkpoint of ours."""
        return self.manifest is not None and not self.damage


def read_manifest(folder: Path) -> CheckpointManifest | None:
    """The manifest of a folder, or None when it has none.

    Raises:
        CheckpointError: there is one that cannot be read.
    """
    failed = f"Read the checkpoint {printable(folder)}."
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
    """The manifest that a text holds.

    Args:
        data: what `CheckpointManifest.text` gave.
        failed: first part of the error.

    Raises:
        ValueError: it is damaged.
        CheckpointError: a newer release wrote it.
    """
    found = parse_json(data, _VERSIONED)
    if found["format"] > FORMAT:
        raise CheckpointError(
            failed,
            f"Its manifest has format {found['format']}; this release knows formats up to {FORMAT}.",
            "Update accel-plugins.",
        )
    if fault := _SHAPE(found):
        raise ValueError(f"It{fault}.")
    files = {name: _file_record(name, entry) for name, entry in found["files"].items()}
    return CheckpointManifest(files, found["facts"], found["versions"], float(found["written"]), found["format"])


def _file_record(name: str, entry: Mapping[str, Any]) -> FileRecord:
    listed = entry.get("ranges")
    if listed is None:
        return FileRecord(entry["size"], entry["xxh3_128"])
    ranges = {int(end): digest for end, digest in listed.items()}
    if len(ranges) != len(listed) or 0 in ranges or max(ranges, default=0) != entry["size"]:
        raise ValueError(f"The ranges of {printable(f'{name:.200}')} are not those of {entry['size']} bytes.")
    return FileRecord(entry["size"], entry["xxh3_128"], dict(sorted(ranges.items())))


def verify(folder: Path, *, hashes: bool = False) -> Verdict:
    """Compare a folder with its manifest: sizes always, contents with `hashes`.

    Whatever goes wrong meanwhile is damage: an older checkpoint can then be taken.
    """
    try:
        return _verify(folder, hashes)
    except CheckpointError as error:
        return Verdict(None, (error.obstacle,))
    except Exception as error:
        return Verdict(None, (f"It cannot be judged: {type(error).__name__}: {printable(error)}.",))


def _verify(folder: Path, hashes: bool) -> Verdict:
    manifest = read_manifest(folder)
    if manifest is None:
        return Verdict(None)
    damage = tuple(
        sentence
        for name, record in sorted(manifest.files.items())
        if (sentence := _damage(folder, name, record, hashes)) is not None
    )
    present = {path.relative_to(folder).as_posix() for path in walk(folder)}
    return Verdict(manifest, damage, tuple(sorted(present - {*manifest.files, MANIFEST_NAME})))


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, in order."""
    for root, directories, names in os.walk(folder):
        directories.sort()
        yield from (Path(root, name) for name in sorted(names))


def record_of(path: Path) -> FileRecord:
    """Size of a file, and the hashes of all of it and of its ranges, from one reading."""
    ends = range_ends(path, path.stat().st_size)
    whole, ranges, size = xxhash.xxh3_128(), dict[int, str](), 0
    part, buffer = xxhash.xxh3_64(), memoryview(bytearray(_BUFFER))
    with open_regular(path) as file:
        for end in ends:
            while size < end and (count := file.readinto(buffer[: end - size])):
                whole.update(buffer[:count])
                part.update(buffer[:count])
                size += count
            ranges[end] = part.hexdigest()
            part.reset()
    return FileRecord(size, whole.hexdigest(), ranges)


def hash_of_file(path: Path) -> str:
    """xxh3_128 of a file."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_BUFFER))
    with open_regular(path) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _damage(folder: Path, name: str, record: FileRecord, hashes: bool) -> str | None:
    shown = printable(f"{name:.200}")
    try:
        path = Path(path_inside(folder, name))
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{shown} is not a regular file."
        if status.st_size != record.size:
            return f"{shown} has {status.st_size} bytes, and {record.size} were written."
        if hashes and hash_of_file(path) != record.xxh3_128:
            return f"{shown} has another content than was written."
    except FileNotFoundError:
        return f"{shown} is missing."
    except ValueError as error:
        return f"{error}."
    except OSError as error:
        return f"{shown} cannot be read: {error.strerror}."
    return None
