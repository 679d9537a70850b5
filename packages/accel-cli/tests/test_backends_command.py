"""`accel backends` shows what is installed, and what is wrong with what is broken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_state.testing.processes import Finished

Accel = Callable[..., Finished]

MANIFEST = """
from accel_plugins.manifest import Manifest
from accel_state.settings.requirement import Requirement
MANIFEST = Manifest(name="other", strategy="other_backend:Mine", tier=3{more})
"""
BODY = """
from accel_plugins.strategy import Strategy
class Mine(Strategy): ...
def present(process): {answer}
"""


@pytest.fixture
def offer(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Make a package that offers a backend called `other`, and return variables with which it is found."""

    def make(manifest: str = MANIFEST.format(more=""), body: str = BODY.format(answer="return True")) -> dict[str, str]:
        site = tmp_path / "site"
        info = site / "other_package-2.5.dist-info"
        info.mkdir(parents=True)
        (info / "entry_points.txt").write_text("[accel.backends]\nother = other_manifest:MANIFEST\n", encoding="utf-8")
        (site / "other_manifest.py").write_text(manifest, encoding="utf-8")
        (site / "other_backend.py").write_text(body, encoding="utf-8")
        paths = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": paths}

    return make


def listed(accel: Accel, env: dict[str, str] | None = None, *arguments: str) -> dict[str, dict[str, Any]]:
    done = accel("backends", "--json", *arguments, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_built_in_backends_are_listed_with_what_a_lone_process_would_use(accel: Accel) -> None:
    rows = listed(accel)
    assert rows["single"]["state"] == "default"
    assert rows["ddp"]["state"] == "available"
    assert {(row["package"], row["tier"], row["obstacle"], row["failure"]) for row in rows.values()} >= {
        ("accel-plugins", 1, "", "")
    }


def test_the_place_of_this_process_in_a_run_is_not_passed_on(accel: Accel) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert listed(accel, {**os.environ, **place})["single"]["state"] == "default"


def test_the_table_says_which_one_is_the_default(accel: Accel) -> None:
    lines = accel("backends").stdout.splitlines()
    assert lines[0].split() == ["name", "version", "package", "tier", "here"]
    assert [line.split()[-1] for line in lines if line.startswith("single ")] == ["default"]
    assert [line.split()[-1] for line in lines if line.startswith("ddp ")] == ["available"]


def test_without_asking_torch_is_not_needed(accel: Accel, offer: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    env = offer()
    (tmp_path / "site" / "torch.py").write_text("raise ImportError('no torch today')", encoding="utf-8")
    assert listed(accel, env, "--no_probe")["other"]["state"] == "unknown"
    done = accel("backends", env=env)
    assert done.returncode == 0
    assert "no torch today" in done.stderr


@pytest.mark.parametrize(
    ("more", "answer", "state"),
    [
        ("", "", "available"),
        (", priority=99, present='other_backend:present'", "return process.world_size == 1", "default"),
        (", priority=-99, present='other_backend:present'", "return process.world_size == 1", "available"),
        (", priority=99, present='other_backend:present'", "return process.world_size == 7", "available"),
    ],
)
def test_another_package_is_listed_with_its_version_and_its_answer(
    accel: Accel, offer: Callable[..., dict[str, str]], more: str, answer: str, state: str
) -> None:
    row = listed(accel, offer(MANIFEST.format(more=more), BODY.format(answer=answer or "pass")))["other"]
    assert (row["package"], row["version"], row["tier"], row["state"]) == ("other-package", "2.5", 3, state)
    assert not row["failure"]


@pytest.mark.parametrize(
    ("manifest", "body", "said"),
    [
        ("import no_such_module", "", "ModuleNotFoundError"),
        (MANIFEST.format(more=", protocol=9"), "", "written for version 9 of the backend interface"),
        ("MANIFEST = 3", "", "is a int, and no accel_plugins Manifest"),
        (MANIFEST.format(more="").replace('"other"', '"another"'), "", "is named 'another'"),
        (MANIFEST.format(more=", config='other_backend:Settings'"), "class X: ...", "Settings"),
        (MANIFEST.format(more=""), "raise OSError('libvendor.so is missing')", "libvendor.so is missing"),
        (MANIFEST.format(more=", present='other_backend:present'"), BODY.format(answer="1 / 0"), "ZeroDivisionError"),
    ],
)
def test_what_is_broken_is_shown_with_its_traceback_and_takes_nothing_from_the_others(
    accel: Accel, offer: Callable[..., dict[str, str]], manifest: str, body: str, said: str
) -> None:
    lines = accel("backends", env=offer(manifest, body)).stdout.splitlines()
    row = {name: next(line for line in lines if line.startswith(f"{name} ")) for name in ("other", "single")}
    assert "cannot be used: " in row["other"]
    assert row["single"].endswith("default")
    shown = lines[lines.index("other (other-package 2.5) failed:") :]
    assert any(said in line for line in shown)


def test_a_package_that_it_needs_is_named(accel: Accel, offer: Callable[..., dict[str, str]]) -> None:
    needs = ", requires=(Requirement('no_such_engine', 'no-such-engine'),)"
    row = listed(accel, offer(MANIFEST.format(more=needs)))["other"]
    assert "no-such-engine" in row["obstacle"]
    assert row["failure"] == ""
