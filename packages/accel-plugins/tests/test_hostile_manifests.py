"""Whatever is wrong with a checkpoint's manifest, the checkpoint counts as damaged and an older one is taken."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_plugins.checkpoint import manifest
from accel_plugins.checkpoint.commit import staging
from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.manifest import verify
from accel_plugins.checkpoint.retention import find_newest
from accel_state import PartialState


@pytest.fixture
def saved(cpu_state: PartialState, tmp_path: Path) -> Path:
    """A folder with the good checkpoints 0 and 1."""
    for number in (0, 1):
        with staging(tmp_path / f"checkpoint_{number}") as folder:
            (folder / "optimizer.bin").write_text("state")
    return tmp_path


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / MANIFEST_NAME
        found = json.loads(path.read_text())
        # A forger would write the hash that fits; without one, each change is judged by itself.
        del found["xxh3_128"]
        change(found)
        path.write_text(json.dumps(found))

    return damage


def lists(name: str, size: int = 0) -> Callable[[Path], None]:
    return edited(lambda found: found["files"].update({name: {"size": size, "xxh3_128": "0" * 32}}))


def replaced(old: str, new: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / MANIFEST_NAME
        text = re.sub(r',\n  "xxh3_128": "[0-9a-f]+"\n}', "\n}", path.read_text())
        assert '\n  "xxh3_128"' not in text
        assert old in text
        path.write_text(text.replace(old, new))

    return damage


def in_place_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def linked(target: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "away").symlink_to(target)
        lists("away", os.stat(target).st_size)(folder)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(replaced('"format": 1', '"format": 1e9999'), id="endless format"),
        pytest.param(replaced('"size": 5', '"size": 1e9999'), id="endless size"),
        pytest.param(replaced('"size": 5', '"size": -5'), id="negative size"),
        pytest.param(replaced('"size": 5', '"size": "5"'), id="text as size"),
        pytest.param(edited(lambda f: f.update(written=10**300)), id="written after the end of time"),
        pytest.param(edited(lambda f: f.update(written="x")), id="written as text"),
        pytest.param(edited(lambda f: f.update(facts=[])), id="facts as a list"),
        pytest.param(edited(lambda f: f.update(versions={"torch": 2})), id="version as a number"),
        pytest.param(edited(lambda f: f["files"].update(x=3)), id="file as a number"),
        pytest.param(lambda f: (f / MANIFEST_NAME).write_text("[" * 200_000), id="deep"),
        pytest.param(lambda f: (f / MANIFEST_NAME).write_bytes(b"\xff\xfe{}"), id="no UTF-8"),
        pytest.param(in_place_of(MANIFEST_NAME, os.mkfifo), id="manifest is a pipe"),
        pytest.param(in_place_of(MANIFEST_NAME, os.mkdir), id="manifest is a folder"),
        pytest.param(in_place_of(MANIFEST_NAME, lambda p: p.symlink_to("/dev/zero")), id="manifest is endless"),
        pytest.param(in_place_of("optimizer.bin", os.mkfifo), id="file is a pipe"),
        pytest.param(lists("../" * 40 + "dev/zero"), id="leads to a device"),
        pytest.param(lists("/dev/zero"), id="absolute"),
        pytest.param(lists("..\\checkpoint_0\\optimizer.bin", 5), id="leads out with backslashes"),
        pytest.param(lists("../checkpoint_0/optimizer.bin", 5), id="leads out"),
        pytest.param(lists("a\0b"), id="no name"),
        pytest.param(lists("\ud800"), id="half a character"),
        pytest.param(lists("a" * 100_000), id="long name"),
        pytest.param(linked("/dev/zero"), id="link to a device"),
        pytest.param(linked("/etc/passwd"), id="link out of the folder"),
    ],
)
@pytest.mark.parametrize("hashes", [False, True], ids=["sizes", "hashes"])
def test_the_older_checkpoint_is_taken(saved: Path, damage: Callable[[Path], object], hashes: bool) -> None:
    damage(saved / "checkpoint_1")

    verdict = verify(saved / "checkpoint_1", hashes=hashes)

    assert verdict.damage
    assert not verdict.good
    assert all(len(sentence) < 1000 and sentence.isprintable() for sentence in verdict.damage)
    assert find_newest(saved, hashes=hashes) == saved / "checkpoint_0"


def test_an_unexpected_failure_while_judging_means_damaged(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(path: Path) -> manifest.FileRecord:
        if path.parent.name == "checkpoint_1":
            raise MemoryError("no memory")
        return original(path)

    original = manifest.record_of
    monkeypatch.setattr(manifest, "record_of", exhausted)

    assert find_newest(saved, hashes=True) == saved / "checkpoint_0"


def test_control_characters_of_names_are_escaped(saved: Path) -> None:
    lists("\x1b[2J\x1b[1;1Hgood")(saved / "checkpoint_1")

    assert verify(saved / "checkpoint_1").damage == ("\\x1b[2J\\x1b[1;1Hgood is missing.",)


def test_any_changed_bit_of_a_manifest_is_noticed(saved: Path) -> None:
    folder = saved / "checkpoint_1"
    path = folder / MANIFEST_NAME
    content = path.read_bytes()
    unnoticed = []
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        if verify(folder).good:
            unnoticed.append(content[max(0, place - 20) : place + 20])
    assert unnoticed == []
    path.write_bytes(content)
    assert verify(folder).good
