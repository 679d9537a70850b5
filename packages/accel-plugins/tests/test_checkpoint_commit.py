"""A checkpoint is there as a whole or not at all, and what was there before stays until then."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from accel_plugins.checkpoint import commit, finalize
from accel_plugins.checkpoint.commit import exchange, staging
from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.finalize import CheckpointFinalizer
from accel_plugins.checkpoint.locks import FolderLock
from accel_plugins.checkpoint.manifest import FileRecord, read_manifest, record_of, verify
from accel_state import PartialState, current
from accel_state.errors import CheckpointError
from accel_testing.processes import Processes


def write(target: Path, text: str, **options: bool) -> None:
    with staging(target, **options) as folder:
        (folder / "optimizer.bin").write_text(text)
        (folder / "optimizer_0").mkdir()
        (folder / "optimizer_0" / "__0_0.distcp").write_text(text * 2)


def entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.usefixtures("cpu_state")
@pytest.mark.parametrize("fsync", [True, False])
def test_a_new_checkpoint_appears_with_a_manifest_of_all_its_files(tmp_path: Path, fsync: bool) -> None:
    target = tmp_path / "deep" / "a"
    with staging(target, facts={"step": 7, "where": tmp_path}, fsync=fsync) as folder:
        assert not target.exists()
        assert folder.parent == target.parent
        (folder / "optimizer.bin").write_bytes(b"12345")
    manifest = read_manifest(target)

    assert manifest is not None
    assert manifest.files["optimizer.bin"].size == 5
    save = manifest.facts["save"]
    assert manifest.facts == {"step": 7, "where": str(tmp_path), "world_size": 1, "save": save, "serial": 1}
    assert manifest.size == 5
    assert manifest.versions["torch"]
    assert verify(target, hashes=True).good
    assert entries(target.parent) == {"a"}


@pytest.mark.usefixtures("cpu_state")
def test_a_save_is_completed_where_no_thread_can_be_started_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As while a program ends, from Python 3.12 on.
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    folder = tmp_path / "a"
    with FolderLock.create(folder) as lock:
        (folder / "inside").mkdir()
        for name in ("model", "inside/optimizer"):
            (folder / name).write_text(name, encoding="utf-8")
        monkeypatch.setattr(threading.Thread, "start", refused)
        (folder / "gone").symlink_to(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match="not a regular file"):
            CheckpointFinalizer().finalize(lock)
        (folder / "gone").unlink()
        os.mkfifo(folder / "pipe")
        with pytest.raises(CheckpointError, match="not a regular file"):
            CheckpointFinalizer().finalize(lock)
        (folder / "pipe").unlink()
        finalizer = CheckpointFinalizer()
        finalizer.begin(folder / "model")
        assert set(finalizer.finalize(lock).files) == {"model", "inside/optimizer"}
    assert verify(folder, hashes=True).good


@pytest.mark.parametrize("atomic", [True, False])
def test_saving_over_a_name_replaces_what_saving_wrote_and_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    target = tmp_path / "a"
    write(target, "old")
    (target / "notes.txt").write_text("mine")
    (target / "logs").mkdir()
    (target / "logs" / "events").write_text("mine too")
    # Names that other saves would use, but that no save wrote here.
    (target / "model-00001-of-00002.safetensors").write_text("a base model")
    (target / "optimizer_0" / "notes.txt").write_text("mine as well")
    (target / "optimizer_0" / "__0_0.distcp").chmod(0o600)
    with (target / "notes.txt").open("a") as still_open:
        if not atomic:
            monkeypatch.setattr(commit, "exchange", lambda first, second: False)
        write(target, "new")
        still_open.write(" and more")

    assert (target / "optimizer.bin").read_text() == "new"
    assert (target / "notes.txt").read_text() == "mine and more"
    assert (target / "logs" / "events").read_text() == "mine too"
    assert (target / "optimizer_0" / "__0_0.distcp").read_text() == "newnew"
    verdict = verify(target, hashes=True)
    assert verdict.good
    kept = {"notes.txt", "logs/events", "model-00001-of-00002.safetensors", "optimizer_0/notes.txt"}
    assert set(verdict.extra) == kept
    assert entries(tmp_path) == {"a"}


@pytest.mark.usefixtures("cpu_state")
@pytest.mark.parametrize("atomic", [True, False])
def test_what_others_write_while_a_folder_is_replaced_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    target = tmp_path / "a"
    write(target, "old")
    (target / "logs").mkdir()
    for name in ("logs/early", "logs/position"):
        (target / name).write_text("first")

    def late(first: Path, second: Path) -> bool:
        (target / "logs" / "late").write_text("late")
        (target / "logs" / "deeper").mkdir()
        (target / "logs" / "deeper" / "late").write_text("late")
        (target / "top").write_text("late")
        (target / "logs" / "position.new").write_text("second")
        (target / "logs" / "position.new").replace(target / "logs" / "position")
        return atomic and exchange(first, second)

    monkeypatch.setattr(commit, "exchange", late)
    write(target, "new")
    assert (target / "optimizer.bin").read_text() == "new"
    assert verify(target, hashes=True).good
    assert entries(target / "logs") == {"early", "late", "deeper", "position"}
    assert (target / "logs" / "deeper" / "late").read_text() == (target / "top").read_text() == "late"
    assert (target / "logs" / "position").read_text() == "second"
    assert entries(tmp_path) == {"a"}


@pytest.mark.usefixtures("cpu_state")
@pytest.mark.parametrize("inside", [".", "logs"])
def test_the_folder_that_a_process_works_in_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    target = tmp_path / "a"
    write(target, "old")
    (target / "logs").mkdir()
    monkeypatch.chdir(target / inside)
    with pytest.raises(CheckpointError, match=r"working directory of this process .*\n.*checkpoint"):
        write(Path() if inside == "." else target, "new")
    assert (target / "optimizer.bin").read_text() == "old"
    assert entries(tmp_path) == {"a"}
    write(Path("checkpoint"), "new")
    assert (target / inside / "checkpoint" / "optimizer.bin").read_text() == "new"


@pytest.mark.usefixtures("cpu_state")
def test_a_mount_point_is_refused() -> None:
    with pytest.raises(CheckpointError, match="It is a mount point"):
        write(Path("/"), "new")


@pytest.mark.usefixtures("cpu_state")
def test_what_is_mounted_in_a_folder_is_not_removed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a"
    write(target, "old")
    (target / "data").mkdir()
    (target / "data" / "precious").write_text("precious")
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "data")
    with pytest.raises(CheckpointError, match="a file system is mounted inside the folder"):
        write(target, "new")
    assert (target / "data" / "precious").read_text() == "precious"
    assert (target / "optimizer.bin").read_text() == "old"
    assert entries(tmp_path) == {"a"}


@pytest.mark.usefixtures("cpu_state")
def test_a_folder_keeps_its_mode(tmp_path: Path) -> None:
    target = tmp_path / "a"
    write(target, "old")
    for mode in (0o700, 0o2770):
        target.chmod(mode)
        with staging(target) as folder:
            (folder / "optimizer.bin").write_text("new")
            assert stat.S_IMODE(folder.stat().st_mode) == mode
        assert stat.S_IMODE(target.stat().st_mode) == mode


@pytest.mark.usefixtures("cpu_state")
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_everything_as_it_was(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "a"
    write(target, "old")

    def fail() -> None:
        with staging(target) as folder:
            (folder / "optimizer.bin").write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert (target / "optimizer.bin").read_text() == "old"
    assert verify(target, hashes=True).good
    assert entries(tmp_path) == {"a"}


@pytest.mark.usefixtures("cpu_state")
def test_a_file_that_does_not_reach_the_disk_makes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a"
    write(target, "old")
    real = finalize.fsync_path

    def fsync(path: Path) -> None:
        if path.name == "optimizer.bin":
            raise OSError(5, "Input/output error")
        real(path)

    monkeypatch.setattr(finalize, "fsync_path", fsync)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write(target, "new", fsync=True)
    assert (target / "optimizer.bin").read_text() == "old"
    assert entries(tmp_path) == {"a"}


@pytest.mark.parametrize("flushes", [True, False])
def test_every_file_reaches_the_disk_before_the_manifest_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushes: bool
) -> None:
    flushed: list[str] = []

    def fsync(path: Path) -> None:
        assert not (tmp_path / "a" / MANIFEST_NAME).exists()
        flushed.append(path.name)

    monkeypatch.setattr(finalize, "fsync_path", fsync)
    with FolderLock.create(tmp_path / "a") as lock:
        (lock.folder / "begun.bin").write_text("x")
        (lock.folder / "inside").mkdir()
        (lock.folder / "inside" / "found.bin").write_text("y")
        finalizer = CheckpointFinalizer() if flushes else CheckpointFinalizer(fsync=False)
        finalizer.begin(lock.folder / "begun.bin")
        finalizer.finalize(lock)
    # Several threads wait for the disk.
    assert sorted(flushed) == (["begun.bin", "found.bin", "inside"] if flushes else [])


@pytest.mark.usefixtures("cpu_state")
def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a"
    write(target, "old")
    monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    real = Path.rename

    def rename(self: Path, to: Path) -> Path:
        if to == target and (self / "optimizer.bin").read_text() == "new":
            raise OSError("the disk is gone")
        return real(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        write(target, "new")
    assert (target / "optimizer.bin").read_text() == "old"
    assert entries(tmp_path) == {"a"}


@pytest.mark.usefixtures("cpu_state")
def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="Use a folder"):
            write(target, "x")
    assert entries(tmp_path) == {"file"}


@pytest.mark.usefixtures("cpu_state")
@pytest.mark.parametrize("name", ["a\nb", " ", "\udc80", "x" * 200])
def test_any_name_of_a_folder_is_saved_to_twice(tmp_path: Path, name: str) -> None:
    for text in ("old", "new"):
        write(tmp_path / name, text)
    assert (tmp_path / name / "optimizer.bin").read_text() == "new"
    assert entries(tmp_path) == {name}


@pytest.mark.usefixtures("cpu_state")
def test_the_name_of_an_incomplete_save_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="saves that have not ended"):
        write(tmp_path / "a.staged-0123456789abcdef", "x")
    assert entries(tmp_path) == set()


@pytest.mark.usefixtures("cpu_state")
def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", "x")

    assert (tmp_path / "link").is_symlink()
    assert verify(tmp_path / "real").good


def test_two_names_change_places_in_one_step(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / folder.name).write_text("")
    exchanged = exchange(first, second)

    if sys.platform == "linux":
        assert exchanged
    assert entries(first) == ({"second"} if exchanged else {"first"})
    assert not exchange(first, tmp_path / "absent")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda f: (f / "optimizer.bin").unlink(), "optimizer.bin is missing"),
        (lambda f: (f / "optimizer.bin").write_text("longer than it was"), "18 bytes, and 3 were written"),
        (lambda f: (f / "optimizer.bin").write_text("odl"), "has changed since"),
        (lambda f: (f / MANIFEST_NAME).write_text("{"), "is damaged"),
        (lambda f: (f / MANIFEST_NAME).write_text("[]"), "is damaged"),
        (lambda f: (f / MANIFEST_NAME).write_text(json.dumps({"format": 99})), "supports formats up to"),
    ],
)
@pytest.mark.usefixtures("cpu_state")
def test_verify_reports_each_kind_of_damage(tmp_path: Path, harm: object, sentence: str) -> None:
    write(tmp_path / "a", "old")
    harm(tmp_path / "a")  # type: ignore[operator]
    verdict = verify(tmp_path / "a", hashes=True)

    assert not verdict.good
    assert sentence in " ".join(verdict.damage)


@pytest.mark.usefixtures("cpu_state")
def test_sizes_alone_do_not_see_a_changed_content(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")
    (tmp_path / "a" / "optimizer.bin").write_text("odl")

    assert verify(tmp_path / "a").good
    assert not verify(tmp_path / "a", hashes=True).good


def test_a_folder_without_a_manifest_is_no_checkpoint_of_ours_and_not_damaged(tmp_path: Path) -> None:
    verdict = verify(tmp_path)

    assert not verdict.good
    assert verdict.damage == ()


def test_what_another_process_hashed_is_taken_over_unless_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a"
    lock = FolderLock.create(folder)
    (folder / "optimizer_0").mkdir()
    kept, changed = folder / "optimizer_0" / "__1_0.distcp", folder / "optimizer_0" / "__1_1.distcp"
    writer = CheckpointFinalizer()
    for path in (kept, changed):
        path.write_text("first")
        writer.begin(path)
    told = writer.records(folder)
    changed.write_text("second content")
    hashed: list[str] = []

    def record(path: Path) -> FileRecord:
        hashed.append(path.name)
        return record_of(path)

    monkeypatch.setattr(finalize, "record_of", record)
    owner = CheckpointFinalizer()
    assert owner.adopt(folder, ["", told]) == ""
    with lock:
        owner.finalize(lock)
    assert hashed == ["__1_1.distcp"]
    assert verify(folder, hashes=True).good


@pytest.mark.usefixtures("cpu_state")
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give files to others")
@pytest.mark.parametrize("links", [True, False])
def test_owner_and_group_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no hard links here")

    target = tmp_path / "last"
    with staging(target, fsync=False) as folder:
        (folder / "model.safetensors").write_text("first")
    (target / "notes").mkdir()
    (target / "notes" / "notes.txt").write_text("mine")
    for path in (target, target / "notes", target / "notes" / "notes.txt"):
        os.chown(path, 1234, 2345)
    if not links:
        monkeypatch.setattr(os, "link", refused)
    with staging(target, fsync=False) as folder:
        (folder / "model.safetensors").write_text("second")
    for path in (target, target / "notes", target / "notes" / "notes.txt"):
        assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345), path


# ------------------------------------------------------------------- several processes


def save_shards(target: str) -> list[str]:
    """The files that this process hashes for a checkpoint with shards."""
    PartialState(cpu=True)
    rank, hashed = current.process().rank, list[str]()

    def record(path: Path) -> FileRecord:
        hashed.append(path.name)
        return record_of(path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(finalize, "record_of", record)
        with staging(target, deadline=60.0) as folder:
            (folder / "optimizer_0").mkdir(exist_ok=True)
            (folder / "optimizer_0" / f"__{rank}_0.distcp").write_text(str(rank))
    return hashed


def test_each_process_hashes_its_own_shards(two: Processes, tmp_path: Path) -> None:
    assert two.run(save_shards, str(tmp_path / "a")) == [["__0_0.distcp"], ["__1_0.distcp"]]
    assert verify(tmp_path / "a", hashes=True).good


def save_together(target: str, failing: int | None = None, absent: int | None = None) -> str:
    PartialState(cpu=True)
    rank = current.process().rank
    store = current.process().transport.store()
    assert store is not None
    if rank == absent:
        store.get(f"ended {1 - rank}")
        store.set(f"ended {rank}", "")
        return "absent"
    try:
        with staging(target, deadline=3.0 if absent is not None else 60.0) as folder:
            (folder / f"random_states_{rank}.pkl").write_text(str(rank))
            if rank == failing:
                raise OSError("no space left")
    except (CheckpointError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        # The store goes with the first process, which serves it: it leaves when the other asks for nothing any more.
        store.set(f"ended {rank}", "")
        if rank == 0:
            store.get("ended 1")
    assert Path(target, "random_states_0.pkl").exists()
    return "saved"


def test_all_processes_write_into_one_checkpoint(two: Processes, tmp_path: Path) -> None:
    assert two.run(save_together, str(tmp_path / "a")) == ["saved", "saved"]
    manifest = read_manifest(tmp_path / "a")
    assert manifest is not None
    assert set(manifest.files) == {"random_states_0.pkl", "random_states_1.pkl"}
    assert manifest.facts["world_size"] == 2
    assert verify(tmp_path / "a", hashes=True).good
    assert entries(tmp_path) == {"a"}


@pytest.mark.parametrize("failing", [0, 1])
def test_one_process_that_fails_fails_all_by_name_and_harms_nothing(
    two: Processes, tmp_path: Path, failing: int
) -> None:
    assert two.run(save_together, str(tmp_path / "a")) == ["saved", "saved"]
    told = two.run(save_together, str(tmp_path / "a"), failing)

    assert told[failing] == "OSError: no space left"
    assert f"Process {failing} failed: OSError: no space left" in told[1 - failing]
    assert verify(tmp_path / "a", hashes=True).good
    assert entries(tmp_path) == {"a"}


@pytest.mark.parametrize("absent", [0, 1])
def test_a_process_that_does_not_come_is_named_after_the_deadline(two: Processes, tmp_path: Path, absent: int) -> None:
    told = two.run(save_together, str(tmp_path / "a"), None, absent)

    assert told[absent] == "absent"
    assert f"Process {absent} did not arrive within 3 s" in told[1 - absent]
    assert entries(tmp_path) == set()


def save_on_own_disk(target: str) -> bool:
    """As on nodes that share no file system: each process sees a folder of its own."""
    PartialState(cpu=True)
    process = current.process()
    node = process.topology._replace(local_rank=0, node_rank=process.rank)
    own = Path(target, f"disk_{process.rank}", "a")
    real = Path(own).parent
    real.mkdir(parents=True)
    with staging(own, process._replace(topology=node)) as folder:
        (folder / f"random_states_{process.rank}.pkl").write_text("x")
    return verify(own, hashes=True).good


def test_nodes_that_share_no_disk_have_a_checkpoint_each(two: Processes, tmp_path: Path) -> None:
    assert two.run(save_on_own_disk, str(tmp_path)) == [True, True]
