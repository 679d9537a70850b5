"""The public names of the package, and the check of them that every package uses."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

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
