"""Folders that somebody uses are never removed, those of ended runs are, whatever container saved there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_plugins.checkpoint import commit, locks, recovery
from accel_plugins.checkpoint.commit import staging
from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.finalize import CheckpointFinalizer
from accel_plugins.checkpoint.foreign_files import ForeignFiles
from accel_plugins.checkpoint.locks import PARTIAL_NAME, FolderLock
from accel_plugins.checkpoint.manifest import CheckpointManifest, read_manifest, verify
from accel_plugins.checkpoint.recovery import is_in_use, recover, remove, retire, staged_path, unfinished
from accel_plugins.checkpoint.retention import remove_oldest
from accel_state.errors import CheckpointError

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child")


def containers_obstacle() -> str | None:
    if shutil.which("unshare") is None:
        return "there is no `unshare` here"
    tried = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else None


OBSTACLE = containers_obstacle()
pytestmark = pytest.mark.usefixtures("preloaded_python")
contained = pytest.mark.skipif(OBSTACLE is not None, reason=f"PID namespaces cannot be made: {OBSTACLE}")

PROGRAM = """
import os, signal, sys
from pathlib import Path
from accel_plugins.checkpoint.commit import staging
from accel_state import PartialState

PartialState(cpu=True)
{imported}

def save(target, text, last=lambda: None):
    with staging(target, fsync=False) as folder:
        (folder / "optimizer.bin").write_text(text)
        (folder / "optimizer_0").mkdir()
        (folder / "optimizer_0" / "__0_0.distcp").write_text(text * 2)
        last()

target = Path(sys.argv[1])
"""


def start(code: str, target: Path, *command: str, imported: str = "") -> subprocess.Popen[str]:
    text = PROGRAM.format(imported=imported) + code
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if command:
        # A process that is forked elsewhere would not be in the container.
        environment.pop("PRELOADED_PYTHON", None)
    return subprocess.Popen(
        [*command, sys.executable, "-c", text, str(target)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, errors = process.communicate(timeout=250)
    assert process.returncode == code, errors[-3000:]
    return output


def entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def write(target: Path, text: str, **options: Any) -> None:
    with staging(target, **options) as folder:
        (folder / "optimizer.bin").write_text(text)


# ------------------------------------------------------------------- containers

SAVE_OFTEN = """
print(os.getpid(), flush=True)
sys.stdin.readline()
for number in range(40):
    save(target, f"{number}" * 1000)
"""


AS_CHILD = ("sh", "-c", '"$0" "$@"; exit $?')
"""The first process of a namespace cannot kill itself; so its child, which has another pid, is the one that saves."""

AS_LATE_CHILD = ("sh", "-c", 'for number in $(seq 50); do /bin/true; done; "$0" "$@"; exit $?')

NO_EXCHANGE = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from faults import tracing
tracing.refuse_exchange()
"""


def read_one_save(target: Path) -> str | None:
    """What a reader finds wrong with the save that it opens, while others save over its name; None: nothing."""
    lock = FolderLock.share(target)
    if lock is None:
        # Between two renames there is none.
        return None
    with lock:
        before = read_manifest(lock.path)
        damage = verify(lock.path, hashes=True).damage
        texts = {
            (lock.path / "optimizer.bin").read_text() * 2,
            (lock.path / "optimizer_0" / "__0_0.distcp").read_text(),
        }
        return None if len(texts) == 1 and not damage and read_manifest(lock.path) == before else f"{damage} {texts}"


@contained
@pytest.mark.parametrize(
    ("commands", "imported"),
    [((AS_CHILD, AS_CHILD), ""), ((AS_CHILD, AS_LATE_CHILD), NO_EXCHANGE)],
    ids=["same pid, exchange", "other pids, no exchange"],
)
def test_runs_with_one_host_name_in_two_pid_namespaces_save_under_one_name_beside_a_reader(
    tmp_path: Path, commands: tuple[tuple[str, ...], ...], imported: str
) -> None:
    target = tmp_path / "last"
    runs = [start(SAVE_OFTEN, target, *CONTAINER, *command, imported=imported) for command in commands]
    pids = [run.stdout.readline() for run in runs if run.stdout is not None]
    for run in runs:
        # They begin at the same time.
        assert run.stdin is not None
        run.stdin.write("\n")
        run.stdin.flush()
    wrong = []
    while any(run.poll() is None for run in runs):
        wrong.append(read_one_save(target))
    for run in runs:
        finish(run)

    assert (pids[0] == pids[1]) is (commands[0] == commands[1])
    assert [one for one in wrong if one is not None] == []
    assert verify(target, hashes=True).good
    recover(tmp_path)
    assert entries(tmp_path) == {"last"}


