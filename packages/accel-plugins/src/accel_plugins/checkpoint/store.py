"""Where copies of checkpoints are kept: a small interface, the folders of a file system, and how a URL finds its store.

A package adds a store by an entry point of the group `accel.checkpoint_stores`, named after the scheme of its URLs:

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
from accel_state.settings.extension import extensions
from accel_state.untrusted import path_inside

__all__ = ("CheckpointStore", "FileStore", "StoredFile", "is_url", "open_store", "store_errors")

GROUP: Final = "accel.checkpoint_stores"


@dataclass(frozen=True)
class StoredFile:
    """One file of a store.

    Args:
        name: relative to the URL of the store, with forward slashes.
        size: in bytes.
        modified: seconds since 1970.
    """

    name: str
    size: int
    modified: float


class CheckpointStore(ABC):
    """A place that holds files by name, below a URL.

    Methods are called from several threads at once. They raise `FileNotFoundError`, `FileExistsError`,
    `PermissionError` and, for all else that goes wrong, another `OSError`; none waits longer than the deadline that the
    store was made with.

    Args:
        url: what the names are relative to.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @property
    def local_folder(self) -> Path | None:
        """The folder whose files these are; None of a store that no path leads to."""
        return None

    @abstractmethod
    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        """All files whose names begin with a prefix, in any order.

        Args:
            prefix: empty, or names of folders with a slash behind each.
        """

    @abstractmethod
    def read(self, name: str, start: int, end: int) -> bytes:
        """The bytes of a file from `start` up to `end`, which is not beyond its size."""

    @abstractmethod
    def write(self, name: str, source: Path) -> None:
        """Copy a local file; readers see all of it or nothing. What had the name before is replaced."""

    @abstractmethod
    def create(self, name: str, content: bytes) -> None:
        """Write a small file, unless one of that name is there.

        Of several that create the same name at the same time, one succeeds.

        Raises:
            FileExistsError: it is there.
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove files; names that are not there are skipped."""


class FileStore(CheckpointStore):
    """A folder, such as the mount of another file system.

    Args:
        url: `file://` and the absolute path of the folder.
        deadline: is not used; the file system has its own.
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
        """Some bytes of a file."""
        with open(path_inside(self.folder, name), "rb") as file:
            file.seek(start)
            return file.read(end - start)

    def write(self, name: str, source: Path) -> None:
        """Copy a file under another name, and rename it when the disk holds it."""
        with open(source, "rb") as file:
            os.replace(self._partial(name, iter(lambda: file.read(1 << 20), b"")), path_inside(self.folder, name))
        fsync_path((self.folder / name).parent)

    def create(self, name: str, content: bytes) -> None:
        """Write a file under another name, and link it to its own."""
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
        """Remove files, and the folders that are empty without them."""
        for name in names:
            path = Path(path_inside(self.folder, name))
            path.unlink(missing_ok=True)
            with suppress(OSError):
                for folder in path.parents:
                    if folder == self.folder:
                        break
                    folder.rmdir()


def is_url(place: str | os.PathLike[str] | None) -> bool:
    """Whether a place is the URL of a store, and not a folder."""
    return isinstance(place, str) and "://" in place


def open_store(url: str, deadline: float = 600.0) -> CheckpointStore:
    """The store of a URL.

    Args:
        url: such as `s3://bucket/run`, `gs://bucket/run`, `az://container/run`, or `file://` and a path.
        deadline: seconds after which a store that does not answer is given up.

    Raises:
        SettingError: no installed package has a store for this scheme.
        Missing: its library is not installed.
        CheckpointError: the store cannot be used.

    Example:
        >>> store = open_store(Path("no-such-folder").absolute().as_uri())
        >>> sorted(file.name for file in store.files())
        []
    """
    scheme = url.partition("://")[0]
    known = {found.name: found for found in extensions(GROUP)}
    if "://" not in url or scheme not in known:
        raise SettingError(
            f"Cannot open the store {url!r} for checkpoints.",
            f"No installed package has a store for {scheme!r}." if "://" in url else "It is not a URL.",
            f"Give a URL that begins with {', '.join(f'{name}://' for name in sorted(known))}.",
        )
    make: Callable[[str, float], CheckpointStore] = known[scheme].load()
    with store_errors(f"Cannot open the store {url!r} for checkpoints."):
        return make(url, deadline)


@contextmanager
def store_errors(
    failed: str, remedy: str = "Local checkpoints are untouched. Check the store, and try again."
) -> Iterator[None]:
    """A block in which errors of a store become a `CheckpointError` that says what failed.

    Args:
        failed: first part of the error.
        remedy: last part of the error, where the kind of error does not tell a better one.
    """
    try:
        yield
    except AccelError:
        raise
    except PermissionError as error:
        better = "Give credentials that may list, read and write there, and that have not expired."
        raise CheckpointError(failed, f"The store refuses: {error}", better) from error
    except OSError as error:
        raise CheckpointError(failed, f"{type(error).__name__}: {error}", remedy) from error
