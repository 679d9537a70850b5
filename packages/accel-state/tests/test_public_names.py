"""The public names of the package, and the check of them that every package uses."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from accel_state import labels
from accel_state.testing.public_names import check_public_names

GOOD = """
from typing import TYPE_CHECKING
from accel_state.lazy import lazy_names
if TYPE_CHECKING:
    from {package}.shapes import area as area
    from {package}.shapes import side as width
    from {package}.units import *
__all__ = ("area", "metre", "width")
from {package}.shapes import side as width
__getattr__, __dir__ = lazy_names(__name__, {{"{package}.shapes": ("area",), "{package}.units": ("metre",)}})
"""

FAULTS = {
    "lists a name twice": ('("area",', '("area", "area",'),
    "type checkers and": ('("area", "metre",', '("metre",'),
    "lacks names": ("__getattr__, __dir__ =", "__dir__ = lambda: []\n__getattr__, _ ="),
    "is None": ("import side as width", "import nothing as width"),
    "is not": ("\n__getattr__", "\narea = 3\n__getattr__"),
    "raises no AttributeError": ("__getattr__, __dir__ =", "no_such_name = 1\n__getattr__, __dir__ ="),
}


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, *change: str) -> str:
    """The name of a package with lazy names, after a change of its text."""
    package = f"public_names_of_{folder.name}"
    (folder / package).mkdir()
    text = GOOD.format(package=package)
    assert not change or change[0] in text
    (folder / package / "__init__.py").write_text(text.replace(*change) if change else text)
    (folder / package / "shapes.py").write_text("area, side, nothing = 1, 2, None")
    (folder / package / "units.py").write_text("__all__ = ('metre',)\nmetre, foot = 1, 2")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    return package


def test_public_names_of_accel_state() -> None:
    check_public_names("accel_state")


def test_check_public_names_accepts_renamed_names_and_stars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_public_names(made(tmp_path, monkeypatch))


@pytest.mark.parametrize("message", FAULTS)
def test_check_public_names_fails_when_lists_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    package = made(tmp_path, monkeypatch, *FAULTS[message])
    with pytest.raises(AssertionError, match=message):
        check_public_names(package)


STUBBED = """
from accel_state.lazy import lazy_stub
__getattr__, __dir__, __all__ = lazy_stub(__name__, __file__)
"""


def stubbed(folder: Path, monkeypatch: pytest.MonkeyPatch, last_line: str = "from accel_state.labels import *") -> str:
    """The name of a package whose stub lists its public names."""
    package = f"names_of_a_stub_of_{folder.name}"
    (folder / package).mkdir()
    text = "from accel_state.lazy import lazy_stub\n__getattr__, __dir__, __all__ = lazy_stub(__name__, __file__)"
    (folder / package / "__init__.py").write_text(text)
    (folder / package / "__init__.pyi").write_text(f"from {package}.shapes import area as area\n{last_line}\n")
    (folder / package / "shapes.py").write_text("area = 1")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    return package


def test_a_stub_gives_the_names_of_a_package_and_imports_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = stubbed(tmp_path, monkeypatch)
    module = importlib.import_module(package)
    assert module.__all__ == ("area", *labels.__all__)
    assert f"{package}.shapes" not in sys.modules
    assert (module.area, module.RNGType) == (1, labels.RNGType)
    check_public_names(package)


def test_check_public_names_fails_when_a_stub_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = stubbed(tmp_path, monkeypatch, "from accel_state.labels import RNGType as Kind")
    with pytest.raises(AssertionError, match="type checkers and"):
        check_public_names(package)
