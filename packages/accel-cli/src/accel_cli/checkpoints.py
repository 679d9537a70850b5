"""Lists and describes checkpoints in a folder or on a store as table rows and text lines, without torch."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from accel_cli.terminal import columns
from accel_plugins.checkpoint.files import MANIFEST_NAME, is_ours, walk
from accel_plugins.checkpoint.locks import FolderLock
from accel_plugins.checkpoint.manifest import CheckpointManifest, Verdict, read_manifest, verify
from accel_plugins.checkpoint.recovery import is_in_use, located, missing, recover, remove, unfinished
from accel_plugins.checkpoint.remote import RemoteCheckpoint, RemoteCheckpoints, split_url
from accel_plugins.checkpoint.retention import checkpoints, remove_oldest, surplus
from accel_plugins.checkpoint.store import is_url
from accel_state.errors import CheckpointError, SettingError
from accel_state.untrusted import integer, list_of, printable, record

__all__ = ("Folder", "Store", "as_lines", "checkpoint_place", "copy", "described_lines")

_POSITIONS = list_of(record({"epoch": integer(), "batch": integer()}))
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Folder(NamedTuple):
    """A checkpoint, a folder of checkpoints, or the project above it.

    Args:
        path: the folder.
    """

    path: Path

    def table(self, *, hashes: bool = False) -> list[dict[str, Any]]:
        """One row for each checkpoint, oldest first, and for each incomplete one.

        Args:
            hashes: read every byte; otherwise only sizes are compared.
        """
        if _is_checkpoint(self.path):
            return [row for row in (_row(self.path, hashes),) if row is not None]
        place = _place(self.path)
        named = [one.path for one in checkpoints(place)]
        halves = unfinished(place)
        others = [entry for entry in place.iterdir() if entry not in {*named, *halves} and _is_checkpoint(entry)]
        whole = [*named, *sorted(others, key=_changed)]
        rows = [*(_row(entry, hashes) for entry in whole), *(_half(entry) for entry in halves)]
        return [row for row in rows if row is not None]

    def prune(self, keep: int, *, named: Collection[str] = (), dry_run: bool = False) -> list[str]:
        """Remove the oldest checkpoints until `keep` are left, and what ended runs left behind; return their names.

        Args:
            keep: number of checkpoints to keep.
            named: names of what runs left behind that is removed although nothing proves that they have ended.
            dry_run: only return the names.
        """
        place = _place(self.path)
        left = [entry for entry in unfinished(place) if entry.name in named or not is_in_use(entry)]
        if dry_run:
            return [path.name for path in (*left, *surplus(place, keep))]
        recover(place)
        for entry in left:
            remove(entry, asked=entry.name in named)
        return [path.name for path in left if not path.exists()] + [path.name for path in remove_oldest(place, keep)]

    def describe(self) -> dict[str, Any]:
        """Everything in a checkpoint's manifest, and how the folder differs from it.

        Raises:
            SettingError: the folder is not a checkpoint of accel.
            CheckpointError: its manifest cannot be read.
        """
        manifest = read_manifest(self.path)
        if manifest is None:
            raise SettingError(
                f"Cannot describe the checkpoint {self.path}.",
                f"It has no {MANIFEST_NAME}, so it is not a checkpoint of accel, or it contains several.",
                "Give the path of one checkpoint; `accel checkpoint list` shows the checkpoints.",
            )
        return _described(str(self.path), manifest, verify(self.path))


class Store(NamedTuple):
    """A store of checkpoints, or a checkpoint in it; a store that does not answer raises `CheckpointError`.

    Args:
        url: its URL.
    """

    url: str

    def table(self, *, hashes: bool = False) -> list[dict[str, Any]]:
        """One row for each checkpoint, oldest first, and for each incomplete one; see `Folder.table`."""
        remote = RemoteCheckpoints.at(self.url)
        listing = remote.scan()
        if not any(listing) and self.url.rstrip("/").count("/") >= 3:
            # The URL is that of a checkpoint.
            store, name = split_url(self.url)
            remote = RemoteCheckpoints.at(store)
            listing = remote.scan(name)
        rows = []
        for one in listing.committed:
            verdict = remote.verify(one, hashes=hashes)
            row = {
                "name": one.name,
                "position": _position(one.manifest.facts),
                "processes": one.manifest.facts.get("world_size"),
                "size": one.manifest.size,
                "written": one.manifest.written,
                "state": _state(verdict, hashes),
                "damage": list(verdict.damage),
            }
            rows.append(row)
        unknown: dict[str, Any] = {"position": "", "processes": None, "size": 0, "written": None, "damage": []}
        for name, damage in sorted(listing.damaged.items()):
            rows.append({**unknown, "name": name, "state": f"damaged: {damage}", "damage": [damage]})
        for name, size in sorted(listing.uncommitted.items()):
            rows.append({**unknown, "name": name, "size": size, "state": "left behind: it was not committed"})
        return rows

    def prune(self, keep: int, *, named: Collection[str] = (), dry_run: bool = False) -> list[str]:
        """Remove the oldest checkpoints until `keep` are left, and return the names of the removed ones.

        Args:
            keep: number of checkpoints to keep.
            named: names of uncommitted checkpoints that are removed too; another process may be writing them.
            dry_run: only return the names.
        """
        remote = RemoteCheckpoints.at(self.url)
        gone = [
            *(one.name for one in remote.surplus(keep)),
            *(name for name in remote.scan().uncommitted if name in named),
        ]
        if not dry_run:
            remote.remove(gone)
        return gone

    def describe(self) -> dict[str, Any]:
        """Everything in a checkpoint's manifest, and how the store differs from it."""
        remote, found = remote_checkpoint(self.url)
        return _described(self.url, found.manifest, remote.verify(found))


