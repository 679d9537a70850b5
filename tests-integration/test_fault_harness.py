"""The fault harness sees every operation, strikes where it is told to, and finds fault with savers that are wrong."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import sweeps, tracing
from faults.sweeps import Outcome

pytestmark = pytest.mark.skipif(tracing.obstacle(errors=True) is not None, reason=str(tracing.obstacle(errors=True)))


def write(path: Path, text: str, *, flush: bool = True) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        if flush:
            os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def kinds(ended: tracing.Ended) -> list[tuple[str, str]]:
    return [(operation.kind, operation.path.name) for operation in ended.operations]


def do_everything(folder: Path) -> None:
    (folder / "a").mkdir()
    write(folder / "a" / "one", "hello")
    with (folder / "a" / "one").open("r+") as file:
        file.seek(1)
        file.write("ipp")
        file.truncate(4)
    os.link(folder / "a" / "one", folder / "two")
    (folder / "three").symlink_to("two")
    (folder / "a" / "one").rename(folder / "a" / "four")
    flush_folder(folder / "a")
    (folder / "two").unlink()
    (folder / "b").mkdir()
    (folder / "b").rmdir()
    (folder / "a" / "four").read_text()
    (folder.parent / "outside").write_text("not counted")


def test_every_operation_is_recorded_in_order(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    ended = tracing.run(lambda: do_everything(tmp_path / "in"), tmp_path / "in")

    assert (ended.code, ended.hung, ended.hit) == (0, False, None)
    assert kinds(ended) == [
        *(("mkdir", "a"), ("create", "one"), ("write", "one"), ("fsync", "one"), ("write", "one"), ("truncate", "one")),
        *(("link", "one"), ("symlink", "three"), ("rename", "one"), ("fsync", "a"), ("unlink", "two"), ("mkdir", "b")),
        ("rmdir", "b"),
    ]
    written = [operation for operation in ended.operations if operation.kind == "write"]
    assert [(operation.offset, operation.data) for operation in written] == [(0, b"hello"), (1, b"ipp")]


def test_the_model_of_the_disk_ends_where_the_disk_does(tmp_path: Path) -> None:
    root, before = tmp_path / "in", tmp_path / "before"
    root.mkdir()
    before.mkdir()
    ended = tracing.run(lambda: do_everything(root), root)
    compared = 0
    for done, _, found in sweeps.crashes(before, root, ended.operations, tmp_path / "found", [Outcome.EVERYTHING]):
        if done == len(ended.operations):
            compared += 1
            assert {path.relative_to(found) for path in found.rglob("*")} == {
                path.relative_to(root) for path in root.rglob("*")
            }
            assert (found / "a" / "four").read_bytes() == (root / "a" / "four").read_bytes() == b"hipp"
    assert compared == 1


def test_what_was_not_flushed_may_be_lost(tmp_path: Path) -> None:
    root, before = tmp_path / "in", tmp_path / "before"
    for folder in (root, before):
        folder.mkdir()
        (folder / "old").write_text("old")

    def change() -> None:
        write(root / "new", "new", flush=False)
        (root / "new").rename(root / "old")

    ended = tracing.run(change, root)
    found = {
        outcome: path.joinpath("old").read_bytes()
        for done, outcome, path in sweeps.crashes(before, root, ended.operations, tmp_path / "found")
        if done == len(ended.operations)
    }
    assert found == {
        Outcome.NOTHING: b"old",
        Outcome.NAMES: b"",
        Outcome.LENGTHS: b"\0\0\0",
        Outcome.EVERYTHING: b"new",
    }


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_process_is_killed_before_the_operation_that_was_named(tmp_path: Path, at: int) -> None:
    ended = tracing.run(lambda: write(tmp_path / "a", "text"), tmp_path, tracing.Fault(at))

    if at == 3:
        assert (ended.hit, ended.code) == (None, 0)
    else:
        assert ended.hit is not None
        assert ended.hit.kind == ("create", "write", "fsync")[at]
        assert ended.code == -signal.SIGKILL
        assert len(ended.operations) == at
        assert (tmp_path / "a").exists() is (at > 0)


def expect_error(path: Path, number: int) -> None:
    try:
        write(path, "text")
    except OSError as error:
        raise SystemExit(7 if error.errno == number else 8) from None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_operation_gives_the_error_and_does_not_happen(tmp_path: Path, number: int, at: int) -> None:
    fault = tracing.Fault(at, number, lasting=True)
    ended = tracing.run(lambda: expect_error(tmp_path / "a", number), tmp_path, fault)

    assert ended.code == 7
    assert len(ended.operations) == at
    assert (tmp_path / "a").exists() is (at > 0)
    assert at == 0 or (tmp_path / "a").stat().st_size == (0 if at == 1 else 4)


def test_an_error_that_strikes_once_is_gone_afterwards(tmp_path: Path) -> None:
    def twice() -> None:
        for name in ("first", "second"):
            try:
                (tmp_path / name).mkdir()
            except OSError:
                (tmp_path / "failed").mkdir()

    ended = tracing.run(twice, tmp_path, tracing.Fault(0, errno.EIO))
    assert kinds(ended) == [("mkdir", "failed"), ("mkdir", "second")]


def test_threads_are_followed(tmp_path: Path) -> None:
    def from_a_thread() -> None:
        thread = threading.Thread(target=write, args=(tmp_path / "a", "text"))
        thread.start()
        thread.join()

    assert kinds(tracing.run(from_a_thread, tmp_path)) == [("create", "a"), ("write", "a"), ("fsync", "a")]


def test_a_child_that_raises_or_hangs_is_told_apart(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    log = tmp_path / "log"
    assert tracing.run(fail, tmp_path, log=log).code == 1
    assert "on purpose" in log.read_text()
    hung = tracing.run(lambda: time.sleep(60), tmp_path, timeout=0.5)
    assert (hung.hung, hung.code) == (True, -signal.SIGKILL)
    for timeout in (0.5, 5.0, 50.0):
        waits = tracing.run(lambda: None, tmp_path, companion=lambda: time.sleep(100), timeout=timeout)
        if waits.code == 0:
            break  # Otherwise the machine was so busy that the first child was not done in that time.
    assert (waits.hung, waits.code, waits.companion_code) == (True, 0, None)


# ------------------------------------------------------------------- savers that are wrong


def in_place(folder: Path) -> None:
    write(folder / "state", "new")


def without_flush(folder: Path) -> None:
    write(folder / "beside", "new", flush=False)
    (folder / "beside").rename(folder / "state")
    flush_folder(folder)


def right(folder: Path) -> None:
    write(folder / "beside", "new")
    (folder / "beside").rename(folder / "state")
    flush_folder(folder)


def old_or_new(folder: Path) -> str | None:
    found = (folder / "state").read_bytes() if (folder / "state").exists() else None
    return None if found in (b"old", b"new") else f"it holds {found!r}"


@pytest.mark.parametrize(
    ("saver", "killed", "power"), [(in_place, False, False), (without_flush, True, False), (right, True, True)]
)
def test_a_saver_is_right_when_nothing_can_be_lost(
    tmp_path: Path, saver: Callable[[Path], None], killed: bool, power: bool
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "state").write_text("old")
    job = sweeps.Workload(folder, lambda: saver(folder), old_or_new)
    tallies = {
        "kill": sweeps.kill_everywhere(job),
        "full": sweeps.fail_everywhere(job, errno.ENOSPC),
        "power": sweeps.lose_power(job),
    }

    assert not tallies["kill"].lost if killed else tallies["kill"].lost
    assert not tallies["full"].lost if killed else tallies["full"].lost
    assert not tallies["power"].lost if power else tallies["power"].lost
    assert all(tally.injected >= 1 for tally in tallies.values())
    assert all(tally.injected == tally.survived + len(tally.lost) for tally in tallies.values())
    assert (folder / "state").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_each_file_is_harmed_in_each_way_and_healed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345678")
    (tmp_path / "empty").write_bytes(b"")
    seen = []
    for damage in sweeps.damages(tmp_path):
        now = damage.path.read_bytes() if damage.path.exists() else None
        seen.append((damage.kind, damage.path.name, now))
    assert seen == [
        ("missing", "a", None),
        ("emptied", "a", b""),
        ("truncated", "a", b"1234"),
        ("bit flipped", "a", b"52345678"),
        ("bit flipped", "a", b"12341678"),
        ("bit flipped", "a", b"1234567<"),
        ("missing", "empty", None),
        ("extra file", "extra file", b"it was not here"),
    ]
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"a": b"12345678", "empty": b""}
