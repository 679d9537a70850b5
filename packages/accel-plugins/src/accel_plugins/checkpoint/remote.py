"""Checkpoints on a store: commit, find, read and remove them.

    <url>/writers/00000002.json                          the second run that writes here
    <url>/checkpoint_7/<id>/model.safetensors            files of one save; no other save ever writes to that id
    <url>/checkpoint_7/manifest-00000002-00000000.json   written last: the save by writer 2 is complete

A checkpoint exists if its manifest exists. The manifest is created with a conditional write, which fails if the name
exists. Its name contains the number of the writing run (its *epoch*) and of the save under this checkpoint name;
readers use the highest. Before its first write, a run takes the next epoch by creating `writers/<epoch>.json`. A run
that finds a later writer stops, so of two runs with one URL the older one detects the newer.

A run removes only manifests with a smaller epoch and number than its own, and then the files that they name: also one
that was suspended for long takes nothing from a later run. Numbered checkpoints are ordered by epoch first, so that a
run that goes back to an older checkpoint wins over what it left. What was uploaded and never committed stays: it is
listed, and `accel checkpoint prune` removes it when its user names it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from accel_plugins.checkpoint.files import fsync_path
from accel_plugins.checkpoint.locks import FolderLock
from accel_plugins.checkpoint.manifest import (
    CheckpointManifest,
    FileRecord,
    Verdict,
    parse_manifest,
    read_manifest,
    record_of,
)
from accel_plugins.checkpoint.recovery import erase, staged_path
from accel_plugins.checkpoint.retention import beyond, number_of
from accel_plugins.checkpoint.store import CheckpointStore, open_store, store_errors
from accel_state.errors import CheckpointError, SettingError
from accel_state.untrusted import parse_json, path_inside, printable, record, text

__all__ = (
    "RemoteCheckpoint",
    "RemoteCheckpoints",
    "RemoteListing",
    "split_url",
)

_MANIFEST_NAME: Final = re.compile(r"(?P<name>[^/]+)/manifest-(?P<epoch>\d{8})-(?P<generation>\d{8})\.json")
_FILE_NAME: Final = re.compile(r"(?P<name>[^/]+)/(?P<data>[0-9a-f]{32})/(?P<file>.+)")
_SHARE_NAME: Final = re.compile(r"[^/]+/(?P<data>[0-9a-f]{32})\.share-(?P<rank>\d+)\.json")
_WRITER_NAME: Final = re.compile(r"writers/(?P<epoch>\d{8})\.json")

_COMMIT_SHAPE: Final = record({"data": text("[0-9a-f]{32}"), "manifest": text()})
_OWNER_SHAPE: Final = record({"host": text(), "started": text()}, {"pid": text(), "id": text()})

_RANGE_BYTES: Final = 8 << 20
"""Size in bytes of one download request."""
_CONCURRENT_REQUESTS: Final = 8
_MAX_MANIFEST_BYTES: Final = 1 << 28
_POLL_INTERVAL_S: Final = 0.5
"""Seconds between two checks for the files of other nodes."""


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A committed checkpoint on a store.

    Args:
        url: the URL of the store.
        name: the name, such as "checkpoint_7".
        epoch: the epoch of the run that wrote it.
        generation: the number of the save among those of this run under this name.
        data: the name of the folder with its files, below the checkpoint's name.
        manifest: its manifest.
        present: sizes of the files in that folder, by relative name.
    """

    url: str
    name: str
    epoch: int
    generation: int
    data: str
    manifest: CheckpointManifest
    present: Mapping[str, int]

    @property
    def number(self) -> int:
        """N of a name `checkpoint_N`; -1 of another name."""
        number = number_of(self.name)
        return -1 if number is None else number

    @property
    def path(self) -> str:
        """The URL of the checkpoint."""
        return f"{self.url}/{self.name}"

    @property
    def order(self) -> tuple[int, int, float]:
        """Sort key of a store's checkpoints, from the oldest to the newest."""
        return self.epoch, self.number, self.manifest.written