DIE = """
print(os.getpid(), flush=True)
save(target, "half", last=lambda: os.kill(os.getpid(), signal.SIGKILL))
"""
DIE_OUT_OF_PLACE = """
print(os.getpid(), flush=True)
rename = Path.rename
def rename_and_die(path, to):
    rename(path, to)
    if path == target:
        os.kill(os.getpid(), signal.SIGKILL)
Path.rename = rename_and_die
save(target, "new")
"""
RECOVER = """
print(os.getpid(), flush=True)
save(target.with_name("other"), "text")
"""


@contained
def test_a_restarted_container_with_the_pid_of_its_predecessor_cleans_up_after_it(tmp_path: Path) -> None:
    target = tmp_path / "last"
    finish(start('save(target, "old")', target))
    first = finish(start(DIE, target, *CONTAINER, *AS_CHILD), 137)
    assert len(entries(tmp_path)) > 1
    second = finish(start(RECOVER, target, *CONTAINER, *AS_CHILD))

    assert first == second == "2\n"
    assert entries(tmp_path) == {"last", "other"}
    assert (target / "optimizer.bin").read_text() == "old"


@contained
def test_a_restarted_container_puts_a_complete_checkpoint_in_place_that_its_predecessor_did_not(tmp_path: Path) -> None:
    target = tmp_path / "last"
    finish(start('save(target, "old")', target))
    first = finish(start(DIE_OUT_OF_PLACE, target, *CONTAINER, *AS_CHILD, imported=NO_EXCHANGE), 137)
    assert not target.exists()
    second = finish(start(RECOVER, target, *CONTAINER, *AS_CHILD))

    assert first == second == "2\n"
    assert entries(tmp_path) == {"last", "other"}
    assert (target / "optimizer.bin").read_text() == "new"
    assert verify(target, hashes=True).good


# ------------------------------------------------------------------- one machine


def test_a_forked_child_that_survives_does_not_keep_the_folder_of_its_parent(tmp_path: Path) -> None:
    code = """
def leave_a_child():
    child = os.fork()
    if child == 0:
        import time
        time.sleep(100)
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
save(target, "half", leave_a_child)
"""
    process = start(code, tmp_path / "a")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        process.wait(250)
        assert unfinished(tmp_path)
        recover(tmp_path)
        assert entries(tmp_path) == set()
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate(timeout=250)


@pytest.mark.usefixtures("new_python")
def test_the_folder_of_a_stopped_save_is_left_alone(tmp_path: Path) -> None:
    code = """
def wait():
    print("written", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
save(target, "new", wait)
"""
    process = start(code, tmp_path / "a")
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    (folder,) = unfinished(tmp_path)
    recover(tmp_path)
    assert is_in_use(folder)
    assert (folder / "optimizer.bin").is_file()
    process.send_signal(signal.SIGCONT)
    finish(process)
    assert verify(tmp_path / "a").good
    assert entries(tmp_path) == {"a"}


def test_an_incomplete_folder_without_an_owner_is_removed(tmp_path: Path) -> None:
    for token in ("0" * 16, "1" * 16):
        FolderLock.create(staged_path(tmp_path / "a", token)).close()
    (tmp_path / f"a.staged-{'2' * 16}").mkdir()
    recover(tmp_path)
    assert entries(tmp_path) == set()


@pytest.mark.parametrize(
    "record", [b"", b'{"bo', b'{"boot": "another kernel", "device": 1}', b'{"boot": "", "device": -1}']
)
def test_where_locks_are_of_one_machine_a_folder_of_another_machine_stays_until_its_name_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: bytes
) -> None:
    # As on a network file system whose locks are local; there is none here.
    monkeypatch.setattr(locks, "_OF_ONE_MACHINE", frozenset())
    own, other = staged_path(tmp_path / "a", "0" * 16), staged_path(tmp_path / "a", "1" * 16)
    for folder in (own, other):
        FolderLock.create(folder).close()
    (other / PARTIAL_NAME).write_bytes(record)
    recover(tmp_path)
    assert entries(tmp_path) == {other.name}
    assert is_in_use(other)
    assert remove(other, asked=True)
    assert entries(tmp_path) == set()


