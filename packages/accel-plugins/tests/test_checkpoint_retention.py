from __future__ import annotations

import logging
from pathlib import Path

import pytest

from accel_plugins.checkpoint.commit import staging
from accel_plugins.checkpoint.retention import checkpoints, find_newest, remove_oldest
from accel_state import PartialState
from accel_state.errors import CheckpointError


@pytest.fixture
def saved(cpu_state: PartialState, tmp_path: Path) -> Path:
    """A folder with checkpoints 2, 9 and 10."""
    for number in (9, 2, 10):
        with staging(tmp_path / f"checkpoint_{number}") as folder:
            (folder / "optimizer.bin").write_text("state")
    return tmp_path


def numbers(folder: Path) -> list[int]:
    return [checkpoint.number for checkpoint in checkpoints(folder)]


def test_checkpoints_are_listed_by_number(saved: Path) -> None:
    (saved / "checkpoint_x").mkdir()
    (saved / "checkpoint_3").write_text("a file")
    (saved / "checkpoint_11.staged-0123456789abcdef").mkdir()

    assert numbers(saved) == [2, 9, 10]
    assert checkpoints(saved / "absent") == []


def test_the_newest_good_one_is_found_and_why_others_were_passed_over(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_newest(saved) == saved / "checkpoint_10"
    (saved / "checkpoint_10" / "optimizer.bin").write_text("st")
    (saved / "checkpoint_12").mkdir()
    with caplog.at_level(logging.WARNING):
        assert find_newest(saved) == saved / "checkpoint_9"
    assert "checkpoint_10: optimizer.bin has 2 bytes, and 5 were written" in caplog.text
    assert "checkpoint_12: it has no manifest" in caplog.text


def test_hashes_are_compared_when_asked(saved: Path) -> None:
    (saved / "checkpoint_10" / "optimizer.bin").write_text("etats")

    assert find_newest(saved) == saved / "checkpoint_10"
    assert find_newest(saved, hashes=True) == saved / "checkpoint_9"


def test_a_foreign_folder_is_taken_when_none_has_a_manifest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (0, 1):
        (tmp_path / f"checkpoint_{number}").mkdir()
    with caplog.at_level(logging.WARNING):
        assert find_newest(tmp_path) == tmp_path / "checkpoint_1"
    assert len(caplog.records) == 1


def test_a_foreign_folder_is_never_taken_in_place_of_a_damaged_one(saved: Path) -> None:
    for checkpoint in checkpoints(saved):
        (checkpoint.path / "optimizer.bin").unlink()
    (saved / "checkpoint_1").mkdir()

    with pytest.raises(CheckpointError, match=r"checkpoint_10: optimizer.bin is missing") as caught:
        find_newest(saved)
    assert "checkpoint_1: it has no manifest" in caught.value.obstacle


def test_find_newest_in_an_absent_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder checkpoint_"):
        find_newest(tmp_path / "absent")


def test_the_oldest_are_removed(saved: Path) -> None:
    assert remove_oldest(saved, 3) == []
    assert remove_oldest(saved, 1) == [saved / "checkpoint_2", saved / "checkpoint_9"]
    assert {entry.name for entry in saved.iterdir()} == {"checkpoint_10"}


def test_the_last_good_one_is_never_removed(saved: Path) -> None:
    (saved / "checkpoint_10" / "optimizer.bin").unlink()
    (saved / "checkpoint_9" / "optimizer.bin").unlink()

    assert remove_oldest(saved, 1) == [saved / "checkpoint_9"]
    assert numbers(saved) == [2, 10]
    assert find_newest(saved) == saved / "checkpoint_2"
