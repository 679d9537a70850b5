"""Checkpoints on a store that is a folder: what is committed, found, read back, refused and removed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from accel_plugins.checkpoint.commit import staging
from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.manifest import verify
from accel_plugins.checkpoint.recovery import recover
from accel_plugins.checkpoint.remote import RemoteCheckpoints, split_url
from accel_plugins.checkpoint.retention import remove_oldest
from accel_plugins.checkpoint.store import CheckpointStore, FileStore, StoredFile, is_url, open_store
from accel_plugins.checkpoint.uploads import Uploader
from accel_state.errors import CheckpointError, SettingError

pytestmark = pytest.mark.usefixtures("cpu_state")

IDS = [character * 32 for character in "0123456789abcdef"]


@pytest.fixture
def remote(tmp_path: Path) -> RemoteCheckpoints:
    return RemoteCheckpoints.at((tmp_path / "store").as_uri(), deadline=60.0)


def checkpoint(folder: Path, content: str = "weights") -> Path:
    with staging(folder, fsync=False) as staged:
        (staged / "model.safetensors").write_text(content)
        (staged / "shards").mkdir()
        (staged / "shards" / "0.bin").write_bytes(b"")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_checkpoint_comes_back_as_it_was(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint_3")
    remote.upload(folder, folder.name, IDS[0])
    (found,) = remote.committed()
    assert (found.name, found.number, found.epoch, found.generation) == ("checkpoint_3", 3, 1, 0)
    assert remote.verify(found, hashes=True).good
    remote.download(found, tmp_path / "back" / "checkpoint_3")
    assert contents(tmp_path / "back" / "checkpoint_3") == contents(folder)
    assert verify(tmp_path / "back" / "checkpoint_3", hashes=True).good


def test_files_without_a_manifest_are_no_checkpoint(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    remote.store.write(f"checkpoint_1/{IDS[0]}/model.safetensors", checkpoint(tmp_path / "one") / "model.safetensors")
    assert remote.committed() == []
    assert remote.scan()[1] == {"checkpoint_1": 7}
    assert remote.newest() is None


def test_a_second_save_of_a_name_replaces_the_first_when_it_is_complete(
    remote: RemoteCheckpoints, tmp_path: Path
) -> None:
    folder = tmp_path / "latest"
    remote.upload(checkpoint(folder, "first"), "latest", IDS[0])
    checkpoint(folder, "second")
    reader = RemoteCheckpoints.at(remote.store.url)
    remote.store.write(f"latest/{IDS[1]}/model.safetensors", folder / "model.safetensors")
    assert reader.committed()[0].data == IDS[0]
    remote.upload(folder, "latest", IDS[1])
    (found,) = reader.committed()
    assert (found.data, found.epoch, found.generation) == (IDS[1], 1, 1)
    assert {file.name.split("/")[1][:32] for file in remote.store.files("latest/")} == {
        IDS[1],
        "manifest-00000001-00000001.json"[:32],
    }


def test_a_later_run_takes_the_next_epoch_and_the_earlier_one_is_told(
    remote: RemoteCheckpoints, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "checkpoint_0")
    remote.upload(folder, folder.name, IDS[0])
    later = RemoteCheckpoints.at(remote.store.url)
    later.upload(folder, "checkpoint_0", IDS[1])
    with pytest.raises(CheckpointError, match=r"Another run has started to write there: process \d+ on "):
        remote.upload(folder, "checkpoint_1", IDS[2])
    (found,) = remote.committed()
    assert (found.data, found.epoch) == (IDS[1], 2)


def test_runs_that_begin_at_once_get_different_epochs(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint_0")
    runs = [RemoteCheckpoints.at(remote.store.url) for _ in range(8)]
    failed: list[CheckpointError] = []

    def upload(index: int) -> None:
        try:
            runs[index].upload(folder, f"checkpoint_{index}", IDS[index])
        except CheckpointError as error:
            failed.append(error)

    threads = [threading.Thread(target=upload, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    epochs = [run._epoch for run in runs]
    assert sorted(epoch for epoch in epochs if epoch is not None) == list(range(1, 9))
    assert len(failed) < 8


@pytest.mark.parametrize("damage", ["shorter", "other", "missing"])
def test_damage_on_the_store_is_found(remote: RemoteCheckpoints, tmp_path: Path, damage: str) -> None:
    folder = checkpoint(tmp_path / "checkpoint_3")
    remote.upload(folder, folder.name, IDS[0])
    assert isinstance(remote.store, FileStore)
    stored = remote.store.folder / "checkpoint_3" / IDS[0] / "model.safetensors"
    {
        "shorter": lambda: stored.write_text("wei"),
        "other": lambda: stored.write_text("weighty"),
        "missing": stored.unlink,
    }[damage]()
    (found,) = remote.committed()
    assert not remote.verify(found, hashes=True).good
    assert remote.verify(found).good is (damage == "other")
    with pytest.raises(CheckpointError, match="Load an older checkpoint"):
        remote.download(found, tmp_path / "back")
    assert list(tmp_path.glob("back*")) == []


def test_a_damaged_or_newer_manifest_is_named(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint_3")
    remote.upload(folder, folder.name, IDS[0])
    assert isinstance(remote.store, FileStore)
    (path,) = (remote.store.folder / "checkpoint_3").glob("manifest-*")
    commit = json.loads(path.read_text())
    path.write_text("{")
    assert remote.committed() == []
    assert "manifest-00000001-00000000.json is damaged" in remote.scan().damaged["checkpoint_3"]
    path.write_text(json.dumps({**commit, "manifest": json.dumps({**json.loads(commit["manifest"]), "format": 99})}))
    assert "format 99" in remote.scan().damaged["checkpoint_3"]


def test_one_damaged_manifest_does_not_hide_or_keep_the_others(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    for number in range(4):
        remote.upload(checkpoint(tmp_path / f"checkpoint_{number}"), f"checkpoint_{number}", IDS[number])
    assert isinstance(remote.store, FileStore)
    (path,) = (remote.store.folder / "checkpoint_3").glob("manifest-*")
    path.write_text("{")
    newest = remote.newest()
    assert newest is not None
    assert newest.name == "checkpoint_2"
    assert [one.name for one in remote.surplus(1)] == ["checkpoint_0", "checkpoint_1"]
    older = remote.newest([newest.path])
    assert older is not None
    assert older.name == "checkpoint_1"


def test_a_manifest_cannot_make_a_download_write_elsewhere(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint_3")
    remote.upload(folder, folder.name, IDS[0])
    assert isinstance(remote.store, FileStore)
    (path,) = (remote.store.folder / "checkpoint_3").glob("manifest-*")
    commit = json.loads(path.read_text())
    manifest = json.loads(commit["manifest"].replace("model.safetensors", "../../model.safetensors"))
    # As by somebody who can write there, and leaves out the hash, which may be absent.
    del manifest["xxh3_128"]
    path.write_text(json.dumps({**commit, "manifest": json.dumps(manifest)}))
    with pytest.raises(CheckpointError):
        remote.download(remote.committed()[0], tmp_path / "back" / "checkpoint_3")
    assert not (tmp_path / "model.safetensors").exists()


def test_shares_of_nodes_become_one_checkpoint(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    first, second = tmp_path / "first" / "checkpoint_1", tmp_path / "second" / "checkpoint_1"
    checkpoint(first)
    with staging(second, fsync=False) as staged:
        (staged / "random_states_4.pkl").write_text("states")
    other = RemoteCheckpoints.at(remote.store.url)
    thread = threading.Thread(target=remote.upload, args=(first, first.name, IDS[0], 0, (0, 4)))
    thread.start()
    other.upload(second, second.name, IDS[0], 4, (0, 4))
    thread.join()
    (found,) = remote.committed()
    assert set(found.manifest.files) == {"model.safetensors", "shards/0.bin", "random_states_4.pkl"}
    assert remote.verify(found, hashes=True).good


def test_a_share_that_does_not_come_is_named(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    remote.deadline = 0.1
    with pytest.raises(CheckpointError, match="files of process 4 were not uploaded in time"):
        remote.upload(checkpoint(tmp_path / "checkpoint_1"), "checkpoint_1", IDS[0], 0, (0, 4))
    assert remote.committed() == []


def test_the_oldest_are_removed_and_never_the_newest_good_one(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    for index in range(4):
        remote.upload(checkpoint(tmp_path / f"checkpoint_{index}"), f"checkpoint_{index}", IDS[index])
    assert isinstance(remote.store, FileStore)
    for index in (2, 3):
        (remote.store.folder / f"checkpoint_{index}" / IDS[index] / "model.safetensors").unlink()
    newest = remote.newest()
    assert newest is not None
    assert newest.name == "checkpoint_1"
    assert [one.name for one in remote.surplus(1)] == ["checkpoint_0", "checkpoint_2"]
    remote.remove(["checkpoint_0"])
    assert [one.name for one in remote.committed()] == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]


class Careless(FileStore):
    """A store that ignores the condition of a conditional write."""

    def create(self, name: str, content: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_a_store_without_conditional_writes_is_refused_and_left_clean(tmp_path: Path) -> None:
    store = Careless(tmp_path.as_uri())
    with pytest.raises(CheckpointError, match="conditional writes"):
        RemoteCheckpoints(store).probe()
    assert list(store.files()) == []


def test_a_probe_leaves_nothing(remote: RemoteCheckpoints) -> None:
    remote.probe()
    assert list(remote.store.files()) == []


class Failing(FileStore):
    """A store that fails some writes."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.failures: Iterator[BaseException] = iter(())
        self.written: list[str] = []

    def write(self, name: str, source: Path) -> None:
        failure = next(self.failures, None)
        if failure is not None:
            raise failure
        self.written.append(name)
        super().write(name, source)


