"""A checkpoint that a run moved aside before it died is found under its name again."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faults import tracing

from accel_plugins.checkpoint.commit import staging
from accel_plugins.checkpoint.locks import FolderLock
from accel_plugins.checkpoint.manifest import verify
from accel_plugins.checkpoint.recovery import located, missing, recover, remove, staged_path, unfinished
from accel_plugins.checkpoint.retention import find_newest
from accel_state.errors import CheckpointError


def write(target: Path, text: str) -> None:
    with staging(target) as folder:
        (folder / "optimizer.bin").write_text(text)


TOKEN = "0123456789abcdef"


def entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def die_between_two_renames(target: Path) -> None:
    """Save over a name where names cannot be exchanged, and be killed while nothing has that name."""

    def save() -> None:
        tracing.refuse_exchange()
        write(target, "new")

    write(target, "old")
    for at in range(10):
        ended = tracing.run(save, target.parent, tracing.Fault(at, only=("rename",)), timeout=250)
        assert ended.hit is not None
        if ended.hit.other == target:
            break
        assert target.exists()
    assert not target.exists()


pytestmark = [
    pytest.mark.skipif(tracing.obstacle() is not None, reason=str(tracing.obstacle())),
    pytest.mark.usefixtures("cpu_state"),
]


def test_exchanges_are_refused_by_the_kernel(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()

    def try_it() -> None:
        from accel_plugins.checkpoint.commit import exchange

        assert exchange(tmp_path / "a", tmp_path / "b")
        tracing.refuse_exchange()
        assert not exchange(tmp_path / "a", tmp_path / "b")
        (tmp_path / "a").rename(tmp_path / "c")

    ended = tracing.run(try_it, tmp_path)
    assert ended.code == 0
    assert [operation.kind for operation in ended.operations] == ["exchange", "rename"]


def test_a_checkpoint_is_found_after_a_death_between_the_two_renames(tmp_path: Path) -> None:
    target = tmp_path / "last"
    die_between_two_renames(target)

    # The new one was complete.
    assert located(target) == target
    assert (target / "optimizer.bin").read_text() == "new"
    assert verify(target, hashes=True).good
    recover(tmp_path)
    assert entries(tmp_path) == {"last"}


def test_a_link_to_a_checkpoint_finds_it_too(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("last")
    die_between_two_renames(tmp_path / "last")

    assert located(tmp_path / "link") == tmp_path / "link"
    assert (tmp_path / "link" / "optimizer.bin").read_text() == "new"


def test_a_numbered_checkpoint_is_the_newest_after_it_was_saved_over(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint_1", "older")
    die_between_two_renames(tmp_path / "checkpoint_2")
    assert find_newest(tmp_path) == tmp_path / "checkpoint_2"


def test_a_first_checkpoint_that_was_complete_is_put_in_place(tmp_path: Path) -> None:
    target = tmp_path / "last"
    ended = tracing.run(lambda: write(target, "new"), tmp_path, tracing.Fault(1, only=("rename",)))
    assert ended.hit is not None
    assert not target.exists()
    assert located(target) == target
    assert verify(target, hashes=True).good


def test_a_first_checkpoint_that_was_not_complete_is_missing(tmp_path: Path) -> None:
    target = tmp_path / "last"
    tracing.run(lambda: write(target, "new"), tmp_path, tracing.Fault(5))
    assert unfinished(tmp_path)
    assert located(target) is None
    assert unfinished(tmp_path)
    recover(tmp_path)
    assert entries(tmp_path) == set()
    assert located(tmp_path / "absent" / "folder") is None


def test_what_a_running_save_moved_aside_is_put_back_after_a_while_and_nothing_is_removed(tmp_path: Path) -> None:
    target, aside = tmp_path / "last", staged_path(tmp_path / "last", TOKEN)
    write(target, "old")
    lock = FolderLock.share(target)
    assert lock is not None
    with lock:
        target.rename(aside)
        assert located(target) == target
    assert verify(target, hashes=True).good


def test_a_save_goes_on_after_what_it_moved_aside_was_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "last"
    write(target, "old")
    rename = Path.rename

    def put_back_first(path: Path, to: Path) -> Path:
        if to == target:
            monkeypatch.setattr(Path, "rename", rename)
            assert located(target) == target
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", put_back_first)
    monkeypatch.setattr("accel_plugins.checkpoint.commit.exchange", lambda first, second: False)
    write(target, "new")
    assert (target / "optimizer.bin").read_text() == "new"
    recover(tmp_path)
    assert entries(tmp_path) == {"last"}


def test_the_latest_good_one_of_several_is_put_back(tmp_path: Path) -> None:
    def leave(name: str, number: int, texts: tuple[str, ...], damaged: bool = False) -> None:
        made = tmp_path.with_name("elsewhere") / name
        for text in texts:
            write(made, text)
        if damaged:
            (made / "optimizer.bin").unlink()
        made.rename(staged_path(tmp_path / name, f"{number:016x}"))

    leave("a", 1, ("first",))
    leave("a", 0, ("first", "second", "third"))
    leave("b", 1, ("first", "second"), damaged=True)
    leave("b", 0, ("good",))
    for name, found in (("a", "third"), ("b", "good")):
        assert located(tmp_path / name) == tmp_path / name
        assert (tmp_path / name / "optimizer.bin").read_text() == found
    recover(tmp_path)
    assert entries(tmp_path) == {"a", "b"}


def test_the_only_copy_is_kept_although_it_is_damaged(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")
    (tmp_path / "a" / "optimizer.bin").unlink()
    (tmp_path / "a").rename(staged_path(tmp_path / "a", TOKEN))
    assert located(tmp_path / "a") == tmp_path / "a"
    assert verify(tmp_path / "a").damage


def test_another_librarys_folder_is_put_back_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").write_text("of the original")
    (tmp_path / "a").rename(staged_path(tmp_path / "a", TOKEN))
    assert located(tmp_path / "a") == tmp_path / "a"
    assert (tmp_path / "a" / "model.safetensors").read_text() == "of the original"


def test_a_checkpoint_that_was_being_removed_does_not_come_back(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint_1", "old")
    lock = FolderLock.seize(tmp_path / "checkpoint_1")
    assert lock is not None
    with lock:
        lock.uncommit()
    assert located(tmp_path / "checkpoint_1") is None
    with pytest.raises(CheckpointError, match="no folder checkpoint_"):
        find_newest(tmp_path)
    assert entries(tmp_path) == set()


def test_an_empty_folder_makes_way_for_what_is_put_back(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")
    (tmp_path / "a").rename(staged_path(tmp_path / "a", TOKEN))
    (tmp_path / "a").mkdir()
    assert located(tmp_path / "a") == tmp_path / "a"
    assert (tmp_path / "a" / "optimizer.bin").read_text() == "old"


READ_ONLY = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && "$@"',
)


def read_only_obstacle() -> str | None:
    if shutil.which("unshare") is None:
        return "there is no `unshare` here"
    tried = subprocess.run([*READ_ONLY, "sh", "/tmp", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else None


@pytest.mark.skipif(read_only_obstacle() is not None, reason=f"nothing can be mounted: {read_only_obstacle()}")
def test_a_checkpoint_that_cannot_be_put_back_is_read_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for target in (tmp_path / "last", tmp_path / "checkpoints" / "checkpoint_1"):
        die_between_two_renames(target)
    before = entries(tmp_path), entries(tmp_path / "checkpoints")
    code = (
        "from pathlib import Path; import sys; folder = Path(sys.argv[1])\n"
        "from accel_plugins.checkpoint.recovery import located\n"
        "from accel_plugins.checkpoint.retention import find_newest\n"
        "print(located(folder / 'last')); print(find_newest(folder / 'checkpoints'))"
    )
    folder = str(tmp_path)
    ended = subprocess.run(
        [*READ_ONLY, "sh", folder, sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
    )
    found = [Path(line) for line in ended.stdout.splitlines()]
    assert [one.name.partition("-")[0] for one in found] == ["last.staged", "checkpoint_1.staged"]
    assert "cannot be restored" in ended.stderr
    assert all(verify(one, hashes=True).good for one in found)
    assert (entries(tmp_path), entries(tmp_path / "checkpoints")) == before


def test_putting_back_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    die_between_two_renames(tmp_path / "last")
    with caplog.at_level(logging.WARNING):
        located(tmp_path / "last")
    assert f"was restored as {os.fspath(tmp_path / 'last')}" in caplog.text


def test_a_name_is_missing_while_its_folder_alone_is_gone(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")
    (tmp_path / "a").rename(staged_path(tmp_path / "a", TOKEN))
    assert missing(tmp_path) == ["a"]
    write(tmp_path / "elsewhere" / "a", "new")
    (tmp_path / "elsewhere" / "a").rename(tmp_path / "a")
    assert missing(tmp_path) == []
    assert remove(staged_path(tmp_path / "a", TOKEN))


OVERLAY = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'cd "$1" && mkdir -p rest && mount -t tmpfs none rest && mkdir rest/upper rest/work && '
    'mount -t overlay none -o "lowerdir=$1/lower,upperdir=$1/rest/upper,workdir=$1/rest/work" "$1/merged" && '
    'shift && "$@"',
)


def overlay_obstacle(tmp_path: Path) -> str | None:
    for name in ("lower", "merged"):
        (tmp_path / name).mkdir(exist_ok=True)
    if shutil.which("unshare") is None:
        return "there is no `unshare` here"
    command = [*OVERLAY, "sh", str(tmp_path), "true"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else None


@pytest.mark.parametrize("foreign", [False, True])
def test_a_folder_of_the_lower_layer_of_an_overlay_is_replaced(tmp_path: Path, foreign: bool) -> None:
    if (obstacle := overlay_obstacle(tmp_path)) is not None:
        pytest.skip(f"no overlay can be mounted: {obstacle}")
    write(tmp_path / "lower" / "last", "old")
    (tmp_path / "lower" / "last" / "notes.txt").write_text("mine")
    if foreign:
        (tmp_path / "lower" / "last" / "checkpoint_manifest.json").unlink()
    code = (
        "from pathlib import Path; import os, sys; target = Path(sys.argv[1])\n"
        "from accel_plugins.checkpoint.commit import staging\n"
        "from accel_plugins.checkpoint.manifest import verify\n"
        "from accel_state import PartialState\n"
        "PartialState(cpu=True)\n"
        "for text in ('new', 'newer'):\n"
        "    with staging(target) as folder:\n"
        "        (folder / 'optimizer.bin').write_text(text)\n"
        "verdict = verify(target, hashes=True)\n"
        "print(verdict.good, verdict.extra, (target / 'optimizer.bin').read_text(), os.listdir(target.parent))"
    )
    target = str(tmp_path / "merged" / "last")
    command = [*OVERLAY, "sh", str(tmp_path), sys.executable, "-c", code, target]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "True ('notes.txt',) newer ['last']", ended.stderr[-2000:]
    assert (tmp_path / "lower" / "last" / "optimizer.bin").read_text() == "old"
