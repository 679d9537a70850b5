"""Folders of runs that may live are never removed, those of dead runs are, whatever container or machine saved."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_plugins.checkpoint import recovery
from accel_plugins.checkpoint.commit import CheckpointFinalizer, staging
from accel_plugins.checkpoint.manifest import CheckpointManifest, verify
from accel_plugins.checkpoint.recovery import Claim, is_stale, recover, unfinished
from accel_plugins.checkpoint.retention import remove_oldest
from accel_state.errors import CheckpointError

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child")


def containers_obstacle() -> str | None:
    if shutil.which("unshare") is None:
        return "there is no `unshare` here"
    tried = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else None


OBSTACLE = containers_obstacle()
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
    return subprocess.Popen(
        [*command, sys.executable, "-c", text, str(target)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
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


@contained
@pytest.mark.parametrize("commands", [(AS_CHILD, AS_CHILD), (AS_CHILD, AS_LATE_CHILD)], ids=["same pid", "other pids"])
def test_runs_with_one_host_name_in_two_pid_namespaces_save_under_one_name(
    tmp_path: Path, commands: tuple[tuple[str, ...], ...]
) -> None:
    target = tmp_path / "last"
    runs = [start(SAVE_OFTEN, target, *CONTAINER, *command) for command in commands]
    pids = [run.stdout.readline() for run in runs if run.stdout is not None]
    for run in runs:
        # They begin at the same time.
        assert run.stdin is not None
        run.stdin.write("\n")
        run.stdin.flush()
    damaged = []
    while any(run.poll() is None for run in runs):
        before = manifest_of(target)
        verdict = verify(target, hashes=True)
        if before is not None and manifest_of(target) == before:
            damaged += verdict.damage
    for run in runs:
        finish(run)

    assert (pids[0] == pids[1]) is (commands[0] == commands[1])
    assert damaged == []
    assert verify(target, hashes=True).good
    assert entries(tmp_path) == {"last"}


def manifest_of(folder: Path) -> bytes | None:
    try:
        return (folder / "checkpoint_manifest.json").read_bytes()
    except FileNotFoundError:
        return None


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
NO_EXCHANGE = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from faults import tracing
tracing.refuse_exchange()
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
def test_a_restarted_container_puts_back_what_its_predecessor_moved_aside(tmp_path: Path) -> None:
    target = tmp_path / "last"
    finish(start('save(target, "old")', target))
    first = finish(start(DIE_OUT_OF_PLACE, target, *CONTAINER, *AS_CHILD, imported=NO_EXCHANGE), 137)
    assert not target.exists()
    second = finish(start(RECOVER, target, *CONTAINER, *AS_CHILD))

    assert first == second == "2\n"
    assert entries(tmp_path) == {"last", "other"}
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


@pytest.mark.usefixtures("cpu_state")
def test_the_folder_of_a_save_under_way_is_left_alone(tmp_path: Path) -> None:
    with staging(tmp_path / "a") as folder:
        (folder / "optimizer.bin").write_text("text")
        recover(tmp_path)
        assert not is_stale(folder)
        assert folder.is_dir()
    assert verify(tmp_path / "a").good
    assert entries(tmp_path) == {"a"}


def leave(target: Path, text: bytes | None = None, **changes: Any) -> Path:
    """A staging folder whose owner let go of it, with other facts in its record."""
    claim = Claim(target)
    folder = claim.path("tmp")
    folder.mkdir()
    claim.release()
    record = claim.path("owner")
    record.write_bytes(json.dumps({**json.loads(record.read_bytes()), **changes}).encode() if text is None else text)
    return folder


def test_an_owner_that_let_go_of_its_lock_is_gone(tmp_path: Path) -> None:
    assert is_stale(leave(tmp_path / "a"))
    recover(tmp_path)
    assert entries(tmp_path) == set()


def test_without_locks_the_pid_and_the_time_it_started_decide(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    leave(tmp_path / "dead", lock=False, pid=process.pid)
    leave(tmp_path / "pid given again", lock=False, started=1)
    alive = leave(tmp_path / "alive", lock=False)
    mount = leave(tmp_path / "on another mount, alive", device=-1)
    recover(tmp_path)

    assert set(unfinished(tmp_path)) == {alive, mount}
    assert len(entries(tmp_path)) == 4


@pytest.mark.parametrize(
    "facts",
    [{"boot": "another machine"}, {"boot": ""}, {"pid_namespace": 1, "lock": False}, {"text": b""}, {"text": b'{"ho'}],
)
def test_an_owner_that_cannot_be_observed_lives_as_long_as_it_touches_its_record(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    folder = leave(tmp_path / "a", **facts)
    record = next(entry for entry in tmp_path.iterdir() if ".owner-" in entry.name)
    for minutes, gone in ((0, False), (9, False), (11, True)):
        then = time.time() - 60 * minutes
        os.utime(record, (then, then))
        assert is_stale(folder) is gone
    recover(tmp_path)
    assert entries(tmp_path) == set()


def test_a_record_is_touched_while_its_claim_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_RENEWED", 0.01)
    with Claim(tmp_path / "a") as claim:
        record = claim.path("owner")
        os.utime(record, (0, 0))
        until = time.monotonic() + 250
        while record.stat().st_mtime == 0:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert entries(tmp_path) == set()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files cannot be counted here")
def test_saving_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in "abc":
        with staging(tmp_path / name) as folder:
            (folder / "optimizer.bin").write_text("text")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lock_that_keeps_nobody_out_is_not_relied_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    with Claim(tmp_path / "a") as claim:
        assert json.loads(claim.path("owner").read_bytes())["lock"]
    # As a file system in user space may do it: every lock is given to everybody.
    monkeypatch.setattr(fcntl, "flock", lambda file, operation: None)
    with Claim(tmp_path / "a") as claim:
        assert not json.loads(claim.path("owner").read_bytes())["lock"]
        claim.path("tmp").mkdir()
        recover(tmp_path)
        assert claim.path("tmp").is_dir()
        claim.path("tmp").rmdir()


def test_folders_of_older_releases_are_recognised_and_go_after_a_day(tmp_path: Path) -> None:
    new, old = tmp_path / "a.tmp-0123abcd-1-0123abcd", tmp_path / "b.tmp-0123abcd-1-0123abcd"
    aside = tmp_path / "c.old-0123abcd-1-0123abcd"
    for folder in (new, old, aside):
        folder.mkdir()
        (folder / "optimizer.bin").write_text("text")
    for folder in (old, aside):
        for path in (folder, folder / "optimizer.bin"):
            os.utime(path, (time.time() - 90_000,) * 2)
    recover(tmp_path)

    assert entries(tmp_path) == {new.name, "c"}


# ------------------------------------------------------------------- saving under the hands of others


@pytest.mark.usefixtures("cpu_state")
def test_a_save_whose_folder_was_taken_over_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")

    def lose_the_record() -> None:
        with staging(tmp_path / "a") as folder:
            (folder / "optimizer.bin").write_text("new")
            for entry in tmp_path.glob("*.owner-*"):
                entry.unlink()

    with pytest.raises(CheckpointError, match="Another run removed its temporary folder"):
        lose_the_record()
    assert (tmp_path / "a" / "optimizer.bin").read_text() == "old"
    assert entries(tmp_path) == {"a"}


class Disturbed(CheckpointFinalizer):
    """Something writes into the folder once it is finalized."""

    def __init__(self, disturb: Callable[[Path], object]) -> None:
        super().__init__()
        self._disturb = disturb

    def finalize(self, folder: Path, facts: Any = None) -> CheckpointManifest:
        manifest = super().finalize(folder, facts)
        self._disturb(folder)
        return manifest


@pytest.mark.usefixtures("cpu_state")
@pytest.mark.parametrize(
    ("disturb", "named"),
    [
        (lambda folder: (folder / "optimizer.bin").write_text("wen"), "optimizer.bin"),
        (lambda folder: (folder / "optimizer.bin").unlink(), "optimizer.bin"),
        (lambda folder: (folder / "checkpoint_manifest.json").unlink(), "checkpoint_manifest.json"),
        (lambda folder: shutil.rmtree(folder), "optimizer.bin"),
    ],
)
def test_a_folder_that_changed_after_it_was_sealed_is_not_put_in_place(
    tmp_path: Path, disturb: Callable[[Path], object], named: str
) -> None:
    write(tmp_path / "a", "old")
    with pytest.raises(CheckpointError, match=f"{named} is missing, or its content was changed"):
        write(tmp_path / "a", "new", finalizer=Disturbed(disturb))

    assert verify(tmp_path / "a", hashes=True).good
    assert (tmp_path / "a" / "optimizer.bin").read_text() == "old"
    assert entries(tmp_path) == {"a"}


@pytest.mark.usefixtures("cpu_state")
def test_a_file_that_was_only_touched_after_it_was_sealed_is_still_the_same(tmp_path: Path) -> None:
    write(tmp_path / "a", "new", finalizer=Disturbed(lambda folder: os.utime(folder / "optimizer.bin", (1, 1))))
    assert verify(tmp_path / "a", hashes=True).good


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
    rename = Path.rename

    def save_first(path: Path, to: Path) -> Path:
        if path.name == "checkpoint_1":
            monkeypatch.undo()
            write(path, "newer")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", save_first)
    assert remove_oldest(tmp_path, 1) == []
    assert (tmp_path / "checkpoint_1" / "optimizer.bin").read_text() == "newer"
    assert entries(tmp_path) == {"checkpoint_1", "checkpoint_2"}


@pytest.mark.usefixtures("cpu_state")
def test_room_is_made_on_a_disk_that_takes_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        write(tmp_path / f"checkpoint_{number}", "old")

    def full(target: Path) -> Claim:
        raise OSError("no space left")

    monkeypatch.setattr("accel_plugins.checkpoint.retention.Claim", full)
    assert remove_oldest(tmp_path, 1) == [tmp_path / "checkpoint_1"]
    assert entries(tmp_path) == {"checkpoint_2"}
