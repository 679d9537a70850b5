"""Files of another `accelerate` in our folder hide nothing; who misses what they have, and the doctor, name them."""

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
from accel_cli.doctor.examine import OK, WARNING
from accelerate.installation import clash, examination, foreign_files, other_versions


def copy_of(package: ModuleType, folder: Path) -> Path:
    """A copy of a package's sources; other tests may be compiling its modules meanwhile."""
    source, compiled = Path(str(package.__file__)).parent, shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(source, folder, ignore=compiled, dirs_exist_ok=True))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return copy_of(accelerate, tmp_path / "accelerate")


def leave(folder: Path, *files: str) -> None:
    """Files of another library, as an installer that removes nothing leaves them."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise RuntimeError('of another library')", encoding="utf-8")


def imported(statement: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """What Python says to a statement, with folders in front of everything else."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", statement]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)


def test_our_own_files_are_known(copied: Path) -> None:
    assert foreign_files(copied) == []
    (found,) = examination(folder=copied)
    assert (found.verdict, found.remedy) == (OK, "")


@pytest.mark.parametrize(
    "stranger", ["test_utils/__init__.py", "inference_old.py", "utils/rich.py", "utils/x/__init__.py", "state.py"]
)
def test_a_file_of_another_library_is_found(copied: Path, stranger: str) -> None:
    leave(copied, stranger)
    assert foreign_files(copied) == [stranger]


def test_what_python_and_editors_leave_is_not(copied: Path) -> None:
    leave(copied, "__pycache__/rich.cpython-311.pyc", "notes.txt", ".cache/file.py", "test_utils/__pycache__/a.pyc")
    assert foreign_files(copied) == []


def test_the_doctor_tells_of_many_in_few_words(copied: Path) -> None:
    leave(copied, "a.py", "b.py", "c.py", "d.py", "e.py")
    (found,) = examination(folder=copied)
    assert (found.subject, found.verdict) == ("accelerate", WARNING)
    assert found.message.endswith("a.py, b.py, c.py and 2 more.")
    assert f"the wheel of accelerate {accelerate.__version__}" in found.remedy


def test_an_import_beside_files_of_the_original_warns_and_works(copied: Path) -> None:
    leave(copied, "accelerator.py", "state.py")
    done = imported("from accelerate import Accelerator; print(Accelerator.__module__)", copied.parent)
    assert done.stdout.strip() == "accel_torch.accelerator", done.stderr
    assert f"The folder {copied} also contains files of another accelerate: accelerator.py, state.py." in done.stderr
    assert done.stderr.count("UserWarning") == 1


def test_an_import_beside_metadata_of_the_original_warns(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "accelerate-1.15.0.dist-info").mkdir()
    done = imported("import accelerate", tmp_path)
    assert f"accelerate 1.15.0 is also installed; {copied} is the one that is imported" in done.stderr
    (found,) = examination(folder=copied)
    assert found.verdict == OK
    assert other_versions([str(tmp_path), str(tmp_path / "missing")]) == ["1.15.0"]


def test_modules_that_another_library_left_are_not_imported(copied: Path) -> None:
    leave(copied, "state.py", "utils/__init__.py", "utils/operations.py")
    done = imported("from accelerate.state import PartialState; import accelerate.utils.operations", copied.parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("statement", ["import accelerate.test_utils", "from accelerate.utils import write_rich"])
def test_a_failed_import_names_files_of_another_accelerate(copied: Path, statement: str) -> None:
    leave(copied, "test_utils/__init__.py", "test_utils/testing.py", "utils/rich.py")
    done = imported(statement, copied.parent)
    assert done.returncode != 0
    assert f"The folder {copied} also contains files of another accelerate: test_utils/__init__.py" in done.stderr
    assert f"the wheel of accelerate {accelerate.__version__}" in done.stderr


def test_an_installation_of_ours_alone_is_not_blamed() -> None:
    assert clash() is None


def test_an_older_package_below_is_named_with_how_to_reinstall(tmp_path: Path) -> None:
    older = copy_of(accel_ops, tmp_path / "accel_ops")
    tree = older / "tree.py"
    tree.write_text(tree.read_text(encoding="utf-8").replace("is_namedtuple", "is_tuple_with_names"), encoding="utf-8")
    done = imported("from accelerate.utils import is_namedtuple", tmp_path)
    assert done.returncode != 0
    assert "accel_ops.tree" in done.stderr
    assert "Install accelerate and accel-ops from wheels of one build" in done.stderr
