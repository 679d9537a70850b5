"""The kit for stores catches every fault that was planted, and accepts stores that are right."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from accel_plugins.checkpoint.store import CheckpointStore, FileStore, StoredFile
from accel_state import library
from accel_testing.stores import StoreSuite


class MemoryStore(CheckpointStore):
    """A store as others write it: files in the memory of this process."""

    everything: ClassVar[dict[str, bytes]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, url: str, deadline: float) -> None:
        super().__init__(url)
        if "unreachable" in url:
            raise TimeoutError(url)

    def _place(self, name: str) -> str:
        return f"{self.url}/{name}"

    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        with self.lock:
            stored = [(name, len(content)) for name, content in self.everything.items()]
        for name, size in stored:
            if name.startswith(self._place(prefix)):
                yield StoredFile(name.removeprefix(self._place("")), size, Path(__file__).stat().st_atime)

    def read(self, name: str, start: int, end: int) -> bytes:
        try:
            return self.everything[self._place(name)][start:end]
        except KeyError:
            raise FileNotFoundError(name) from None

    def write(self, name: str, source: Path) -> None:
        content = source.read_bytes()
        with self.lock:
            self.everything[self._place(name)] = content

    def create(self, name: str, content: bytes) -> None:
        with self.lock:
            if self._place(name) in self.everything:
                raise FileExistsError(name)
            self.everything[self._place(name)] = content

    def remove(self, names: Sequence[str]) -> None:
        with self.lock:
            for name in names:
                self.everything.pop(self._place(name), None)


class TestMemoryStore(StoreSuite):
    """A store in memory, which answers at once."""

    store_class = MemoryStore
    many = 50

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"memory://{tmp_path}"

    @pytest.fixture(autouse=True)
    def _installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        installed(tmp_path / "site", "memory", f"{__name__}:MemoryStore", monkeypatch)
        yield
        MemoryStore.everything.clear()

    def unreachable(self) -> str:
        return "memory://unreachable"


def installed(site: Path, scheme: str, target: str, patch: pytest.MonkeyPatch) -> None:
    """Install a package with an entry point of a store."""
    info = site / f"{scheme}_store-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {scheme}-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[accel.checkpoint_stores]\n{scheme} = {target}\n")
    patch.syspath_prepend(str(site))
    # The plugin is in the module of this test, whose lines stay the user's in other tests.
    patch.setattr(library, "_libraries", set(library._libraries))


# ------------------------------------------------------------------ planted faults

_PATIENT = 100.0


class ReplacesWhatExists(FileStore):
    def create(self, name: str, content: bytes) -> None:
        self.remove([name])
        super().create(name, content)


class LooksBeforeItCreates(FileStore):
    """Tests whether the name exists, and writes then; all threads look before one writes."""

    have_looked = threading.Barrier(8)

    def create(self, name: str, content: bytes) -> None:
        path = self.folder / name
        if path.exists():
            raise FileExistsError(name)
        self.have_looked.wait(_PATIENT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


class NamesTheFolderOnly(FileStore):
    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        return (file for file in super().files(prefix) if "/" not in file.name.removeprefix(prefix))


class ComparesLettersOfNames(FileStore):
    """As stores do whose prefixes are no folders."""

    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        return (file for file in super().files() if file.name.startswith(prefix.rstrip("/")))


class ListsOnePage(FileStore):
    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        return iter(sorted(super().files(prefix), key=lambda file: file.name)[:1000])


class RemovesOnePage(FileStore):
    def remove(self, names: Sequence[str]) -> None:
        super().remove(names[:1000])


class ReadsFromTheBeginning(FileStore):
    def read(self, name: str, start: int, end: int) -> bytes:
        return super().read(name, 0, end - start)


class ReadsTheEndToo(FileStore):
    """As the ranges of HTTP do."""

    def read(self, name: str, start: int, end: int) -> bytes:
        return super().read(name, start, end + 1)


class WritesInPlace(FileStore):
    """Goes on with the second half of a file when a reader has seen the first."""

    listed: ClassVar[threading.Event] = threading.Event()

    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        yield from super().files(prefix)
        self.listed.set()

    def write(self, name: str, source: Path) -> None:
        path, content = self.folder / name, source.read_bytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
            file.flush()
            self.listed.clear()
            self.listed.wait(_PATIENT)
            file.write(content[len(content) // 2 :])


class ShowsFilesThatAreWritten(FileStore):
    """Lists its temporary file, and goes on when a reader has seen it."""

    listed: ClassVar[threading.Event] = threading.Event()

    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        yield from super().files(prefix)
        self.listed.set()

    def write(self, name: str, source: Path) -> None:
        super().create(f"{name}.part", b"")
        self.listed.clear()
        self.listed.wait(_PATIENT)
        super().write(name, source)
        self.remove([f"{name}.part"])


class RefusesToReplace(FileStore):
    def write(self, name: str, source: Path) -> None:
        if not (self.folder / name).exists():
            super().write(name, source)


class MissesNamesThatDoNotExist(FileStore):
    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            os.unlink(self.folder / name)


class RemovesFolders(FileStore):
    """Removes what begins with the name."""

    def remove(self, names: Sequence[str]) -> None:
        super().remove([file.name for file in self.files() if file.name.startswith(tuple(names))])


class RemembersLists(FileStore):
    def __init__(self, url: str, deadline: float) -> None:
        super().__init__(url, deadline)
        self.known: dict[str, list[StoredFile]] = {}

    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        if prefix not in self.known:
            self.known[prefix] = list(super().files(prefix))
        return iter(self.known[prefix])


class TellsNothingFromMissing(FileStore):
    def read(self, name: str, start: int, end: int) -> bytes:
        try:
            return super().read(name, start, end)
        except FileNotFoundError:
            return b""


class NamesFromTheRoot(FileStore):
    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        return (replace(file, name=f"{self.folder.name}/{file.name}") for file in super().files(prefix))


class CountsBlocks(FileStore):
    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        return (replace(file, size=-(-file.size // 512) * 512) for file in super().files(prefix))


class CountsMilliseconds(FileStore):
    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        return (replace(file, modified=file.modified * 1000) for file in super().files(prefix))


class WritesOneFileAtATime(FileStore):
    """Its threads share a temporary file, which all have written before one renames it."""

    have_written = threading.Barrier(8)

    def write(self, name: str, source: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / ".partial-one"
        partial.write_bytes(source.read_bytes())
        self.have_written.wait(_PATIENT)
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, self.folder / name)


class ChangesNames(FileStore):
    """Replaces the letters that it cannot store."""

    def write(self, name: str, source: Path) -> None:
        super().write(name.replace(" ", "_"), source)


class WritesWhatIsNotThere(FileStore):
    def write(self, name: str, source: Path) -> None:
        if source.exists():
            super().write(name, source)
        else:
            self.create(name, b"")


class LosesTheUrl(FileStore):
    def __init__(self, url: str, deadline: float) -> None:
        super().__init__(url, deadline)
        self.url = url + "/"


BROKEN: list[tuple[Any, str, tuple[Any, ...]]] = [
    (LosesTheUrl, "test_a_url_leads_to_the_store_by_its_entry_point", ()),
    (NamesFromTheRoot, "test_names_are_relative_to_the_url", ()),
    (CountsBlocks, "test_a_written_file_is_read_back_by_ranges", (1,)),
    (ReadsFromTheBeginning, "test_a_written_file_is_read_back_by_ranges", (1 << 10,)),
    (ReadsTheEndToo, "test_a_written_file_is_read_back_by_ranges", (1,)),
    (ChangesNames, "test_all_names_can_be_written_listed_read_and_removed", ()),
    (RefusesToReplace, "test_a_file_is_replaced", ()),
    (WritesInPlace, "test_a_file_that_is_written_is_there_as_a_whole_or_not_at_all", ()),
    (ShowsFilesThatAreWritten, "test_a_file_that_is_written_is_there_as_a_whole_or_not_at_all", ()),
    (WritesWhatIsNotThere, "test_a_source_that_does_not_exist_is_an_error_and_leaves_nothing", ()),
    (CountsMilliseconds, "test_times_are_in_seconds_since_1970", ()),
    (ReplacesWhatExists, "test_a_name_that_exists_is_not_created_again", ()),
    (LooksBeforeItCreates, "test_one_of_many_that_create_a_name_at_once_succeeds", ()),
    (NamesTheFolderOnly, "test_a_prefix_selects_whole_folders", ()),
    (ComparesLettersOfNames, "test_a_prefix_selects_whole_folders", ()),
    (RemembersLists, "test_changes_are_seen_at_once_by_all", ()),
    (ListsOnePage, "test_long_lists_are_complete_and_removed_completely", ()),
    (RemovesOnePage, "test_long_lists_are_complete_and_removed_completely", ()),
    (RemovesFolders, "test_only_files_that_are_named_are_removed", ()),
    (MissesNamesThatDoNotExist, "test_names_that_do_not_exist_are_removed_without_an_error", ()),
    (TellsNothingFromMissing, "test_a_file_that_does_not_exist_is_not_found", ()),
    (WritesOneFileAtATime, "test_threads_use_one_store_at_once", ()),
]
"""(store, name of the test that catches it, further arguments of the test)."""


def suite_of(store: Any) -> StoreSuite:
    """The suite of one store."""

    class Suite(StoreSuite):
        store_class = store

    return Suite()


@pytest.mark.parametrize(("store", "test", "arguments"), BROKEN)
def test_a_planted_fault_is_caught(store: Any, test: str, arguments: tuple[Any, ...], tmp_path: Path) -> None:
    method = getattr(suite_of(store), test)
    places = {"url": (tmp_path / "store").as_uri(), "tmp_path": tmp_path}
    fixtures = [places[name] for name in inspect.signature(method).parameters if name in places]
    with pytest.raises((AssertionError, OSError, pytest.fail.Exception)):
        method(*fixtures, *arguments)


def test_every_test_of_the_suite_catches_a_planted_fault() -> None:
    tests = {name for name in vars(StoreSuite) if name.startswith("test_")}
    # An empty list can be given back wrongly only by a store that invents files.
    unplanted = {
        "test_nothing_is_listed_where_nothing_is_stored",
        "test_a_store_that_does_not_answer_is_an_error_within_the_deadline",
    }
    assert tests - {test for _, test, _ in BROKEN} == unplanted


def test_a_suite_without_a_place_says_what_to_define() -> None:
    with pytest.raises(NotImplementedError, match="fixture `url`"):
        inspect.unwrap(StoreSuite.url)(suite_of(FileStore), Path())
