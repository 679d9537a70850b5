"""Files of another `accelerate` in our folder are found when it is imported, and the error says how to reinstall."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import accel_ops
import accelerate
from accel_state.errors import Missing
from accelerate.installation import check_files, foreign_files


def copy_of(package: ModuleType, folder: Path) -> Path:
    """A copy of a package's sources; other tests may be compiling its modules meanwhile."""
    source, compiled = Path(str(package.__file__)).parent, shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(source, folder, ignore=compiled, dirs_exist_ok=True))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return copy_of(accelerate, tmp_path / "accelerate")


def test_our_own_files_are_known(copied: Path) -> None:
    assert list(foreign_files(str(copied))) == []


@pytest.mark.parametrize(
    "stranger", ["test_utils/__init__.py", "inference_old.py", "utils/rich.py", "utils/x/__init__.py"]
)
def test_a_file_of_another_library_is_found(copied: Path, stranger: str) -> None:
    (copied / stranger).parent.mkdir(exist_ok=True)
    (copied / stranger).touch()
    assert list(foreign_files(str(copied))) == [stranger]


def test_what_python_and_editors_leave_is_not(copied: Path) -> None:
    for name in ("__pycache__/rich.cpython-311.pyc", "notes.txt", ".cache/file.py", "test_utils/__pycache__/a.pyc"):
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        (copied / name).touch()
    assert list(foreign_files(str(copied))) == []


def test_many_are_told_in_few_words(copied: Path) -> None:
    for name in "abcde":
        (copied / f"{name}.py").touch()
    with pytest.raises(Missing, match=r"a\.py, b\.py, c\.py and 2 more"):
        check_files(str(copied))


def test_an_import_says_so(copied: Path) -> None:
    (copied / "test_utils").mkdir()
    (copied / "test_utils" / "__init__.py").touch()
    (copied / "test_utils" / "testing.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(copied.parent)}
    command = [sys.executable, "-c", "import accelerate"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert str(copied) in done.stderr
    assert "test_utils/__init__.py" in done.stderr
    assert f"pip install accelerate=={accelerate.__version__}" in done.stderr


def imported(statement: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """What Python says to a statement, with folders in front of everything else."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", statement]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_ours_over_the_original_is_found_by_what_stayed_behind(tmp_path: Path) -> None:
    before = {
        "__init__.py": "",
        "state.py": "raise RuntimeError",
        "test_utils/__init__.py": "",
        "test_utils/testing.py": "",
    }
    folder = tmp_path / "accelerate"
    for name, text in before.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    copy_of(accelerate, folder)
    done = imported("from accelerate.state import PartialState", tmp_path)
    assert done.returncode != 0
    assert "files of another accelerate: test_utils/" in done.stderr
    shutil.rmtree(folder / "test_utils")
    shutil.copy(Path(str(accelerate.__file__)).with_name("test_utils.py"), folder)
    assert imported("from accelerate.state import PartialState", tmp_path).returncode == 0


def test_an_older_package_below_is_named_with_how_to_reinstall(tmp_path: Path) -> None:
    older = copy_of(accel_ops, tmp_path / "accel_ops")
    tree = older / "tree.py"
    tree.write_text(tree.read_text(encoding="utf-8").replace("is_namedtuple", "is_tuple_with_names"), encoding="utf-8")
    done = imported("from accelerate.utils import is_namedtuple", tmp_path)
    assert done.returncode != 0
    assert "accel_ops.tree" in done.stderr
    assert "pip install --force-reinstall accelerate accel-ops" in done.stderr