def test_a_failed_copy_is_logged_and_made_with_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Failing((tmp_path / "store").as_uri())
    store.failures = iter([OSError("the cable is out")])
    uploader = Uploader(RemoteCheckpoints(store))
    first, second = (checkpoint(tmp_path / f"checkpoint_{index}") for index in range(2))
    uploader.add(first, IDS[0])
    assert uploader.wait() == [first]
    assert "the cable is out" in caplog.text
    assert "retried after the next" in caplog.text
    uploader.add(second, IDS[1])
    assert uploader.wait() == []
    assert [one.name for one in uploader.remote.committed()] == ["checkpoint_0", "checkpoint_1"]
    uploader.close()


def test_what_an_attempt_has_brought_is_not_sent_again(tmp_path: Path) -> None:
    store = Failing((tmp_path / "store").as_uri())
    folder = checkpoint(tmp_path / "checkpoint_0")
    remote = RemoteCheckpoints(store)
    store.failures = iter([None, OSError("late")])  # type: ignore[list-item]
    with pytest.raises(CheckpointError, match="late"):
        remote.upload(folder, folder.name, IDS[0])
    remote.upload(folder, folder.name, IDS[0])
    assert sorted(store.written) == [f"checkpoint_0/{IDS[0]}/{name}" for name in ("model.safetensors", "shards/0.bin")]