class RemoteListing(NamedTuple):
    """What is below the URL of a store.

    Args:
        committed: the checkpoints with a readable manifest, oldest first.
        uncommitted: sizes of what was uploaded and not committed, by name.
        damaged: what is wrong with the manifests of other checkpoints, by name.
    """

    committed: list[RemoteCheckpoint]
    uncommitted: dict[str, int]
    damaged: dict[str, str]


class RemoteCheckpoints:
    """The checkpoints below one URL.

    Args:
        store: the store.
        deadline: seconds to wait for the files of other nodes.
    """

    def __init__(self, store: CheckpointStore, deadline: float = 600.0) -> None:
        self.store, self.deadline = store, deadline
        self._epoch: int | None = None
        self._lock = threading.Lock()
        # By name of a checkpoint, the number and the data of the last save of this run: a list may not show it yet.
        self._last: dict[str, tuple[int, str]] = {}

    @classmethod
    def at(cls, url: str, deadline: float = 600.0) -> RemoteCheckpoints:
        """The checkpoints below a URL; for errors see `open_store`."""
        return cls(open_store(url, deadline), deadline)

    # ------------------------------------------------------------------ reading

    def committed(self, name: str | None = None) -> list[RemoteCheckpoint]:
        """All committed checkpoints with a readable manifest, or the one with a name; oldest first.

        Raises:
            CheckpointError: the store does not answer.
        """
        return self.scan(name).committed

    def scan(self, name: str | None = None) -> RemoteListing:
        """Everything below the URL, or below a name.

        Raises:
            CheckpointError: the store does not answer.
        """
        damaged = dict[str, str]()
        with store_errors(f"Cannot list the checkpoints in {self.store.url}."):
            files = list(self.store.files("" if name is None else f"{name}/"))
            newest: dict[str, tuple[int, int]] = {}
            for commit in filter(None, (_MANIFEST_NAME.fullmatch(file.name) for file in files)):
                key = int(commit["epoch"]), int(commit["generation"])
                newest[commit["name"]] = max(key, newest.get(commit["name"], key))
            present: dict[tuple[str, str], dict[str, int]] = {}
            for file in files:
                if match := _FILE_NAME.fullmatch(file.name):
                    present.setdefault((match["name"], match["data"]), {})[match["file"]] = file.size
            sizes = {file.name: file.size for file in files}
            complete = list[RemoteCheckpoint]()
            for one, key in newest.items():
                try:
                    complete.append(self._read(one, *key, sizes, present))
                except CheckpointError as error:
                    damaged[one] = error.obstacle
        complete_data = {(one.name, one.data) for one in complete}
        halves = {
            one: sum(sizes.values())
            for (one, data), sizes in present.items()
            if (one, data) not in complete_data and one not in newest
        }
        return RemoteListing(sorted(complete, key=lambda one: one.order), halves, damaged)

    def _read(
        self,
        name: str,
        epoch: int,
        generation: int,
        sizes: Mapping[str, int],
        present: Mapping[tuple[str, str], Mapping[str, int]],
    ) -> RemoteCheckpoint:
        file = _manifest_name(name, epoch, generation)
        failure = f"Cannot read the checkpoint {printable(name)} in {self.store.url}."
        try:
            if sizes[file] > _MAX_MANIFEST_BYTES:
                raise ValueError(f"It has {sizes[file]} bytes.")
            commit = parse_json(self.store.read(file, 0, sizes[file]), _COMMIT_SHAPE)
            manifest = parse_manifest(commit["manifest"].encode(), failure)
        except ValueError as error:
            remedy = "Load another checkpoint; `accel checkpoint list` lists those that exist."
            raise CheckpointError(failure, f"{file} is damaged. {error}", remedy) from error
        data = commit["data"]
        return RemoteCheckpoint(self.store.url, name, epoch, generation, data, manifest, present.get((name, data), {}))

    def verify(self, checkpoint: RemoteCheckpoint, *, hashes: bool = False) -> Verdict:
        """Compare files on the store with the manifest: sizes, and with `hashes` also contents, which reads all.

        Raises:
            CheckpointError: the store does not answer.
        """
        damage = list(_missing(checkpoint))
        if hashes:
            for name, expected in sorted(checkpoint.manifest.files.items()):
                if checkpoint.present.get(name) == expected.size:
                    digest = xxhash.xxh3_128()
                    self._transfer(checkpoint, name, expected.size, digest.update)
                    if digest.hexdigest() != expected.xxh3_128:
                        damage.append(f"{printable(name)} has changed since it was written.")
        listed = checkpoint.manifest.files
        return Verdict(checkpoint.manifest, tuple(damage), tuple(sorted(checkpoint.present.keys() - listed.keys())))

    def download(self, checkpoint: RemoteCheckpoint, target: Path) -> None:
        """Copy a checkpoint into a folder, which appears when all files are copied and verified.

        Args:
            checkpoint: what to copy.
            target: the folder; it must not exist.

        Raises:
            CheckpointError: the store does not answer, its files are damaged, or writing to disk failed.
        """
        failure = f"Cannot copy the checkpoint {checkpoint.path} to {target}."
        if damage := list(_missing(checkpoint)):
            raise CheckpointError(failure, " ".join(damage[:3]), "Load an older checkpoint.")
        try:
            with store_errors(failure, "Check the store and the disk, and try again."):
                if target.exists():
                    raise FileExistsError(f"{target} exists already")
                target.parent.mkdir(parents=True, exist_ok=True)
                with FolderLock.create(staged_path(target, secrets.token_hex(8))) as lock:
                    try:
                        for name, expected in checkpoint.manifest.files.items():
                            self._download_file(checkpoint, name, expected, lock.folder, failure)
                        lock.commit(checkpoint.manifest.text(), fsync=True)
                        lock.folder.rename(target)
                        fsync_path(target.parent)
                    except BaseException:
                        if lock.is_at(lock.folder):
                            erase(lock)
                        raise
        except ValueError as error:
            raise CheckpointError(
                failure, f"Its manifest has an invalid file name: {error}.", "Load another."
            ) from error

    def _download_file(
        self, checkpoint: RemoteCheckpoint, name: str, expected: FileRecord, folder: Path, failure: str
    ) -> None:
        path = Path(path_inside(folder, name))
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = xxhash.xxh3_128()
        with open(path, "xb") as file:
            self._transfer(checkpoint, name, expected.size, digest.update, file.write)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != expected.xxh3_128:
            obstacle = f"{printable(name)} has changed since it was written."
            raise CheckpointError(failure, obstacle, "Load an older checkpoint.")

    def _transfer(self, checkpoint: RemoteCheckpoint, name: str, size: int, *sinks: Callable[[bytes], object]) -> None:
        """Read a file in ranges, several at once, and pass them to the sinks in order."""
        place = f"{checkpoint.name}/{checkpoint.data}/{name}"
        starts = range(0, size, _RANGE_BYTES)
        with (
            store_errors(f"Cannot read {printable(name)} of the checkpoint {checkpoint.path}."),
            ThreadPoolExecutor(_CONCURRENT_REQUESTS, thread_name_prefix="accel-download") as threads,
        ):
            for first in range(0, len(starts), _CONCURRENT_REQUESTS):
                some = starts[first : first + _CONCURRENT_REQUESTS]
                for content in threads.map(lambda at: self.store.read(place, at, min(at + _RANGE_BYTES, size)), some):
                    for sink in sinks:
                        sink(content)

    # ------------------------------------------------------------------ writing

    def probe(self) -> None:
        """Check that this run can write to the store, and that the store supports conditional writes.

        Raises:
            CheckpointError: one of the two is not possible.
        """
        failure = f"Cannot keep checkpoints in {self.store.url}."
        name = f"probe-{secrets.token_hex(16)}.json"
        with store_errors(failure, "Use the URL of a store that exists and answers, or remove `remote`."):
            self.store.create(name, b"{}")
            try:
                self.store.create(name, b"{}")
            except FileExistsError:
                return
            finally:
                self.store.remove([name])
        raise CheckpointError(
            failure,
            "The store ignores the condition of a conditional write (If-None-Match) and replaces existing files, so "
            "two runs could destroy each other's checkpoints.",
            "Use a store with conditional writes, such as S3, GCS or Azure.",
        )

    def upload(
        self,
        folder: Path,
        name: str,
        data: str,
        rank: int = 0,
        ranks: Sequence[int] = (0,),
        shown: Path | None = None,
    ) -> None:
        """Copy a complete local checkpoint to the store and commit it there.

        Without a shared file system, each node has some of the files: every node calls this for its files, and the
        first one commits when the files of all are uploaded.

        Args:
            folder: a folder with a manifest.
            name: the name of the checkpoint on the store.
            data: 32 hexadecimal digits, unique to this save.
            rank: the process that calls this.
            ranks: the ranks that upload files; the first one commits.
            shown: the folder in messages, if `folder` is not the path that people know.

        Raises:
            CheckpointError: the store does not answer or denies access, the local folder changed, files of another node
                are missing, or another run has started to write there.
        """
        failure = f"Cannot copy the checkpoint {shown or folder} to {self.store.url}/{name}."
        with store_errors(failure):
            if rank == ranks[0]:
                self._refuse_later_writer(failure)
            own = read_manifest(folder)
            if own is None:
                raise CheckpointError(
                    failure, "The folder does not exist any more, or has no manifest.", "Keep more checkpoints locally."
                )
            self._upload_files(folder, own, f"{name}/{data}", failure)
            if rank != ranks[0]:
                self.store.create(f"{name}/{data}.share-{rank}.json", own.text().encode())
                return
            shares = self._shares(name, data, ranks[1:], failure)
            files = {file: entry for share in reversed([own, *shares]) for file, entry in share.files.items()}
            self._commit(name, data, CheckpointManifest(files, own.facts, own.versions, own.written), failure)
            if shares:
                self.store.remove([f"{name}/{data}.share-{other}.json" for other in ranks[1:]])

    def _upload_files(self, folder: Path, manifest: CheckpointManifest, place: str, failure: str) -> None:
        """Files that an earlier attempt uploaded are not sent again.

        Raises:
            CheckpointError: a file is not the one that was saved.
        """
        there = {file.name: file.size for file in self.store.files(f"{place}/")}
        for name, entry in sorted(manifest.files.items()):
            if there.get(f"{place}/{name}") != entry.size:
                path = Path(path_inside(folder, name))
                self.store.write(f"{place}/{name}", path)
                # After the transfer, so that what changes during it is noticed too.
                if record_of(path) != entry:
                    raise CheckpointError(
                        failure,
                        f"{printable(name)} has changed since it was written.",
                        "Make sure that no other program writes there. Other checkpoints on the store are unchanged.",
                    )

    def _shares(self, name: str, data: str, ranks: Sequence[int], failure: str) -> list[CheckpointManifest]:
        waiting, manifests, until = set(ranks), [], time.monotonic() + self.deadline
        while waiting:
            for file in self.store.files(f"{name}/"):
                share = _SHARE_NAME.fullmatch(file.name)
                if share and share["data"] == data and int(share["rank"]) in waiting:
                    manifests.append(parse_manifest(self.store.read(file.name, 0, file.size), failure))
                    waiting.remove(int(share["rank"]))
            if waiting and time.monotonic() > until:
                named = ", ".join(map(str, sorted(waiting)))
                remedy = "Look for upload errors in the output of these processes."
                raise CheckpointError(failure, f"The files of process {named} were not uploaded in time.", remedy)
            if waiting:
                time.sleep(_POLL_INTERVAL_S)
        return manifests

    def _commit(self, name: str, data: str, manifest: CheckpointManifest, failure: str) -> None:
        epoch = self._claim()
        content = json.dumps({"data": data, "manifest": manifest.text()}).encode()
        earlier = self._manifests(name)
        generation, last = self._last.get(name, (-1, ""))
        if last != data:
            generation = 1 + max([generation, *(count for writer, count in earlier if writer == epoch)])
        # An earlier attempt may have created it, or still may: it gets the same number.
        self._last[name] = generation, data
        while not self._is_created(_manifest_name(name, epoch, generation), content):
            # A list may lag behind.
            generation += 1
            self._last[name] = generation, data
        self._refuse_later_writer(failure)
        self._remove_manifests(name, {key: size for key, size in earlier.items() if key < (epoch, generation)})

    def _manifests(self, name: str) -> dict[tuple[int, int], int]:
        """The sizes of a checkpoint's manifests, by epoch and number."""
        files = ((_MANIFEST_NAME.fullmatch(file.name), file.size) for file in self.store.files(f"{name}/"))
        return {(int(match["epoch"]), int(match["generation"])): size for match, size in files if match}

    def _is_created(self, file: str, content: bytes) -> bool:
        """Create a file; False: there is another one. The answer to a request may be lost: then the file decides."""
        try:
            self.store.create(file, content)
        except FileExistsError:
            return self._has(file, content)
        except OSError:
            if not self._has(file, content):
                raise
        return True

    def _has(self, file: str, content: bytes) -> bool:
        try:
            return self.store.read(file, 0, len(content)) == content
        except OSError:
            return False

    def _remove_manifests(self, name: str, manifests: Mapping[tuple[int, int], int]) -> None:
        """Remove manifests, then the files that they name; other files may be those of another run."""
        files = {_manifest_name(name, *key): size for key, size in manifests.items()}
        places = [self._place_of(name, file, size) for file, size in files.items()]
        if files:
            self.store.remove(list(files))
        for place in filter(None, places):
            self.store.remove([file.name for file in self.store.files(f"{place}/")])

    def _place_of(self, name: str, file: str, size: int) -> str | None:
        """The folder of the files that a manifest names; None if it cannot be read."""
        try:
            return f"{name}/{parse_json(self.store.read(file, 0, size), _COMMIT_SHAPE)['data']}"
        except (OSError, ValueError):
            return None

    # ------------------------------------------------------------------ who writes

    def _claim(self) -> int:
        """The epoch of this run; determined by its first commit.

        Records of earlier runs are kept: without them a concurrent run could take an epoch a second time.
        """
        with self._lock:
            if self._epoch is None:
                epoch = 1 + max(self._writers(), default=0)
                owner = {"host": socket.gethostname(), "pid": str(os.getpid()), "started": _now()}
                content = json.dumps({**owner, "id": secrets.token_hex(16)}).encode()
                while not self._is_created(f"writers/{epoch:08d}.json", content):
                    epoch += 1
                self._epoch = epoch
            return self._epoch

    def _writers(self) -> list[int]:
        return [
            int(match["epoch"]) for file in self.store.files("writers/") if (match := _WRITER_NAME.fullmatch(file.name))
        ]

    def _refuse_later_writer(self, failure: str) -> None:
        own, later = self._claim(), max(self._writers(), default=0)
        if later > own:
            raise CheckpointError(
                failure,
                f"Another run has started to write there: {self._described(later)}.",
                "Set a different URL for each run in ProjectConfiguration(remote=...). Local checkpoints are "
                "unchanged.",
            )

    def _described(self, epoch: int) -> str:
        name = f"writers/{epoch:08d}.json"
        try:
            (size,) = [file.size for file in self.store.files("writers/") if file.name == name]
            owner = parse_json(self.store.read(name, 0, size), _OWNER_SHAPE)
        except (OSError, ValueError):
            return "its record cannot be read"
        return printable(f"process {owner.get('pid', '?')} on {owner['host']}, since {owner['started']}")

    # ------------------------------------------------------------------ removing

    def remove(self, names: Iterable[str]) -> None:
        """Remove checkpoints, manifests first, so that readers never see a part of one.

        Raises:
            CheckpointError: the store does not answer or denies access.
        """
        with store_errors(f"Cannot remove checkpoints from {self.store.url}."):
            for name in names:
                files = [file.name for file in self.store.files(f"{name}/")]
                self.store.remove([file for file in files if _MANIFEST_NAME.fullmatch(file)])
                self.store.remove([file for file in files if not _MANIFEST_NAME.fullmatch(file)])

    def surplus(self, keep: int, period: float | None = None) -> list[RemoteCheckpoint]:
        """The numbered checkpoints beyond a limit; the newest complete one is never among them.

        Args:
            keep: number of newest checkpoints to keep.
            period: see `accel_plugins.checkpoint.retention.beyond`.
        """
        numbered = {one.name: one for one in self.committed() if one.number >= 0}
        newest_good = next((name for name in reversed(numbered) if not list(_missing(numbered[name]))), None)
        written = {name: one.manifest.written for name, one in numbered.items()}
        return [numbered[name] for name in beyond(written, keep, period) if name != newest_good]

    def remove_oldest(self, keep: int, period: float | None = None, besides: str = "") -> None:
        """Remove the surplus of this run and of earlier ones. What is saved under their names meanwhile stays.

        Args:
            keep: number of newest checkpoints to keep.
            period: see `accel_plugins.checkpoint.retention.beyond`.
            besides: the name of another one to keep.

        Raises:
            CheckpointError: the store does not answer or denies access.
        """
        with store_errors(f"Cannot remove checkpoints from {self.store.url}."):
            for one in self.surplus(keep, period):
                if one.epoch <= self._claim() and one.name != besides:
                    seen = one.epoch, one.generation
                    older = {key: size for key, size in self._manifests(one.name).items() if key <= seen}
                    self._remove_manifests(one.name, older)

    def newest(self, damaged: Collection[str] = ()) -> RemoteCheckpoint | None:
        """The newest numbered checkpoint with all its files.

        Args:
            damaged: paths of checkpoints that are known to be damaged.
        """
        numbered = [one for one in self.committed() if one.number >= 0 and one.path not in damaged]
        return next((one for one in reversed(numbered) if not list(_missing(one))), None)


def _missing(checkpoint: RemoteCheckpoint) -> Iterator[str]:
    for name, expected in sorted(checkpoint.manifest.files.items()):
        size = checkpoint.present.get(name)
        if size is None:
            yield f"{printable(name)} is missing."
        elif size != expected.size:
            yield f"{printable(name)} has {size} bytes, and {expected.size} were written."


def _manifest_name(name: str, epoch: int, generation: int) -> str:
    return f"{name}/manifest-{epoch:08d}-{generation:08d}.json"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def split_url(url: str) -> tuple[str, str]:
    """The URL of a store, and the name of a checkpoint in it.

    Raises:
        SettingError: the URL has no checkpoint name.

    Example:
        >>> split_url("s3://bucket/run/checkpoint_3")
        ('s3://bucket/run', 'checkpoint_3')
    """
    store, _, name = url.rstrip("/").rpartition("/")
    if not name or store.endswith(":/") or "://" not in store:
        raise SettingError(
            f"Cannot find a checkpoint at {url!r}.",
            "The URL is that of a store, without the name of a checkpoint.",
            "Use the URL of a checkpoint, such as s3://bucket/run/checkpoint_3.",
        )
    return store, name