def checkpoint_place(path: str, failed: str) -> Folder | Store:
    """The folder or the store of a path or URL.

    Args:
        path: the path or URL.
        failed: the first sentence of an error message.

    Raises:
        SettingError: there is no such folder.
    """
    if is_url(path):
        return Store(path)
    folder = located(Path(path))
    if folder is None or not folder.is_dir():
        remedy = "Give the path of a checkpoint, of a folder of checkpoints, or of the project folder."
        raise SettingError(failed, "There is no such folder.", remedy)
    return Folder(folder)


def _is_checkpoint(folder: Path) -> bool:
    try:
        return (folder / MANIFEST_NAME).is_file() or any(is_ours(name) for name in os.listdir(folder))
    except OSError:
        # A file, or a folder that a run has just removed.
        return False


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _place(folder: Path) -> Path:
    """The folder with a project's checkpoints; checkpoints that a dead run had moved aside there are restored."""
    place = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    for name in missing(place):
        located(place / name)
    return place


def _row(path: Path, hashes: bool) -> dict[str, Any] | None:
    """A row, or None for a checkpoint that a run has removed meanwhile. One save is read, also beside a run."""
    with FolderLock.share(path) or nullcontext() as lock:
        verdict = verify(path if lock is None else lock.path, hashes=hashes)
    if not path.is_dir():
        return None
    facts = dict(verdict.manifest.facts) if verdict.manifest is not None else {}
    written = verdict.manifest.written if verdict.manifest is not None else _changed(path)
    return {
        "name": path.name,
        "position": _position(facts),
        "processes": facts.get("world_size"),
        "size": _size(path),
        "written": written,
        "state": _state(verdict, hashes),
        "damage": list(verdict.damage),
    }


def _half(path: Path) -> dict[str, Any] | None:
    state = "left behind: in use, or not provably abandoned" if is_in_use(path) else "left behind: its run has ended"
    row = {"name": path.name, "position": "", "processes": None, "size": _size(path), "written": _changed(path)}
    return {**row, "state": state, "damage": []} if path.is_dir() else None


def _state(verdict: Verdict, hashes: bool) -> str:
    if verdict.good:
        return "good" if hashes else "complete"
    return f"damaged: {verdict.damage[0]}" if verdict.damage else "unverified: it has no manifest"


def _position(facts: Mapping[str, Any]) -> str:
    positions = facts.get("positions") or []
    if not positions or _POSITIONS(positions):
        return ""
    return f"epoch {positions[0]['epoch']}, batch {positions[0]['batch']}"


