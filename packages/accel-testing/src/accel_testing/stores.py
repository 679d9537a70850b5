"""`StoreSuite`: the tests that every store for copies of checkpoints passes. Subclass it, and say where it may write.

For example:

    class TestMyStore(StoreSuite):
        store_class = MyStore

        @pytest.fixture
        def url(self, tmp_path):
            return f"mine://{tmp_path}/run"

The suite tests the store alone, with its real server, and not what checkpoints make of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest

from accel_plugins.checkpoint.store import CheckpointStore, open_store

__all__ = ("StoreSuite",)

T = TypeVar("T")

_DEADLINE_S = 60.0
_THREAD_COUNT = 8
_DAY_S = 86400.0
_LARGE_BYTES = (8 << 20) + 3
"""More than stores send in one part."""
_FILE_NAMES = ("a", "folder/b.bin", "folder/inner/c.safetensors", "folder/with space+plus=%20,ä#1.bin")


class StoreSuite:
    """Tests of one store: listing, ranges, replacement, exclusive creation, removal and errors."""

    store_class: ClassVar[Callable[[str, float], CheckpointStore]]
    """What the entry point names: called with a URL and a deadline in seconds, it returns the store."""

    many: ClassVar[int] = 1100
    """Number of files of the test of long lists; more than the store lists or removes in one request."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        """The URL of a place of one test alone, in which nothing is stored."""
        raise NotImplementedError("define the fixture `url`: the URL of a place in which nothing is stored")

    def unreachable(self) -> str | None:
        """The URL of a store that does not answer, such as a port on which nobody listens; None if there is none."""
        return None

    def open(self, url: str, deadline: float = _DEADLINE_S) -> CheckpointStore:
        """A store object of a URL; a test opens several for one URL, as the processes of a run do."""
        return type(self).store_class(url, deadline)

    # ---------------------------------------------------------------- opening

    def test_a_url_leads_to_the_store_by_its_entry_point(self, url: str) -> None:
        store = open_store(url, _DEADLINE_S)
        assert type(store) is type(self.open(url))
        assert store.url == url.rstrip("/"), "`CheckpointStore.__init__` receives the URL"

    def test_nothing_is_listed_where_nothing_is_stored(self, url: str) -> None:
        store = self.open(url)
        assert list(store.files()) == []
        assert list(store.files("folder/")) == []

    def test_names_are_relative_to_the_url(self, url: str) -> None:
        self.open(f"{url}/inner/").create("name", b"inner")
        self.open(f"{url}-other").create("name", b"other")
        self.open(url).create("name", b"outer")
        assert _listed(self.open(url)) == {"name": 5, "inner/name": 5}, "files of `URL-other` are not below `URL`"
        assert _listed(self.open(f"{url}/inner")) == {"name": 5}
        assert self.open(url).read("inner/name", 0, 5) == b"inner"

    # ---------------------------------------------------------------- writing and reading

    @pytest.mark.parametrize("size", [0, 1, _LARGE_BYTES])
    def test_a_written_file_is_read_back_by_ranges(self, url: str, tmp_path: Path, size: int) -> None:
        content = bytes(range(251)) * (size // 251) + bytes(range(size % 251))
        self.open(url).write("folder/file.bin", _file(tmp_path, content))
        store = self.open(url)
        assert _listed(store) == {"folder/file.bin": size}
        middle = size // 2
        for start, end in ((0, size), (0, middle), (middle, size), (middle, middle), (max(size - 1, 0), size)):
            part = store.read("folder/file.bin", start, end)
            assert len(part) == end - start, f"read(name, {start}, {end}) of {size} bytes returns those before `end`"
            assert part == content[start:end], f"read(name, {start}, {end}) of {size} bytes"

    def test_all_names_can_be_written_listed_read_and_removed(self, url: str, tmp_path: Path) -> None:
        store = self.open(url)
        for name in _FILE_NAMES:
            store.write(name, _file(tmp_path, name.encode()))
            store.create(f"created/{name}", name.encode())
        expected = {f"{folder}{name}": len(name.encode()) for name in _FILE_NAMES for folder in ("", "created/")}
        assert _listed(self.open(url)) == expected
        for name in _FILE_NAMES:
            for stored in (name, f"created/{name}"):
                assert self.open(url).read(stored, 0, expected[stored]) == name.encode()
        store.remove(list(expected))
        assert _listed(self.open(url)) == {}

    def test_a_file_is_replaced(self, url: str, tmp_path: Path) -> None:
        store = self.open(url)
        store.write("name", _file(tmp_path, b"first, which is longer"))
        store.write("name", _file(tmp_path, b"second"))
        assert _listed(store) == _listed(self.open(url)) == {"name": 6}
        assert store.read("name", 0, 6) == b"second"

    def test_a_file_that_is_written_is_there_as_a_whole_or_not_at_all(self, url: str, tmp_path: Path) -> None:
        """Readers see the files of before or of after, while others write."""
        first, second = (_file(tmp_path, letter * _LARGE_BYTES) for letter in (b"1", b"2"))
        writer, reader = self.open(url), self.open(url)
        written = threading.Event()

        def write() -> None:
            try:
                for source in (first, second, first):
                    writer.write("folder/name", source)
            finally:
                written.set()

        seen = set()
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            last = False
            while not last:
                last = written.is_set()
                listed = _listed(reader)
                seen.add(str(listed))
                if "folder/name" in listed:
                    content = reader.read("folder/name", 0, _LARGE_BYTES)
                    whole = len(content) == content.count(content[:1]) == _LARGE_BYTES
                    seen.add("all bytes of one writing" if whole else "a mixture, or less than all bytes")
            writing.result()
        assert seen <= {"{}", str({"folder/name": _LARGE_BYTES}), "all bytes of one writing"}

    def test_a_source_that_does_not_exist_is_an_error_and_leaves_nothing(self, url: str, tmp_path: Path) -> None:
        store = self.open(url)
        with pytest.raises(OSError):
            store.write("name", tmp_path / "no-such-file")
        assert _listed(store) == {}

    def test_times_are_in_seconds_since_1970(self, url: str) -> None:
        store = self.open(url)
        store.create("name", b"")
        (file,) = store.files()
        assert abs(file.modified - time.time()) < _DAY_S

    # ---------------------------------------------------------------- creating

    def test_a_name_that_exists_is_not_created_again(self, url: str, tmp_path: Path) -> None:
        store = self.open(url)
        store.create("created", b"first")
        store.write("written", _file(tmp_path, b"first"))
        for name in ("created", "written"):
            with pytest.raises(FileExistsError):
                self.open(url).create(name, b"other")
            assert store.read(name, 0, 5) == b"first", "`create` replaced a file"
        store.remove(["created"])
        store.create("created", b"again")
        assert store.read("created", 0, 5) == b"again"

    def test_one_of_many_that_create_a_name_at_once_succeeds(self, url: str) -> None:
        together = threading.Barrier(_THREAD_COUNT)

        def create(number: int) -> bool:
            store = self.open(url)
            together.wait(_DEADLINE_S)
            try:
                store.create("folder/name", b"%d" % number)
            except FileExistsError:
                return False
            return True

        succeeded = _at_once(create, range(_THREAD_COUNT))
        assert sum(succeeded) == 1, f"{sum(succeeded)} of {_THREAD_COUNT} that created one name at once succeeded"
        assert self.open(url).read("folder/name", 0, 1) == b"%d" % succeeded.index(True)

    # ---------------------------------------------------------------- listing and removing

    def test_a_prefix_selects_whole_folders(self, url: str) -> None:
        store = self.open(url)
        for name in ("save_1/file", "save_1/inner/file", "save_10/file", "save_1.json"):
            store.create(name, b"")
        assert _listed(store, "save_1/") == {"save_1/file": 0, "save_1/inner/file": 0}
        assert _listed(store, "save_1/inner/") == {"save_1/inner/file": 0}
        assert _listed(store, "save_2/") == {}

    def test_changes_are_seen_at_once_by_all(self, url: str, tmp_path: Path) -> None:
        store, other = self.open(url), self.open(url)
        assert _listed(store) == _listed(other) == {}
        store.create("one", b"1")
        assert _listed(store) == _listed(other) == {"one": 1}
        store.write("two", _file(tmp_path, b"22"))
        assert _listed(store) == _listed(other) == {"one": 1, "two": 2}
        other.remove(["one"])
        assert _listed(store) == _listed(other) == {"two": 2}

    def test_long_lists_are_complete_and_removed_completely(self, url: str) -> None:
        store = self.open(url)
        names = [f"folder/{number:05d}" for number in range(self.many)]
        _at_once(lambda name: store.create(name, b"1"), names)
        listed = [file.name for file in store.files()]
        assert len(listed) == len(set(listed)), "a file is listed twice"
        assert sorted(listed) == names
        store.remove(names[1:])
        assert _listed(store) == {names[0]: 1}

    def test_only_files_that_are_named_are_removed(self, url: str) -> None:
        store = self.open(url)
        for name in ("folder/file", "folder/file.json", "folder/file-2/inner"):
            store.create(name, b"")
        store.remove(["folder/file"])
        assert set(_listed(store)) == {"folder/file.json", "folder/file-2/inner"}

    def test_names_that_do_not_exist_are_removed_without_an_error(self, url: str) -> None:
        store = self.open(url)
        store.remove([])
        store.remove(["no/such/file"])
        store.create("name", b"")
        store.remove(["no-such-file", "name", "no-such-folder/file"])
        assert _listed(store) == {}

    # ---------------------------------------------------------------- errors and threads

    def test_a_file_that_does_not_exist_is_not_found(self, url: str) -> None:
        store = self.open(url)
        store.create("removed", b"1")
        store.remove(["removed"])
        for name in ("removed", "no-such-folder/file"):
            with pytest.raises(FileNotFoundError):
                store.read(name, 0, 1)

    def test_a_store_that_does_not_answer_is_an_error_within_the_deadline(self) -> None:
        url = self.unreachable()
        if url is None:
            pytest.skip("`unreachable` names no store that does not answer")
        with pytest.raises(OSError):
            list(self.open(url, 1.0).files())

    def test_threads_use_one_store_at_once(self, url: str, tmp_path: Path) -> None:
        store = self.open(url)
        sources = [_file(tmp_path, b"%d" % number * 1000) for number in range(_THREAD_COUNT)]
        together = threading.Barrier(_THREAD_COUNT)

        def use(number: int) -> bytes:
            together.wait(_DEADLINE_S)
            store.write(f"folder/{number}", sources[number])
            store.create(f"folder/{number}.json", b"%d" % number)
            return store.read(f"folder/{number}", 0, 1000)

        assert _at_once(use, range(_THREAD_COUNT)) == [b"%d" % number * 1000 for number in range(_THREAD_COUNT)]
        sizes = (("", 1000), (".json", 1))
        expected = {f"folder/{number}{suffix}": size for number in range(_THREAD_COUNT) for suffix, size in sizes}
        assert _listed(store) == expected


def _listed(store: CheckpointStore, prefix: str = "") -> dict[str, int]:
    """The sizes of files by name."""
    return {file.name: file.size for file in store.files(prefix)}


def _file(folder: Path, content: bytes) -> Path:
    """A new local file."""
    path = folder / f"source-{len(list(folder.glob('source-*')))}"
    path.write_bytes(content)
    return path


def _at_once(work: Callable[..., T], arguments: Sequence[object]) -> list[T]:
    """The results of calls in several threads, in order."""
    with ThreadPoolExecutor(_THREAD_COUNT) as pool:
        return list(pool.map(work, arguments))
