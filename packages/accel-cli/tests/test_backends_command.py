"""`accel backends` shows what is installed, and what is wrong with what is broken."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_testing.processes import Finished, run_command

Accel = Callable[..., Finished]

MANIFEST = """
from accel_plugins.manifest import Manifest
from accel_state.settings.installed import Requirement
MANIFEST = Manifest(name="{name}", strategy="{name}_backend:Mine", tier=3{more})
"""
BODY = """
from accel_plugins.strategy import Strategy
class Mine(Strategy): ...
def present(process): {answer}
"""
ASKED = "priority={priority}, present='{name}_backend:present'"
ALONE = "return process.world_size == 1"
ENTRY = (sys.executable, "-m", "accel_cli.main")
PLACE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def offer(site: Path, name: str, manifest: str = MANIFEST, body: str = BODY, more: str = "", answer: str = "") -> None:
    """Make a package that offers a backend."""
    info = site / f"{name}_package-2.5.dist-info"
    info.mkdir(parents=True)
    points = f"[accel.backends]\n{name} = {name}_manifest:MANIFEST\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    manifest = manifest.replace("{more}", more).replace("{name}", name)
    (site / f"{name}_manifest.py").write_text(manifest, encoding="utf-8")
    (site / f"{name}_backend.py").write_text(body.replace("{answer}", answer or "pass"), encoding="utf-8")


def on_path(site: Path) -> dict[str, str]:
    """Variables with which the packages of a folder are found, and no settings of the user."""
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "HF_HOME": str(site)}


def rows_of(done: Finished) -> dict[str, dict[str, Any]]:
    assert (done.returncode, done.stderr) == (0, "")
    return {row["name"]: row for row in json.loads(done.stdout)}


OFFERED = {
    "plain": ("", "", "available"),
    "late": (", " + ASKED.replace("{priority}", "-99"), ALONE, "available"),
    "of_seven": (", " + ASKED.replace("{priority}", "99"), "return process.world_size == 7", "available"),
}
"""Name of a backend, more fields of its manifest, what its package answers, and its state for a lone process."""

BROKEN = {
    "no_module": ("import no_such_module", "", "ModuleNotFoundError"),
    "protocol": (MANIFEST.replace("{more}", ", protocol=9"), "", "supports version 9 of the backend interface"),
    "number": ("MANIFEST = 3", "", "is a int, not a Manifest"),
    "misnamed": (MANIFEST.replace('"{name}"', '"another"'), "", "has the name 'another'"),
    "no_settings": (MANIFEST.replace("{more}", ", config='{name}_backend:Settings'"), "class X: ...", "Settings"),
    "no_library": (MANIFEST, "raise OSError('libvendor.so is missing')", "libvendor.so is missing"),
    "no_answer": (MANIFEST.replace("{more}", ", present='{name}_backend:present'"), BODY, "ZeroDivisionError"),
}
"""Name of a backend, its manifest, its body, and what is shown of it."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packages that offer backends, none of which is the default."""
    site = tmp_path_factory.mktemp("site")
    for name, (more, answer, _) in OFFERED.items():
        offer(site, name, more=more, answer=answer)
    for name, (manifest, body, _) in BROKEN.items():
        offer(site, name, manifest, body, answer="1 / 0")
    offer(site, "lacking", more=", requires=(Requirement('no_such_engine', 'no-such-engine'),)")
    return site


@pytest.fixture(scope="module")
def rows(installed: Path) -> dict[str, dict[str, Any]]:
    """What is listed of them in a process that has a place in a run."""
    return rows_of(run_command([*ENTRY, "backends", "--json"], env={**on_path(installed), **PLACE}))


@pytest.fixture(scope="module")
def table(installed: Path) -> list[str]:
    """The same in lines."""
    return run_command([*ENTRY, "backends"], env=on_path(installed)).stdout.splitlines()


def test_built_in_backends_are_listed_with_what_a_lone_process_would_use(rows: dict[str, dict[str, Any]]) -> None:
    # The place of this process in a run is not passed on.
    assert rows["single"]["state"] == "default"
    assert rows["ddp"]["state"] == "available"
    assert {(row["package"], row["tier"], row["obstacle"], row["failure"]) for row in rows.values()} >= {
        ("accel-plugins", 1, "", "")
    }


def test_the_table_says_which_one_is_the_default(table: list[str]) -> None:
    assert table[0].split() == ["name", "version", "package", "tier", "here"]
    assert [line.split()[-1] for line in table if line.startswith("single ")] == ["default"]
    assert [line.split()[-1] for line in table if line.startswith("ddp ")] == ["available"]


def test_without_asking_torch_is_not_needed(accel: Accel, tmp_path: Path) -> None:
    offer(tmp_path / "site", "other", answer="return True")
    (tmp_path / "site" / "torch.py").write_text("raise ImportError('no torch today')", encoding="utf-8")
    env = on_path(tmp_path / "site")
    assert rows_of(accel("backends", "--json", "--no_probe", env=env))["other"]["state"] == "unknown"
    done = accel("backends", env=env)
    assert done.returncode == 0
    assert "no torch today" in done.stderr


@pytest.mark.parametrize("name", OFFERED)
def test_another_package_is_listed_with_its_version_and_its_answer(rows: dict[str, dict[str, Any]], name: str) -> None:
    row = rows[name]
    assert (row["package"], row["version"], row["tier"]) == (f"{name.replace('_', '-')}-package", "2.5", 3)
    assert row["state"] == OFFERED[name][2]
    assert not row["failure"]


def test_another_package_may_be_the_default(accel: Accel, tmp_path: Path) -> None:
    offer(tmp_path / "site", "other", more=", " + ASKED.replace("{priority}", "99"), answer=ALONE)
    listed = rows_of(accel("backends", "--json", env=on_path(tmp_path / "site")))
    assert (listed["other"]["state"], listed["single"]["state"]) == ("default", "available")


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_shown_with_its_traceback_and_takes_nothing_from_the_others(
    table: list[str], name: str
) -> None:
    row = {name: next(line for line in table if line.startswith(f"{name} ")) for name in (name, "single")}
    assert "cannot be used: " in row[name]
    assert row["single"].endswith("default")
    begin = table.index(f"{name} ({name.replace('_', '-')}-package 2.5) failed:")
    shown = [table[begin]]
    for line in table[begin + 1 :]:
        if line.endswith("-package 2.5) failed:"):
            break
        shown.append(line)
    assert any(BROKEN[name][2] in line for line in shown)


def test_a_package_that_it_needs_is_named(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["lacking"]
    assert "no-such-engine" in row["obstacle"]
    assert row["failure"] == ""