def test_without_locks_nothing_incomplete_is_removed_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refused(file: int, operation: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with FolderLock.create(staged_path(tmp_path / "a", "0" * 16)) as lock:
        assert not lock.is_locked
        recover(tmp_path)
        assert lock.folder.is_dir()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files cannot be counted here")
@pytest.mark.usefixtures("cpu_state")
def test_saving_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in "abca":
        with staging(tmp_path / name) as folder:
            (folder / "optimizer.bin").write_text("text")
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------- readers


@pytest.mark.usefixtures("cpu_state")
def test_a_checkpoint_that_is_read_stays_whole_until_its_reader_is_done(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / f"checkpoint_{number}", "old")
    lock = FolderLock.share(tmp_path / "checkpoint_1")
    assert lock is not None
    with lock:
        assert remove_oldest(tmp_path, 1) == []
        write(tmp_path / "checkpoint_1", "new")
        assert (lock.path / "optimizer.bin").read_text() == "old"
        assert verify(lock.path, hashes=True).good
        recover(tmp_path)
        assert (lock.path / "optimizer.bin").read_text() == "old"
    recover(tmp_path)
    assert entries(tmp_path) == {"checkpoint_1", "checkpoint_2"}
    assert remove_oldest(tmp_path, 1) == [tmp_path / "checkpoint_1"]


@pytest.mark.usefixtures("cpu_state")
def test_a_folder_without_a_manifest_has_no_lock(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("of another library")
    assert FolderLock.share(tmp_path) is None
    assert FolderLock.seize(tmp_path) is None
    assert FolderLock.share(tmp_path / "absent") is None
    assert entries(tmp_path) == {"model.safetensors"}


# ------------------------------------------------------------------- saving under the hands of others


class Disturbed(CheckpointFinalizer):
    """Something happens once the folder is committed, and before it gets its name."""

    def __init__(self, disturb: Callable[[Path], object]) -> None:
        super().__init__()
        self._disturb = disturb

    def finalize(self, lock: FolderLock, facts: Any = None) -> CheckpointManifest:
        manifest = super().finalize(lock, facts)
        self._disturb(lock.folder)
        return manifest


@pytest.mark.usefixtures("cpu_state")
def test_a_save_whose_folder_was_removed_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")
    with pytest.raises(CheckpointError, match="Cannot put a checkpoint in place"):
        write(tmp_path / "a", "new", finalizer=Disturbed(shutil.rmtree))
    assert (tmp_path / "a" / "optimizer.bin").read_text() == "old"
    assert entries(tmp_path) == {"a"}


@pytest.mark.usefixtures("cpu_state")
@pytest.mark.parametrize("existed", [True, False])
def test_a_checkpoint_that_another_run_puts_there_meanwhile_makes_way(tmp_path: Path, existed: bool) -> None:
    target = tmp_path / "a"
    if existed:
        write(target, "old")
        (target / "notes").mkdir()
        (target / "notes" / "one").write_text("mine")

    def meanwhile(folder: Path) -> None:
        other = threading.Thread(target=write, args=(target, "of the other run"))
        other.start()
        other.join()

    write(target, "new", finalizer=Disturbed(meanwhile))
    assert (target / "optimizer.bin").read_text() == "new"
    assert verify(target, hashes=True).extra == (("notes/one",) if existed else ())
    assert entries(tmp_path) == {"a"}


@pytest.mark.usefixtures("cpu_state")
def test_a_checkpoint_that_another_run_saved_again_is_not_removed_as_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        write(tmp_path / f"checkpoint_{number}", "old")
    seize = FolderLock.seize

    def save_first(folder: Path, *, asked: bool = False) -> FolderLock | None:
        monkeypatch.undo()
        write(folder, "newer")
        return seize(folder, asked=asked)

    monkeypatch.setattr(FolderLock, "seize", save_first)
    assert remove_oldest(tmp_path, 1) == []
    assert (tmp_path / "checkpoint_1" / "optimizer.bin").read_text() == "newer"
    assert entries(tmp_path) == {"checkpoint_1", "checkpoint_2"}


@pytest.mark.usefixtures("cpu_state")
def test_a_folder_that_takes_the_name_of_one_that_is_removed_is_not_touched(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint_1"
    write(target, "old")
    lock = FolderLock.seize(target)
    assert lock is not None
    write(target, "new")
    recovery.erase(lock)
    assert (target / "optimizer.bin").read_text() == "new"
    recover(tmp_path)
    assert entries(tmp_path) == {"checkpoint_1"}


# ------------------------------------------------------------------- what a sweep of faults does not notice


@pytest.mark.usefixtures("cpu_state")
@pytest.mark.parametrize("atomic", [True, False])
def test_foreign_files_are_never_missing_from_a_folder_that_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    target = tmp_path / "a"
    write(target, "old")
    (target / "notes.txt").write_text("mine")
    seen = []
    exchange, rename = commit.exchange, Path.rename

    def look() -> None:
        if target.exists():
            seen.append((target / "notes.txt").is_file())

    def exchanged(first: Path, second: Path) -> bool:
        done = atomic and exchange(first, second)
        look()
        return done

    def renamed(path: Path, to: Path) -> Path:
        result = rename(path, to)
        look()
        return result

    monkeypatch.setattr(commit, "exchange", exchanged)
    monkeypatch.setattr(Path, "rename", renamed)
    write(target, "new")
    assert seen
    assert all(seen)


@pytest.mark.usefixtures("cpu_state")
def test_a_foreign_file_that_comes_at_the_last_moment_outlives_the_replaced_folder(tmp_path: Path) -> None:
    target, replaced = tmp_path / "a", staged_path(tmp_path / "a", "0" * 16)
    write(target, "old")
    write(tmp_path / "elsewhere" / "a", "new")
    target.rename(replaced)
    (tmp_path / "elsewhere" / "a").rename(target)
    (replaced / "late.txt").write_text("late")
    assert retire(replaced, target)
    assert (target / "late.txt").read_text() == "late"
    assert (target / "optimizer.bin").read_text() == "new"
    assert entries(tmp_path) == {"a", "elsewhere"}


@pytest.mark.parametrize("fsync", [True, False])
def test_every_level_of_carried_folders_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    from accel_plugins.checkpoint import foreign_files

    old, new = tmp_path / "old", tmp_path / "new"
    (old / "logs" / "deep").mkdir(parents=True)
    (old / "logs" / "deep" / "events").write_text("mine")
    new.mkdir()
    flushed = []
    monkeypatch.setattr(foreign_files, "fsync_path", lambda path: flushed.append(path.relative_to(new).as_posix()))
    ForeignFiles(old, new, fsync=fsync).carry()
    assert (new / "logs" / "deep" / "events").read_text() == "mine"
    assert flushed == (["logs/deep", "logs", "."] if fsync else [])


@pytest.mark.usefixtures("cpu_state")
def test_a_removal_that_is_interrupted_anywhere_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, unlink, rmdir = tmp_path / "checkpoint_1", os.unlink, Path.rmdir

    def removed_up_to(count: int) -> bool:
        """Whether a removal comes to its end within so many operations."""
        left = count

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                if not left:
                    raise OSError("killed here")
                left -= 1
                return real(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", counted(unlink))
            patch.setattr(Path, "rmdir", counted(rmdir))
            lock = FolderLock.seize(target)
            assert lock is not None
            with lock:
                try:
                    recovery.erase(lock)
                except OSError:
                    return False
        return True

    for count in range(20):
        write(target, "old")
        (target / "notes.txt").write_text("mine")
        done = removed_up_to(count)
        assert not (target / MANIFEST_NAME).exists()
        assert recovery.located(target) in (None, target if not done and not any(target.iterdir()) else None)
        recover(tmp_path)
        if done:
            break
        write(target, "again")
        assert verify(target, hashes=True).extra == ()
    assert count > 3


def test_a_record_of_a_writer_is_no_manifest(tmp_path: Path) -> None:
    with FolderLock.create(tmp_path / "a") as lock:
        assert set(json.loads((lock.folder / PARTIAL_NAME).read_text())) == {"boot", "device"}
        assert read_manifest(lock.folder) is None
