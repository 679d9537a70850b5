"""The checks of `nox -s contracts` on the Accelerator find what they forbid, planted in a copy of a module."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULE = "packages/accel-torch/src/accel_torch/local_sgd.py"
REPLACED = ROOT / "tools" / "check_replaced_methods.py"

PRIVATE = """
def planted(accelerator: Accelerator) -> object:
    return accelerator._prepared
"""

REPLACING = {
    "by a function": """
def planted(accelerator: Accelerator) -> None:
    def backward(loss: object) -> None:
        print(loss)

    accelerator.backward = backward
""",
    "by a lambda": """
def planted(accelerator: Accelerator) -> None:
    accelerator.session.strategy.finalize_gradients = lambda: None
""",
    "by a method": """
def planted(accelerator: Accelerator, report: LocalSGD) -> None:
    accelerator.session.strategy.setup = report._average
""",
    "by what is made from the old one": """
def planted(accelerator: Accelerator, timed: Any) -> None:
    accelerator.backward = timed(accelerator.backward)
""",
    "by setattr": """
def planted(accelerator: Accelerator, timed: Any) -> None:
    for name in ("save", "save_state"):
        setattr(accelerator, name, timed(getattr(accelerator, name)))
""",
}


def planted(folder: Path, lines: str) -> Path:
    """A copy of a module with further lines, where the settings of the linter apply."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    copy = folder / MODULE
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / MODULE).read_text(encoding="utf-8") + lines, encoding="utf-8")
    return copy


def linted(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "SLF", str(path)]
    return subprocess.run(ruff, cwd=folder, capture_output=True, text=True, check=False)


def test_a_private_attribute_of_another_object_is_found(tmp_path: Path) -> None:
    assert linted(ROOT / MODULE, ROOT).returncode == 0
    done = linted(planted(tmp_path, PRIVATE), tmp_path)
    assert done.returncode == 1
    assert "SLF001" in done.stdout
    assert "_prepared" in done.stdout


@pytest.mark.parametrize("lines", REPLACING.values(), ids=list(REPLACING))
def test_a_replaced_method_is_found(tmp_path: Path, lines: str) -> None:
    path = planted(tmp_path, lines)
    done = subprocess.run([sys.executable, REPLACED, path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{path}:" in done.stdout


def test_no_module_replaces_a_method() -> None:
    done = subprocess.run([sys.executable, REPLACED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
