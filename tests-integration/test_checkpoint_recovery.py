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
from accel_plugins.checkpoint.manifest import verify
from accel_plugins.checkpoint.recovery import Claim, discard, located, missing, recover, unfinished
from accel_plugins.checkpoint.retention import find_newest


def write(target: Path, text: str) -> None:
    with staging(target) as folder:
        (folder / "optimizer.bin").write_text(text)


def entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def die_between_two_renames(target: Path) -> None:
    """Save over a name where names cannot be exchanged, and be killed while nothing has that name."""

    def save() -> None:
        tracing.refuse_exchange()
        write(target, "new")

    write(target, "old")
    ended = tracing.run(save, target.parent, tracing.Fault(1, only=("rename",)), timeout=250)
    assert ended.hit is not None
    assert ended.hit.other == target
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

    assert located(target) == target
    assert (target / "optimizer.bin").read_text() == "old"
    assert verify(target, hashes=True).good
    recover(tmp_path)
    assert entries(tmp_path) == {"last"}


def test_a_link_to_a_checkpoint_finds_it_too(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("last")
    die_between_two_renames(tmp_path / "last")

    assert located(tmp_path / "link") == tmp_path / "link"
    assert (tmp_path / "link" / "optimizer.bin").read_text() == "old"


def test_a_numbered_checkpoint_is_the_newest_after_it_was_saved_over(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint_1", "older")
    die_between_two_renames(tmp_path / "checkpoint_2")
    assert find_newest(tmp_path) == tmp_path / "checkpoint_2"


def test_a_first_checkpoint_that_was_complete_is_put_in_place(tmp_path: Path) -> None:
    target = tmp_path / "last"
    ended = tracing.run(lambda: write(target, "new"), tmp_path, tracing.Fault(0, only=("rename",)))
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


def test_what_a_process_that_may_live_moved_aside_is_put_back_and_nothing_of_it_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "last"
    write(target, "old")
    with Claim(target) as claim:
        claim.path("tmp").mkdir()
        target.rename(claim.path("old"))
        assert located(target) == target
        assert claim.path("tmp").is_dir()
        discard(claim.path("tmp"))
    assert verify(target, hashes=True).good


def test_a_save_goes_on_after_what_it_moved_aside_was_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "last"
    write(target, "old")
    rename = Path.rename

    def put_back_first(path: Path, to: Path) -> Path:
        if ".tmp-" in path.name and not target.exists():
            monkeypatch.setattr(Path, "rename", rename)
            assert located(target) == target
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", put_back_first)
    monkeypatch.setattr("accel_plugins.checkpoint.commit.exchange", lambda first, second: False)
    write(target, "new")
    assert (target / "optimizer.bin").read_text() == "new"
    assert entries(tmp_path) == {"last"}


def test_the_better_one_of_several_is_put_back(tmp_path: Path) -> None:
    for name, sealed, kind in (
        ("a", "good", "old"),
        ("a", "newer", "tmp"),
        ("b", "damaged", "old"),
        ("b", "new", "tmp"),
    ):
        with Claim(tmp_path / name) as claim:
            made = tmp_path.with_name("elsewhere") / "made"
            write(made, sealed)
            made.rename(claim.path(kind))
            if sealed == "damaged":
                (claim.path(kind) / "optimizer.bin").unlink()
    for name, found in (("a", "good"), ("b", "new")):
        assert located(tmp_path / name) == tmp_path / name
        assert (tmp_path / name / "optimizer.bin").read_text() == found
    recover(tmp_path)
    assert entries(tmp_path) == {"a", "b"}


def test_the_only_copy_is_kept_although_it_is_damaged(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")
    (tmp_path / "a" / "optimizer.bin").unlink()
    with Claim(tmp_path / "a") as claim:
        (tmp_path / "a").rename(claim.path("old"))
    assert located(tmp_path / "a") == tmp_path / "a"
    assert verify(tmp_path / "a").damage


def test_a_checkpoint_that_was_being_removed_does_not_come_back(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")
    with Claim(tmp_path / "a") as claim:
        (tmp_path / "a").rename(claim.path("del"))
    assert located(tmp_path / "a") is None
    recover(tmp_path)
    assert entries(tmp_path) == set()


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
    assert [one.name.partition("-")[0] for one in found] == ["last.old", "checkpoint_1.old"]
    assert "cannot be restored" in ended.stderr
    assert all(verify(one, hashes=True).good for one in found)
    assert (entries(tmp_path), entries(tmp_path / "checkpoints")) == before


def test_putting_back_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    die_between_two_renames(tmp_path / "last")
    with caplog.at_level(logging.WARNING):
        located(tmp_path / "last")
    assert f"was restored as {os.fspath(tmp_path / 'last')}" in caplog.text


@pytest.mark.usefixtures("cpu_state")
def test_a_name_is_missing_while_its_folder_alone_is_gone(tmp_path: Path) -> None:
    with Claim(tmp_path / "a") as claim:
        claim.path("old").mkdir()
        assert missing(tmp_path) == ["a"]
        (tmp_path / "a").mkdir()
        assert missing(tmp_path) == []
        claim.path("old").rmdir()
