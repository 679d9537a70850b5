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
from accel_state.errors import CheckpointError
from accel_state.untrusted import (
    anything,
    inside,
    integer,
    number,
    open_regular,
    printable,
    read_json,
    record,
    table_of,
    text,
)

__all__ = ("CheckpointManifest", "FileRecord", "Verdict", "read_manifest", "record_of", "verify", "walk")

FORMAT: Final = 1
_CHUNK: Final = 1 << 22
_VERSIONED: Final = record({"format": integer(1)})
_SHAPE: Final = record(
    {
        "files": table_of(record({"size": integer(), "xxh3_128": text("[0-9a-f]{32}")})),
        "facts": table_of(anything),
        "versions": table_of(text()),
        # Until the end of the year 9999, after which no calendar here goes on.
        "written": number(0, 253402300799),
    }
)


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and xxh3_128 of one file."""

    size: int
    xxh3_128: str


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
        return json.dumps(asdict(self), indent=2, sort_keys=True, default=str) + "\n"

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
        extra: files that the manifest does not list; that is no damage.
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
    path = folder / MANIFEST_NAME
    asked = f"Read the checkpoint {printable(folder)}."
    try:
        found = read_json(path, _VERSIONED)
        if found["format"] > FORMAT:
            raise CheckpointError(
                asked,
                f"Its manifest has format {found['format']}; this release knows formats up to {FORMAT}.",
                "Update accel-plugins.",
            )
        if fault := _SHAPE(found):
            raise ValueError(f"It{fault}.")
        files = {name: FileRecord(entry["size"], entry["xxh3_128"]) for name, entry in found["files"].items()}
        return CheckpointManifest(files, found["facts"], found["versions"], float(found["written"]), found["format"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            asked,
            f"{MANIFEST_NAME} is damaged. {error}",
            "Load an older checkpoint, or remove that file to load the folder unverified.",
        ) from error


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
    """Size and hash of a file."""
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_CHUNK))
    with open_regular(path) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


def _damage(folder: Path, name: str, record: FileRecord, hashes: bool) -> str | None:
    shown = printable(f"{name:.200}")
    try:
        path = Path(inside(folder, name))
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{shown} is not a regular file."
        if status.st_size != record.size:
            return f"{shown} has {status.st_size} bytes, and {record.size} were written."
        if hashes and record_of(path) != record:
            return f"{shown} has another content than was written."
    except FileNotFoundError:
        return f"{shown} is missing."
    except ValueError as error:
        return f"{error}."
    except OSError as error:
        return f"{shown} cannot be read: {error.strerror}."
    return None
