"""The program that looks up what client libraries import finds each way of asking for a name, and what is missing."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from accel_testing.processes import run_command

PROGRAM = Path(__file__).parent / "clients" / "imported_names.py"

MODULE = """
import accelerate.hooks
from unittest.mock import patch
from .accelerate import not_asked
from accelerated import other
try:
    from accelerate.utils import gather, no_such_name
except ImportError:
    pass

def later():
    from accelerate.state import *
    with patch("accelerate.accelerator.gather"), patch("accelerate.nowhere.gather"):
        return accelerate.hooks.ModelHook.init_hook, accelerate.hooks.no_such_hook
"""

EXPECTED = {
    "accelerate.accelerator.gather": "yes",
    "accelerate.hooks": "yes",
    "accelerate.hooks.ModelHook": "yes",
    "accelerate.hooks.ModelHook.init_hook": "yes",
    "accelerate.hooks.no_such_hook": "no",
    "accelerate.nowhere.gather": "no",
    "accelerate.state": "yes",
    "accelerate.utils.gather": "yes",
    "accelerate.utils.no_such_name": "no",
}


@pytest.mark.parametrize("kind", ["folder", "wheel", "sdist"])
def test_each_way_of_asking_is_found_in_each_kind_of_source(tmp_path: Path, kind: str) -> None:
    package = tmp_path / "client"
    (package / "folder.py").mkdir(parents=True)
    (package / "module.py").write_text(MODULE, encoding="utf-8")
    source = package
    if kind == "wheel":
        source = tmp_path / "client-1-py3-none-any.whl"
        with zipfile.ZipFile(source, "w") as wheel:
            wheel.write(package / "module.py", "client/module.py")
    elif kind == "sdist":
        source = tmp_path / "client-1.tar.gz"
        with tarfile.open(source, "w:gz") as archive:
            archive.add(package, "client-1")
    done = run_command([sys.executable, str(PROGRAM), str(source)], timeout=200)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert {address: verdict for address, verdict, _ in lines} == EXPECTED
    assert all(files.endswith("module.py") for _, _, files in lines)


def test_a_file_for_a_later_python_counts_only_if_it_imports_from_the_original(tmp_path: Path) -> None:
    later = "match = type = lambda: (yield) ~ 1  # a loader for accelerate\n"
    (tmp_path / "template.py").write_text(later, encoding="utf-8")
    (tmp_path / "module.py").write_text("from accelerate import Accelerator\n", encoding="utf-8")
    done = run_command([sys.executable, str(PROGRAM), str(tmp_path)], timeout=200)
    assert (done.returncode, done.stdout) == (0, "accelerate.Accelerator\tyes\tmodule.py\n"), done.stderr
    (tmp_path / "later.py").write_text(f"if True:\n    from accelerate import utils\n{later}", encoding="utf-8")
    done = run_command([sys.executable, str(PROGRAM), str(tmp_path)], timeout=200)
    assert (done.returncode, done.stdout) == (1, "accelerate.Accelerator\tyes\tmodule.py\n")
    assert "cannot be read: later.py: invalid syntax" in done.stderr


def test_an_installed_distribution_is_read() -> None:
    done = run_command([sys.executable, str(PROGRAM), "accel-torch"], timeout=200)
    assert (done.returncode, done.stdout) == (0, "")
