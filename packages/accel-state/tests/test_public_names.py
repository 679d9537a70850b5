"""The public names of the package, and the check of them that every package uses."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from accel_state import labels
from accel_testing.public_names import check_public_names

INIT = """
from accel_state.lazy import lazy_stub
__getattr__, __dir__ = lazy_stub(__name__, __file__)
"""

STUB = """
from {package}.shapes import area as area
from {package}.shapes import side as side
from {package}.units import *
"""

FAULTS = {
    "lists a name twice": ("import side as side", "import area as area"),
    "type checkers and": ("import side as side", "import side as width"),
    "lacks names": ("__file__)", "__file__)\n__dir__ = lambda: []"),
    "is None": ("import side as side", "import nothing as nothing"),
    "is not": ("__file__)", "__file__)\narea = 3"),
    "raises no AttributeError": ("__file__)", "__file__)\nno_such_name = 1"),
}


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, *change: str) -> str:
    """The name of a package whose stub lists its public names, after a change of its text."""
    package = f"public_names_of_{folder.name}"
    (folder / package).mkdir()
    assert not change or change[0] in INIT + STUB
    for file, text in (("__init__.py", INIT), ("__init__.pyi", STUB)):
        text = text.replace(*change) if change else text
        (folder / package / file).write_text(text.format(package=package))
    (folder / package / "shapes.py").write_text("area, side, nothing = 1, 2, None")
    (folder / package / "units.py").write_text("__all__ = ('metre',)\nmetre, foot = 1, 2")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    return package


def test_public_names_of_accel_state() -> None:
    check_public_names("accel_state")


def test_check_public_names_accepts_names_and_stars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_public_names(made(tmp_path, monkeypatch))


@pytest.mark.parametrize("message", FAULTS)
def test_check_public_names_fails_when_lists_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    package = made(tmp_path, monkeypatch, *FAULTS[message])
    with pytest.raises(AssertionError, match=message):
        check_public_names(package)


def test_a_stub_gives_the_names_of_a_package_and_imports_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = made(tmp_path, monkeypatch, "from {package}.units import *", "from accel_state.labels import *")
    module = importlib.import_module(package)
    assert module.__all__ == ("area", "side", *labels.__all__)
    assert f"{package}.shapes" not in sys.modules
    assert (module.area, module.RNGType) == (1, labels.RNGType)
    check_public_names(package)
