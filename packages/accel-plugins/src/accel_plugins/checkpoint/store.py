"""Stores for copies of checkpoints: the interface, folders of a file system, and the lookup of a URL's store.

A package adds a store by an entry point of the group `accel.checkpoint_stores`, with the URL scheme as name:

    [project.entry-points."accel.checkpoint_stores"]
    hdfs = "my_package:HdfsStore"

The entry point is called with the URL and the deadline, and returns a `CheckpointStore`.
"""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from accel_plugins.checkpoint.files import fsync_path, walk
from accel_state.errors import AccelError, CheckpointError, SettingError
from accel_state.plugins import PluginGroup
from accel_state.untrusted import path_inside

__all__ = ("STORES", "CheckpointStore", "FileStore", "StoredFile", "is_url", "open_store", "store_errors")

STORES: Final[PluginGroup[Callable[[str, float], CheckpointStore]]] = PluginGroup(
    "accel.checkpoint_stores", "checkpoint store"
)
"""The stores by URL scheme; each is called with the URL and the deadline."""


@dataclass(frozen=True)
class StoredFile:
    """One file of a store.

    Args:
        name: the name relative to the store's URL, with forward slashes.
        size: size in bytes.
        modified: time of the last change, in seconds since 1970.
    """

    name: str
    size: int
    modified: float


class CheckpointStore(ABC):
    """A store of files by name, below a URL.

    Methods are called from several threads at once. They raise `FileNotFoundError`, `FileExistsError`,
    `PermissionError` or, for other failures, another `OSError`. They must not wait longer than the deadline that was
    passed to the constructor.

    Args:
        url: the URL to which names are relative.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @property
    def local_folder(self) -> Path | None:
        """The local folder of the store, or None if it has none."""
        return None

    @abstractmethod
    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        """All files with names that begin with a prefix, in any order.

        Args:
            prefix: empty, or folder names, each followed by a slash.
        """

    @abstractmethod
    def read(self, name: str, start: int, end: int) -> bytes:
        """The bytes of a file from `start` up to `end`, which is at most its size."""

    @abstractmethod
    def write(self, name: str, source: Path) -> None:
        """Copy a local file to the store, atomically for readers. An existing file of that name is replaced."""

    @abstractmethod
    def create(self, name: str, content: bytes) -> None:
        """Write a small file, unless the name exists.

        If several processes create the same name at the same time, exactly one succeeds.

        Raises:
            FileExistsError: the name exists.
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove files; names that do not exist are ignored."""


class FileStore(CheckpointStore):
    """A folder, such as the mount of another file system.

    Args:
        url: `file://` and the absolute path of the folder.
        deadline: not used; the file system has its own timeouts.
    """

    def __init__(self, url: str, deadline: float = 600.0) -> None:
        super().__init__(url)
        self.folder = Path(unquote(urlsplit(url).path))

    @property
    def local_folder(self) -> Path:
        """The folder of the URL."""
        return self.folder

    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        """All files below a folder of the store."""
        for path in walk(self.folder / prefix):
            if not path.name.startswith(".partial-"):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    yield StoredFile(path.relative_to(self.folder).as_posix(), status.st_size, status.st_mtime)

    def read(self, name: str, start: int, end: int) -> bytes:
        """A range of bytes of a file."""
        with open(path_inside(self.folder, name), "rb") as file:
            file.seek(start)
            return file.read(end - start)

    def write(self, name: str, source: Path) -> None:
        """Copy a file to a temporary name, flush it, and rename it."""
        with open(source, "rb") as file:
            os.replace(self._partial(name, iter(lambda: file.read(1 << 20), b"")), path_inside(self.folder, name))
        fsync_path((self.folder / name).parent)

    def create(self, name: str, content: bytes) -> None:
        """Write a file with a temporary name, and hard-link it to the final name."""
        partial = self._partial(name, iter((content,)))
        try:
            os.link(partial, path_inside(self.folder, name))
        finally:
            partial.unlink()
        fsync_path((self.folder / name).parent)

    def _partial(self, name: str, content: Iterator[bytes]) -> Path:
        parent = Path(path_inside(self.folder, name)).parent
        parent.mkdir(parents=True, exist_ok=True)
        partial = parent / f".partial-{secrets.token_hex(8)}"
        try:
            with open(partial, "xb") as file:
                for part in content:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return partial

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, and folders that become empty."""
        for name in names:
            path = Path(path_inside(self.folder, name))
            path.unlink(missing_ok=True)
            with suppress(OSError):
                for folder in path.parents:
                    if folder == self.folder:
                        break
                    folder.rmdir()


def is_url(place: str | os.PathLike[str] | None) -> bool:
    """Whether a location is the URL of a store, and not a folder."""
    return isinstance(place, str) and "://" in place


def open_store(url: str, deadline: float = 600.0) -> CheckpointStore:
    """The store of a URL.

    Args:
        url: such as `s3://bucket/run`, `gs://bucket/run`, `az://container/run`, or `file://` and a path.
        deadline: seconds after which a request to the store fails.

    Raises:
        SettingError: no installed package has a store for this scheme.
        Missing: the store's library is not installed.
        PluginError: several packages provide the store, or it cannot be loaded.
        CheckpointError: the store cannot be used.

    Example:
        >>> store = open_store(Path("no-such-folder").absolute().as_uri())
        >>> sorted(file.name for file in store.files())
        []
    """
    failure = f"Cannot open the store {url!r} for checkpoints."
    if not is_url(url):
        schemes = ", ".join(f"{name}://" for name in STORES.names())
        raise SettingError(failure, "The value is not a URL.", f"Use a URL that begins with {schemes}.")
    make = STORES.find(url.partition("://")[0], failure).get(failure)
    with store_errors(failure):
        return make(url, deadline)


@contextmanager
def store_errors(
    failure: str, remedy: str = "Local checkpoints are unchanged. Check the store, and try again."
) -> Iterator[None]:
    """A context that converts errors of a store to a `CheckpointError` with the failed operation.

    Args:
        failure: first sentence of the error.
        remedy: last sentence of the error, unless the kind of error has a better one.
    """
    try:
        yield
    except AccelError:
        raise
    except PermissionError as error:
        better = "Use valid credentials with permission to list, read and write there."
        raise CheckpointError(failure, f"The store denied access: {error}", better) from error
    except OSError as error:
        raise CheckpointError(failure, f"{type(error).__name__}: {error}", remedy) from error
