"""The bootstrap tells what is wrong in three parts, repairs what was interrupted, and is quick the second time."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bootstrap

# Making a virtual environment takes a busy machine a minute.

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "bootstrap.py"

# Python treats a module that is None in sys.modules as one that is not installed.
WITHOUT_ENSUREPIP = f"""
import runpy, sys
sys.modules["ensurepip"] = None
sys.argv = ["bootstrap.py", "train"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280, env={**os.environ, **environment}
    )


def assert_refused(finished: subprocess.CompletedProcess[str], *words: str) -> None:
    """The command failed with all three parts of a message, these words in it, and no traceback."""
    assert finished.returncode == 2
    assert [line.partition(":")[0] for line in finished.stderr.splitlines() if not line.startswith(" ")] == [
        "asked",
        "failed",
        "remedy",
    ]
    for word in words:
        assert word in finished.stderr


def old_python() -> str | None:
    """A Python on this machine that is too old for the packages but can read the script."""
    names = [f"python3.{minor}" for minor in (9, 8, 7)]
    places = [*Path.home().glob(".pyenv/versions/3.[789].*/bin/python"), *map(shutil.which, names)]
    for place in filter(None, places):
        if run(str(place), "-c", "import sys; sys.exit(not (3, 7) <= sys.version_info < (3, 10))").returncode == 0:
            return str(place)
    return None


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the bootstrap reads, where it can make a `.venv` of its own."""
    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "tools/bootstrap.py", "tools/constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_an_unknown_command_is_refused() -> None:
    assert_refused(run(sys.executable, str(SCRIPT), "tset"), "'tset' is not a command", "setup, test, train")


def test_no_command_is_refused() -> None:
    assert_refused(run(sys.executable, str(SCRIPT)), "no command was given", "setup, test, train")


def test_a_python_without_venv_is_refused() -> None:
    assert_refused(run(sys.executable, "-c", WITHOUT_ENSUREPIP), "no module ensurepip", "apt-get install python3-venv")


def test_an_old_python_is_refused() -> None:
    with pytest.raises(bootstrap.BootstrapError, match=r"needs Python 3\.10 or newer"):
        bootstrap.check_python((3, 9), "test")


@pytest.mark.skipif(old_python() is None, reason="there is no Python 3.7 to 3.9 on this machine")
def test_an_old_python_reads_the_script_and_is_refused() -> None:
    assert_refused(run(str(old_python()), str(SCRIPT), "test"), "needs Python 3.10 or newer")


def test_the_script_can_be_read_by_the_pythons_it_refuses() -> None:
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 7))


def test_an_index_that_cannot_be_reached_is_told_with_the_last_words_of_pip(checkout: Path) -> None:
    script = str(checkout / "tools" / "bootstrap.py")
    finished = run(sys.executable, script, "setup", PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert_refused(finished, "installing pip into", "pip ended with exit code 1", "package index")
    assert not (checkout / ".venv" / "bootstrap-stamp").exists()


def test_a_folder_that_cannot_hold_the_venv_is_told(checkout: Path) -> None:
    (checkout / ".venv").write_text("a file where the folder should be", encoding="utf-8")
    assert_refused(run(sys.executable, str(checkout / "tools" / "bootstrap.py"), "setup"), "a virtual environment in")


def test_a_half_made_venv_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = tmp_path / ".venv"
    python = bootstrap.venv_python(venv)
    python.parent.mkdir(parents=True)
    python.symlink_to(tmp_path / "gone")
    monkeypatch.setattr(bootstrap, "VENV", venv)
    bootstrap.make_venv(python)
    assert bootstrap.starts(python, "import pip")


def test_a_venv_that_works_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    bootstrap.make_venv(Path(sys.executable))
    assert not (tmp_path / ".venv").exists()


def test_the_stamp_holds_until_an_input_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = Path(sys.executable)
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp")
    assert not bootstrap.is_complete(python)
    bootstrap.STAMP.write_text(bootstrap.fingerprint(), encoding="utf-8")
    assert bootstrap.is_complete(python)
    assert not bootstrap.is_complete(tmp_path / "no-python-here")
    monkeypatch.setattr(bootstrap, "CONSTRAINTS", tmp_path / "constraints.txt")
    bootstrap.CONSTRAINTS.write_text("torch==2.9.0\n", encoding="utf-8")
    assert not bootstrap.is_complete(python)


def test_every_package_is_installed() -> None:
    installed = {name.partition("[")[0] for name in (*bootstrap.PACKAGES, *bootstrap.WITHOUT_ENGINES)}
    assert installed == {path.name for path in ROOT.glob("packages/*")}


def test_the_interpreter_is_found_on_windows_too() -> None:
    assert bootstrap.venv_python(Path("v"), windows=True) == Path("v/Scripts/python.exe")
    assert bootstrap.venv_python(Path("v"), windows=False) == Path("v/bin/python")
