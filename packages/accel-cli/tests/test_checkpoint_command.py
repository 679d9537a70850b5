"""`accel checkpoint` tells what is there, finds damage, and removes nothing that is still needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from accel_cli.checkpoints import shown_age, shown_size
from accel_cli.main import main
from accel_plugins.checkpoint import locks
from accel_plugins.checkpoint.commit import staging
from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.locks import FolderLock
from accel_plugins.checkpoint.manifest import verify
from accel_plugins.checkpoint.recovery import staged_path
from accel_plugins.checkpoint.retention import remove_oldest
from accel_state import PartialState
from accel_testing.fresh import fresh

FACTS = {"step": 1, "positions": [{"epoch": 2, "batch": 30, "sample": 120}], "seed": 4}

TOKEN = "0123456789abcdef"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with three checkpoints of 5 bytes, and what a dead process left."""
    with fresh():
        PartialState(cpu=True)
        for number in range(3):
            with staging(tmp_path / "checkpoints" / f"checkpoint_{number}", facts=FACTS, fsync=False) as folder:
                (folder / "optimizer.bin").write_text(f"bytes{number}"[-5:])
    # A lock that was let go is that of a process that died.
    FolderLock.create(staged_path(tmp_path / "checkpoints" / "checkpoint_3", TOKEN)).close()
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["checkpoint", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_checkpoint_list_prints_a_table_with_damage(
    project: Path, capsys: pytest.CaptureFixture[str], inside: str
) -> None:
    (project / "checkpoints" / "checkpoint_1" / "optimizer.bin").write_text("longer than it was")
    (project / "checkpoints" / "checkpoint_2" / MANIFEST_NAME).unlink()
    code, shown = run(capsys, "list", str(project / inside))
    lines = [line.split(maxsplit=1) for line in shown.splitlines()]

    assert code == 0
    assert [name for name, _ in lines][:4] == ["checkpoint", "checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert lines[1][1].startswith("epoch 2, batch 30")
    assert lines[1][1].endswith("complete")
    assert "damaged: optimizer.bin has 18 bytes, and 5 were written." in lines[2][1]
    assert "unverified: it has no manifest" in lines[3][1]
    assert "left behind: its run has ended" in lines[4][1]


def test_rows_as_json(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, shown = run(capsys, "list", str(project), "--json")
    rows = json.loads(shown)

    assert [row["state"] for row in rows] == ["complete", "complete", "complete", "left behind: its run has ended"]
    assert rows[0]["processes"] == 1
    assert rows[0]["size"] > 5


def test_only_reading_every_byte_finds_a_changed_one(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = project / "checkpoints" / "checkpoint_1"
    code, shown = run(capsys, "verify", str(one), "--json")
    assert (code, json.loads(shown)[0]["state"]) == (0, "good")
    (one / "optimizer.bin").write_text("other")

    assert "damaged" not in run(capsys, "list", str(one))[1]
    code, shown = run(capsys, "verify", str(one))
    assert code == 1
    assert "optimizer.bin has changed since it was written" in shown
    assert run(capsys, "verify", str(project))[0] == 1


def test_checkpoint_prune_keeps_the_newest_good_checkpoint(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = project / "checkpoints"
    (folder / "checkpoint_2" / "optimizer.bin").unlink()
    before = {entry.name for entry in folder.iterdir()}
    code, shown = run(capsys, "prune", str(project), "--keep", "1", "--dry-run")
    assert code == 0
    assert "Would remove checkpoint_0" in shown
    assert {entry.name for entry in folder.iterdir()} == before

    code, shown = run(capsys, "prune", str(project), "--keep", "1")
    assert code == 0
    assert "Removed checkpoint_0" in shown
    # The newest good one stays, also when it is not among the newest.
    assert {entry.name for entry in folder.iterdir()} == {"checkpoint_1", "checkpoint_2"}
    assert run(capsys, "prune", str(project), "--keep", "5") == (0, "Nothing to remove.\n")


@pytest.mark.parametrize("action", ["list", "verify", "info", "prune"])
def test_a_checkpoint_that_was_moved_aside_is_there_again(
    project: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    """Its run was killed between the two renames that replace a checkpoint where names cannot be exchanged."""
    one = project / "checkpoints" / "checkpoint_1"
    one.rename(staged_path(one, TOKEN))
    named = one if action in ("verify", "info") else project
    code, shown = run(capsys, action, str(named), *(("--keep", "3") if action == "prune" else ()))
    assert code == 0
    assert ("checkpoint_1" in shown) is (action != "prune")
    assert ("checkpoint_3" in shown) is (action in ("list", "prune"))
    assert verify(one, hashes=True).good


def test_prune_removes_what_is_not_provably_abandoned_only_by_its_name(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a network file system, of which this machine does not know all locks.
    monkeypatch.setattr(locks, "_OF_ONE_MACHINE", frozenset())
    left = next(entry for entry in (project / "checkpoints").iterdir() if ".staged-" in entry.name)
    (left / locks.PARTIAL_NAME).write_text("{}")
    assert "not provably abandoned" in run(capsys, "list", str(project))[1]
    assert run(capsys, "prune", str(project), "--keep", "5") == (0, "Nothing to remove.\n")
    assert run(capsys, "prune", str(project), "--keep", "5", "--leftover", left.name) == (0, f"Removed {left.name}\n")
    assert not left.exists()


def test_what_a_running_save_writes_is_not_pruned_by_its_name_either(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FolderLock.create(staged_path(project / "checkpoints" / "checkpoint_4", TOKEN)) as lock:
        assert "in use" in run(capsys, "list", str(project))[1]
        run(capsys, "prune", str(project), "--keep", "5", "--leftover", lock.folder.name)
        assert lock.folder.is_dir()


def test_lists_and_verifies_beside_a_run_that_saves_and_removes(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, ended = project / "checkpoints", threading.Event()

    def save() -> None:
        with fresh():
            PartialState(cpu=True)
            for number in (*range(3, 30), *[2] * 10):
                with staging(folder / f"checkpoint_{number}", facts=FACTS, fsync=False) as staged:
                    (staged / "optimizer.bin").write_text("bytes")
                remove_oldest(folder, 2)
        ended.set()

    saving = threading.Thread(target=save)
    saving.start()
    codes = set()
    while not ended.is_set() and saving.is_alive():
        codes.add(run(capsys, "list", str(project))[0])
        code, shown = run(capsys, "verify", str(project))
        codes.add(code if "damaged" in shown else 0)
    saving.join()
    assert codes == {0}


def test_one_checkpoint_in_detail(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = project / "checkpoints" / "checkpoint_1"
    (one / "notes.txt").write_text("mine")
    code, shown = run(capsys, "info", str(one))
    assert code == 0
    for expected in ("complete", "seed: 4", "optimizer.bin", "5 B", "accel-plugins", "not in the manifest: notes.txt"):
        assert expected in shown
    _, shown = run(capsys, "info", str(one), "--json")
    assert json.loads(shown)["files"]["optimizer.bin"]["size"] == 5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("list", "nowhere"), "There is no such folder."),
        (("info", "."), "it is not a checkpoint of accel"),
        (("prune", "."), "Set --keep to 1"),
        (("prune", ".", "--keep", "0"), "At least one checkpoint must remain."),
    ],
)
def test_what_cannot_be_done_is_said(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.chdir(project)
    code, shown = run(capsys, *arguments)
    assert code == 2
    assert sentence in shown


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "list", str(tmp_path)) == (0, f"There are no checkpoints in {tmp_path}.\n")
    assert run(capsys, "verify", str(tmp_path))[0] == 1


def test_sizes_and_ages() -> None:
    assert [shown_size(size) for size in (0, 999, 1500, 2_500_000)] == ["0 B", "999 B", "1.5 KiB", "2.4 MiB"]
    ages = [shown_age(time.time() - ago) for ago in (-5, 30, 600, 7200, 200_000)]
    assert ages == ["0 s", "30 s", "10 min", "2 h", "2 d"]


def test_it_works_without_torch() -> None:
    script = (
        "import sys, accel_cli.commands.checkpoint, accel_cli.commands.checkpoint; sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], check=False, env=environment).returncode == 0


def change_manifest(folder: Path, **values: object) -> None:
    path = folder / MANIFEST_NAME
    found = json.loads(path.read_text())
    del found["xxh3_128"]
    path.write_text(json.dumps({**found, **values}))


@pytest.mark.parametrize("name", ["../" * 40 + "dev/zero", "/dev/zero"])
def test_a_manifest_that_names_a_device_does_not_keep_verify_waiting(
    project: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    one = project / "checkpoints" / "checkpoint_1"
    change_manifest(one, files={name: {"size": 0, "xxh3_128": "0" * 32}})
    code, shown = run(capsys, "verify", str(project))
    assert code == 1
    assert "is not the name of a file in or below the folder" in shown


def test_what_a_manifest_says_does_not_control_the_terminal(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = project / "checkpoints" / "checkpoint_1"
    red = "\x1b[31m\r\u202e"
    record = {"size": 5, "xxh3_128": "0" * 32}
    change_manifest(one, files={red: record}, facts={red: red}, versions={red: red})
    (one / f"{red}extra").write_text("")
    for action in ("list", "verify", "info"):
        _, shown = run(capsys, action, str(one))
        assert all(line.isprintable() for line in shown.splitlines()), shown
        assert r"\x1b[31m" in shown


@pytest.mark.parametrize("positions", [3, [3], [{}], [{"epoch": "x", "batch": 1}], {"a": 1}, [[]], "text"])
def test_positions_of_another_shape_are_not_shown(
    project: Path, capsys: pytest.CaptureFixture[str], positions: object
) -> None:
    change_manifest(project / "checkpoints" / "checkpoint_1", facts={"positions": positions})
    code, shown = run(capsys, "list", str(project))
    assert code == 0
    assert "epoch 2, batch 30" in shown
