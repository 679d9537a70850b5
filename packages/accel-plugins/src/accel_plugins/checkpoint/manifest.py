"""The list of a checkpoint's files with sizes and hashes, and the comparison of a folder with it.

It is written last, so a folder that has one was complete. Reading it needs neither torch nor the objects inside.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_state.errors import CheckpointError

__all__ = ("CheckpointManifest", "FileRecord", "Verdict", "read_manifest", "record_of", "verify", "walk")

FORMAT: Final = 1
_CHUNK: Final = 1 << 22


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
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = found["format"]
        if version > FORMAT:
            raise CheckpointError(
                f"The checkpoint {folder} was to be read.",
                f"Its manifest has format {version}; this release knows formats up to {FORMAT}.",
                "Update accel-plugins.",
            )
        files = {str(name): FileRecord(int(r["size"]), str(r["xxh3_128"])) for name, r in found["files"].items()}
        return CheckpointManifest(files, found["facts"], found["versions"], float(found["written"]), version)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"The checkpoint {folder} was to be read.",
            f"{MANIFEST_NAME} is damaged: {type(error).__name__}: {error}",
            "Load an older checkpoint, or remove that file to load the folder unverified.",
        ) from error


def verify(folder: Path, *, hashes: bool = False) -> Verdict:
    """Compare a folder with its manifest: sizes always, contents with `hashes`."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return Verdict(None, (error.obstacle,))
    if manifest is None:
        return Verdict(None)
    damage = tuple(
        sentence
        for name, record in sorted(manifest.files.items())
        if (sentence := _damage(folder / name, name, record, hashes)) is not None
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
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


def _damage(path: Path, name: str, record: FileRecord, hashes: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{name} has {size} bytes, and {record.size} were written."
        if hashes and record_of(path) != record:
            return f"{name} has another content than was written."
    except FileNotFoundError:
        return f"{name} is missing."
    except OSError as error:
        return f"{name} cannot be read: {error}."
    return None
