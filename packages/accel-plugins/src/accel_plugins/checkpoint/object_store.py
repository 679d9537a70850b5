"""Checkpoints in object stores: S3 and compatible stores, Google Cloud Storage, Azure Blob Storage.

The library obstore transfers the data. It reads credentials and endpoints from the standard variables of each cloud,
such as `AWS_ACCESS_KEY_ID`, `AWS_REGION` and `AWS_ENDPOINT_URL`; endpoints with `http://` are allowed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from accel_plugins.checkpoint.store import CheckpointStore, StoredFile
from accel_state.settings.installed import Requirement

__all__ = ("ObjectStore",)

_OBSTORE: Final = Requirement("obstore", versions=">=0.8")

_PART_BYTES: Final = 8 << 20
"""Size in bytes of one part of a large file."""
_CONCURRENT_PARTS: Final = 4

_REQUEST_TIMEOUT: Final = timedelta(seconds=60)
"""Maximum time of the request for one part."""
_CONNECT_TIMEOUT: Final = timedelta(seconds=10)

_ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")


class ObjectStore(CheckpointStore):
    """A folder of a bucket.

    Args:
        url: `s3://bucket/folder`, `gs://bucket/folder` or `az://container/folder`.
        deadline: seconds for which a request is repeated while the store is busy or unreachable.

    Raises:
        Missing: obstore is not installed.
    """

    def __init__(self, url: str, deadline: float = 600.0) -> None:
        _OBSTORE.demand(f"Cannot open the object store {url}.")
        super().__init__(url)
        import obstore
        from obstore.store import from_url

        self._obstore: Any = obstore
        plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINT_VARIABLES)
        limit = timedelta(seconds=deadline)
        with _as_os_errors(self.url):
            self._store: Any = from_url(
                self.url,
                client_options={
                    "allow_http": plain,
                    "connect_timeout": min(_CONNECT_TIMEOUT, limit),
                    "timeout": min(_REQUEST_TIMEOUT, limit),
                },
                retry_config={
                    "max_retries": 1000,
                    "retry_timeout": limit,
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=100),
                        "max_backoff": min(timedelta(seconds=10), limit / 4),
                        "base": 2,
                    },
                },
            )

    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        """All files below a folder of the store."""
        with _as_os_errors(f"{self.url}/{prefix}"):
            for page in self._obstore.list(self._store, prefix.rstrip("/") or None):
                for entry in page:
                    yield StoredFile(entry["path"], entry["size"], entry["last_modified"].timestamp())

    def read(self, name: str, start: int, end: int) -> bytes:
        """A range of bytes of a file."""
        if start == end:
            return b""
        with _as_os_errors(f"{self.url}/{name}"):
            return bytes(self._obstore.get_range(self._store, name, start=start, end=end))

    def write(self, name: str, source: Path) -> None:
        """Upload a file, a large one in parts; it becomes visible when all parts are uploaded."""
        with _as_os_errors(f"{self.url}/{name}"):
            self._obstore.put(self._store, name, source, chunk_size=_PART_BYTES, max_concurrency=_CONCURRENT_PARTS)

    def create(self, name: str, content: bytes) -> None:
        """Upload a small file, unless the name exists."""
        with _as_os_errors(f"{self.url}/{name}"):
            self._obstore.put(self._store, name, content, mode="create", use_multipart=False)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files by name; absent ones are ignored."""
        for first in range(0, len(names), 1000):
            with _as_os_errors(self.url):
                try:
                    self._obstore.delete(self._store, list(names[first : first + 1000]))
                except FileNotFoundError:
                    continue


@contextmanager
def _as_os_errors(place: str) -> Iterator[None]:
    """A context that converts errors of obstore to those of the `CheckpointStore` interface."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError:
        raise
    except exceptions.NotFoundError as error:
        raise FileNotFoundError(f"{place} does not exist: {_first_line(error)}") from error
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        raise FileExistsError(f"{place} exists already") from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(f"{place}: {_first_line(error)}") from error
    except exceptions.BaseError as error:
        kind = PermissionError if _is_about_credentials(error) else OSError
        raise kind(f"{place}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """The error text, without the library's dump of its state."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:500]


def _is_about_credentials(error: Exception) -> bool:
    """Whether a general error reports missing or expired credentials."""
    text = str(error)
    return any(word in text for word in ("ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "credential"))
