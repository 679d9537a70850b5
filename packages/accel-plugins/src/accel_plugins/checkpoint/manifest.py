"""The list of a checkpoint's files with sizes and hashes, and the comparison of a folder with it.

It is written last, so a folder that has one was complete. Reading it needs neither torch nor the objects inside.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_state.errors import CheckpointError
from accel_state.settings.versions import installed_version

__all__ = ("CheckpointManifest", "FileRecord", "Verdict", "fsync_path", "read_manifest", "seal", "verify")

FORMAT: Final = 1
_CHUNK: Final = 1 << 22
_LIBRARIES: Final = ("accel-plugins", "torch", "safetensors", "numpy")


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


def seal(folder: Path, facts: Mapping[str, Any] | None = None, *, fsync: bool = True) -> CheckpointManifest:
    """Hash every file, make all of it durable, and write the manifest last.

    Raises:
        CheckpointError: the disk refuses.
    """
    try:
        paths = [path for path in _walk(folder) if path.name != MANIFEST_NAME or path.parent != folder]
        with ThreadPoolExecutor(2) as pool:
            # A file is hashed from the page cache while another thread waits for the disk.
            flushed = pool.map(fsync_path, paths) if fsync else iter(())
            records = {path.relative_to(folder).as_posix(): _record(path) for path in paths}
            list(flushed)
        versions = {name: version for name in _LIBRARIES if (version := installed_version(name)) is not None}
        manifest = CheckpointManifest(records, dict(facts or {}), versions, time.time())
        target = folder / MANIFEST_NAME
        target.write_text(manifest.text(), encoding="utf-8")
        if fsync:
            fsync_path(target)
            for directory in sorted({path.parent for path in paths} | {folder}, reverse=True):
                fsync_path(directory)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint in {folder} was to be completed.",
            f"{type(error).__name__}: {error}",
            "Check the disk; older checkpoints are untouched.",
        ) from error
    return manifest


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
    present = {path.relative_to(folder).as_posix() for path in _walk(folder)}
    return Verdict(manifest, damage, tuple(sorted(present - {*manifest.files, MANIFEST_NAME})))


def fsync_path(path: Path) -> None:
    """Wait until the disk holds a file or the entries of a folder; systems that cannot open folders skip those."""
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _walk(folder: Path) -> Iterator[Path]:
    for root, directories, names in os.walk(folder):
        directories.sort()
        yield from (Path(root, name) for name in sorted(names))


def _record(path: Path) -> FileRecord:
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
        if hashes and _record(path) != record:
            return f"{name} has another content than was written."
    except FileNotFoundError:
        return f"{name} is missing."
    except OSError as error:
        return f"{name} cannot be read: {error}."
    return None