def test_the_end_names_what_is_not_on_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Failing((tmp_path / "store").as_uri())
    store.failures = iter(lambda: PermissionError("expired"), None)  # type: ignore[arg-type]
    uploader = Uploader(RemoteCheckpoints(store, deadline=5.0))
    uploader.add(checkpoint(tmp_path / "checkpoint_0"), IDS[0])
    uploader.close()
    assert f"These checkpoints are not in {store.url}: {tmp_path / 'checkpoint_0'}" in caplog.text
    assert "credentials" in caplog.text


def test_a_copy_does_not_replace_that_of_another_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    uploader = Uploader(RemoteCheckpoints.at((tmp_path / "store").as_uri(), deadline=60.0))
    folders = [checkpoint(tmp_path / parent / "state", parent) for parent in ("one", "two")]
    for index, folder in enumerate(folders):
        uploader.add(folder, IDS[index])
    assert uploader.wait() == [folders[1]]
    assert f"The copy of {folders[0]} has the same name there" in caplog.text
    assert [one.data for one in uploader.remote.committed()] == [IDS[0]]
    uploader.add(folders[0], IDS[2])
    uploader.close()
    assert [one.data for one in uploader.remote.committed()] == [IDS[2]]


class Slow(FileStore):
    """Writes files when it is told to."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.reached, self.go = threading.Event(), threading.Event()

    def write(self, name: str, source: Path) -> None:
        self.reached.set()
        assert self.go.wait(250)
        super().write(name, source)


def test_a_checkpoint_stays_until_it_is_copied(tmp_path: Path) -> None:
    store = Slow((tmp_path / "store").as_uri())
    uploader = Uploader(RemoteCheckpoints(store))
    for number in range(2):
        checkpoint(tmp_path / "local" / f"checkpoint_{number}")
    uploader.add(tmp_path / "local" / "checkpoint_0", IDS[0])
    assert store.reached.wait(250)
    assert remove_oldest(tmp_path / "local", 1) == []
    store.go.set()
    assert uploader.wait() == []
    uploader.close()
    assert remove_oldest(tmp_path / "local", 1) == [tmp_path / "local" / "checkpoint_0"]


def test_what_is_copied_is_the_save_that_was_given_although_others_take_its_name(tmp_path: Path) -> None:
    store = Slow((tmp_path / "store").as_uri())
    uploader = Uploader(RemoteCheckpoints(store))
    folder = tmp_path / "latest"
    uploader.add(checkpoint(folder, "first"), IDS[0])
    assert store.reached.wait(250)
    for number in range(1, 6):
        uploader.add(checkpoint(folder, f"later {number}"), IDS[number])
    store.go.set()
    assert uploader.wait() == []
    (found,) = uploader.remote.committed()
    # Those in between were replaced before they were copied.
    assert (found.data, found.generation) == (IDS[5], 1)
    assert uploader.remote.verify(found, hashes=True).good
    uploader.remote.download(found, tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_text() == "later 5"
    uploader.close()
    recover(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"store", "latest", "back"}


def test_a_file_that_changes_while_it_is_sent_replaces_nothing(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "latest")
    remote.upload(folder, "latest", IDS[0])
    checkpoint(folder, "again")
    (folder / "model.safetensors").write_text("AGAIN")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since it was written"):
        remote.upload(folder, "latest", IDS[1])
    (found,) = remote.committed()
    assert found.data == IDS[0]
    assert remote.verify(found, hashes=True).good


class Lossy(FileStore):
    """Does what it is asked, and loses the answer."""

    def create(self, name: str, content: bytes) -> None:
        super().create(name, content)
        raise OSError("timed out")


def test_an_answer_that_is_lost_is_no_failure(tmp_path: Path) -> None:
    remote = RemoteCheckpoints(Lossy((tmp_path / "store").as_uri()))
    remote.upload(checkpoint(tmp_path / "latest", "first"), "latest", IDS[0])
    remote.upload(checkpoint(tmp_path / "latest", "second"), "latest", IDS[1])
    (found,) = remote.committed()
    assert (found.data, found.epoch, found.generation) == (IDS[1], 1, 1)
    assert remote.verify(found, hashes=True).extra == ()


class Lagging(FileStore):
    """Lists nothing, and counts how often it is asked."""

    lists = 0

    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        self.lists += 1
        return iter(())


def test_a_list_that_lags_is_not_asked_again_and_again(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    for number in range(5):
        RemoteCheckpoints.at(url).upload(checkpoint(tmp_path / "latest", str(number)), "latest", IDS[number])
    lagging = Lagging(url)
    RemoteCheckpoints(lagging).upload(checkpoint(tmp_path / "latest", "new"), "latest", IDS[9])
    assert lagging.lists < 10
    (found,) = RemoteCheckpoints.at(url).committed()
    assert (found.data, found.epoch) == (IDS[9], 6)


def test_a_run_that_was_suspended_takes_nothing_from_a_later_one(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    later = RemoteCheckpoints.at(remote.store.url)
    remote.upload(checkpoint(tmp_path / "old" / "latest", "old"), "latest", IDS[0])
    reached = threading.Event()

    class Suspended(FileStore):
        """Goes on after the other run has saved."""

        def create(self, name: str, content: bytes) -> None:
            if "manifest" in name and not reached.is_set():
                reached.set()
                later.upload(checkpoint(tmp_path / "new" / "latest", "new"), "latest", IDS[2])
                later.upload(checkpoint(tmp_path / "new" / "checkpoint_0"), "checkpoint_0", IDS[3])
            super().create(name, content)

    remote.store = Suspended(remote.store.url)
    with pytest.raises(CheckpointError, match="Another run has started to write there"):
        remote.upload(checkpoint(tmp_path / "old" / "latest", "older"), "latest", IDS[1])
    assert reached.is_set()
    remote.remove_oldest(0)
    found = {one.name: one for one in later.committed()}
    assert found["latest"].data == IDS[2]
    assert all(later.verify(one, hashes=True).good for one in found.values())


class Unremoving(FileStore):
    """Fails the first removal."""

    removals = 0

    def remove(self, names: Sequence[str]) -> None:
        self.removals += 1
        if self.removals == 1:
            raise OSError("busy")
        super().remove(names)


def test_a_copy_that_is_made_again_after_a_failed_removal_keeps_its_files(tmp_path: Path) -> None:
    remote = RemoteCheckpoints(Unremoving((tmp_path / "store").as_uri()))
    remote.upload(checkpoint(tmp_path / "latest", "first"), "latest", IDS[0])
    folder = checkpoint(tmp_path / "latest", "second")
    with pytest.raises(CheckpointError, match="busy"):
        remote.upload(folder, "latest", IDS[1])
    remote.upload(folder, "latest", IDS[1])
    (found,) = remote.committed()
    assert (found.data, found.generation) == (IDS[1], 1)
    assert remote.verify(found, hashes=True).good


class Stale(FileStore):
    """Lists what was there when it was frozen."""

    frozen: list[StoredFile] | None = None

    def files(self, prefix: str = "") -> Iterator[StoredFile]:
        if self.frozen is None:
            yield from super().files(prefix)
        else:
            yield from (file for file in self.frozen if file.name.startswith(prefix))


def test_a_list_that_lags_gives_no_save_a_lower_number(tmp_path: Path) -> None:
    remote = RemoteCheckpoints(Stale((tmp_path / "store").as_uri()))
    remote.upload(checkpoint(tmp_path / "latest", "0"), "latest", IDS[0])
    frozen = list(remote.store.files())
    for number in (1, 2):
        remote.upload(checkpoint(tmp_path / "latest", str(number)), "latest", IDS[number])
    remote.store.frozen = frozen  # type: ignore[attr-defined]
    remote.upload(checkpoint(tmp_path / "latest", "3"), "latest", IDS[3])
    (found,) = RemoteCheckpoints.at(remote.store.url).committed()
    assert (found.data, found.generation) == (IDS[3], 3)


def test_retention_removes_no_save_that_took_a_name_meanwhile(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    remote, later = RemoteCheckpoints(Stale(url)), RemoteCheckpoints.at(url)
    for number in range(2):
        remote.upload(checkpoint(tmp_path / f"checkpoint_{number}"), f"checkpoint_{number}", IDS[number])
    seen = remote.surplus(1)
    assert [one.name for one in seen] == ["checkpoint_0"]
    later.upload(checkpoint(tmp_path / "later" / "checkpoint_0", "later"), "checkpoint_0", IDS[2])
    remote.surplus = lambda keep, period=None: seen  # type: ignore[method-assign]
    remote.remove_oldest(1)
    found = {one.name: one for one in later.committed()}
    assert found["checkpoint_0"].data == IDS[2]
    assert later.verify(found["checkpoint_0"], hashes=True).good


def test_a_run_that_went_back_wins_over_what_it_left(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    for number in range(8):
        remote.upload(checkpoint(tmp_path / f"checkpoint_{number}"), f"checkpoint_{number}", IDS[number])
    branch = Uploader(RemoteCheckpoints.at(remote.store.url), keep=3)
    branch.add(checkpoint(tmp_path / "branch" / "checkpoint_4", "branch"), IDS[9])
    assert branch.wait() == []
    newest = branch.remote.newest()
    assert newest is not None
    assert (newest.name, newest.data) == ("checkpoint_4", IDS[9])
    assert [one.name for one in branch.remote.committed()] == ["checkpoint_6", "checkpoint_7", "checkpoint_4"]


def test_copies_beyond_the_limit_are_removed(tmp_path: Path) -> None:
    uploader = Uploader(RemoteCheckpoints.at((tmp_path / "store").as_uri()), keep=2)
    for index in range(3):
        uploader.add(checkpoint(tmp_path / f"checkpoint_{index}"), IDS[index])
    assert uploader.wait() == []
    assert [one.name for one in uploader.remote.committed()] == ["checkpoint_1", "checkpoint_2"]


def test_a_copy_is_not_removed_as_soon_as_it_is_made(tmp_path: Path) -> None:
    uploader = Uploader(RemoteCheckpoints.at((tmp_path / "store").as_uri()), keep=1)
    # The second one is of a script that began anew.
    for index, number in enumerate((5, 0)):
        uploader.add(checkpoint(tmp_path / f"checkpoint_{number}"), IDS[index])
    assert uploader.wait() == []
    assert [one.name for one in uploader.remote.committed()] == ["checkpoint_0", "checkpoint_5"]


def test_readers_never_see_half_of_a_checkpoint(tmp_path: Path) -> None:
    """After each write of an upload, a reader finds the old checkpoint whole or the new one whole."""
    seen: list[str] = []

    class Observed(FileStore):
        def write(self, name: str, source: Path) -> None:
            super().write(name, source)
            self.look()

        def create(self, name: str, content: bytes) -> None:
            super().create(name, content)
            self.look()

        def remove(self, names: object) -> None:
            for name in list(names):  # type: ignore[call-overload]
                super().remove([name])
                self.look()

        def look(self) -> None:
            reader = RemoteCheckpoints(FileStore(self.url))
            found = reader.committed("latest")
            if found:
                assert reader.verify(found[0], hashes=True).good
                seen.append(found[0].data)

    remote = RemoteCheckpoints(Observed((tmp_path / "store").as_uri()))
    for index, text in enumerate(("first", "second")):
        remote.upload(checkpoint(tmp_path / "latest", text), "latest", IDS[index])
    assert sorted(set(seen)) == IDS[:2]
    assert seen == sorted(seen)


def test_a_url_finds_its_store(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path.as_uri()), CheckpointStore)
    with pytest.raises(SettingError, match=r"az, file, gs, s3"):
        open_store("ftp://somewhere/run")
    with pytest.raises(SettingError, match=r"az://, file://, gs://, s3://"):
        open_store("ftp")
    assert [is_url(place) for place in ("s3://a/b", "a/b", None, Path("a"))] == [True, False, False, False]


@pytest.mark.parametrize("url", ["s3://bucket", "folder/name", "name"])
def test_a_url_of_a_store_alone_names_no_checkpoint(url: str) -> None:
    with pytest.raises(SettingError, match="that of a store, without the name"):
        split_url(url)


def test_names_of_partial_files_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".partial-0").touch()
    (tmp_path / "name").write_text("text")
    (found,) = FileStore(tmp_path.as_uri()).files()
    assert isinstance(found, StoredFile)
    assert (found.name, found.size) == ("name", 4)