def _size(path: Path) -> int:
    size = 0
    for file in walk(path):
        with suppress(FileNotFoundError):
            size += 0 if file.is_symlink() else file.stat().st_size
    return size


def as_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of `table` as text."""
    if not rows:
        return []
    cells = [
        [
            row["name"],
            row["position"] or "-",
            shown_size(row["size"]),
            "-" if row["written"] is None else shown_age(row["written"]),
            row["state"],
        ]
        for row in rows
    ]
    return columns(["checkpoint", "position", "size", "age", "state"], cells, "state")


def remote_checkpoint(url: str) -> tuple[RemoteCheckpoints, RemoteCheckpoint]:
    """The complete checkpoint at a URL.

    Raises:
        CheckpointError: there is none, or the store does not answer.
    """
    store, name = split_url(url)
    remote = RemoteCheckpoints.at(store)
    found, _, damaged = remote.scan(name)
    if not found:
        raise CheckpointError(
            f"Cannot read the checkpoint {url}.",
            damaged.get(name, f"{store} has no complete checkpoint of that name."),
            f"List those that exist: accel checkpoint list {store}",
        )
    return remote, found[0]


def copy(source: str, target: str) -> str:
    """Copy a checkpoint between folders and stores, and return its new path or URL.

    Args:
        source: a folder, or the URL of a checkpoint.
        target: the new folder, or the URL of the new checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, the store or the disk refuses the copy, or the target already
            exists.
    """
    destination, name = None, ""
    if is_url(target):
        store, name = split_url(target)
        destination = RemoteCheckpoints.at(store)
    taken = Path(target).exists() if destination is None else bool(destination.committed(name))
    if taken:
        obstacle = "A file or folder with that name already exists."
        raise CheckpointError(f"Cannot copy {source} to {target}.", obstacle, "Choose another name.")
    with tempfile.TemporaryDirectory() as folder:
        local = Path(source)
        if is_url(source):
            remote, found = remote_checkpoint(source)
            local = Path(target) if destination is None else Path(folder) / found.name
            remote.download(found, local)
        if destination is not None:
            destination.upload(_complete(local), name, secrets.token_hex(16))
        elif not is_url(source):
            shutil.copytree(_complete(local), target)
    return target


def _complete(folder: Path) -> Path:
    verdict = verify(folder, hashes=True)
    if not verdict.good:
        obstacle = " ".join(verdict.damage) or f"It has no {MANIFEST_NAME}, so it may be incomplete."
        raise CheckpointError(f"Cannot copy the checkpoint {folder}.", obstacle, "Copy another checkpoint.")
    return folder


def shown_size(size: float) -> str:
    """A number of bytes with a unit.

    Example:
        >>> shown_size(1_234_000)
        '1.2 MiB'
    """
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit has no limit")


def shown_age(written: float) -> str:
    """An age in seconds as text, in the largest unit that fits."""
    seconds = max(time.time() - written, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _described(place: str, manifest: CheckpointManifest, verdict: Verdict) -> dict[str, Any]:
    return {
        "path": place,
        "state": _state(verdict, hashes=False),
        "written": manifest.written,
        "facts": dict(manifest.facts),
        "versions": dict(manifest.versions),
        "files": {name: {"size": record.size, "xxh3_128": record.xxh3_128} for name, record in manifest.files.items()},
        "extra": list(verdict.extra),
    }


def described_lines(found: Mapping[str, Any]) -> list[str]:
    """The result of `describe` as text."""
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["written"]))
    lines = [f"{found['path']}: {found['state']}", f"written {written}, {shown_age(found['written'])} ago"]
    lines += [f"{name}: {value}" for name, value in sorted(found["facts"].items()) if value not in (None, [])]
    lines.append("by " + ", ".join(f"{name} {version}" for name, version in sorted(found["versions"].items())))
    rows = [(name, shown_size(file["size"]), file["xxh3_128"]) for name, file in sorted(found["files"].items())]
    extra = [printable(f"not in the manifest: {name}") for name in found["extra"]]
    return [*map(printable, lines), "", *columns(["file", "size", "xxh3_128"], rows), *extra]
