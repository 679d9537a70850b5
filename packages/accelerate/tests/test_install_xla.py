"""Installing torch_xla from a notebook: with the real pip, from a folder of small packages, into a folder."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packaging.version import Version

from accel_state.errors import Missing, NotOffered
from accel_state.settings.installed import importable, installed_version, look_again
from accelerate.legacy.install_xla import install_xla

SERIES = "{}.{}".format(*Version(torch.__version__).release)


def wheel(folder: Path, name: str, version: str) -> None:
    """A package without content; torch_xla takes libtpu along on a TPU."""
    told = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if name == "torch_xla":
        metadata += 'Provides-Extra: tpu\nRequires-Dist: libtpu; extra == "tpu"\n'
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}/__init__.py", f"VERSION = {version!r}\n")
        file.writestr(f"{told}/METADATA", metadata)
        file.writestr(
            f"{told}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{told}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A notebook of Google Colab whose pip finds what lies in this folder alone, and installs beside it."""
    folder, site = tmp_path / "index", tmp_path / "site"
    folder.mkdir()
    site.mkdir()
    wheel(folder, "libtpu", "1.0")
    told = {"NO_INDEX": "1", "FIND_LINKS": folder, "TARGET": site, "CONFIG_FILE": os.devnull}
    for name, value in told.items():
        monkeypatch.setenv(f"PIP_{name}", str(value))
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    monkeypatch.syspath_prepend(str(site))
    yield folder
    monkeypatch.undo()
    look_again()
    installed_version.cache_clear()


def test_it_installs_what_fits_torch_and_finds_it_at_once(index: Path) -> None:
    for version in ("0.1", f"{SERIES}.3", "99.1"):
        wheel(index, "torch_xla", version)
    asked_before = importable("libtpu"), installed_version("libtpu")
    install_xla()
    assert installed_version("torch_xla") == f"{SERIES}.3"
    assert installed_version("libtpu") == "1.0"
    assert importable("libtpu")
    assert asked_before != (True, "1.0")


def test_an_upgrade_takes_the_newest_and_the_torch_that_it_was_built_for(index: Path) -> None:
    for name, version in (
        ("torch_xla", f"{SERIES}.3"),
        ("torch_xla", "99.1.0"),
        ("torch", "99.1.2"),
        ("torch", "99.2"),
    ):
        wheel(index, name, version)
    install_xla(upgrade=True)
    assert (installed_version("torch_xla"), installed_version("torch")) == ("99.1.0", "99.1.2")


def test_install_xla_raises_with_the_error_of_pip(index: Path) -> None:
    wheel(index, "torch_xla", "99.1")
    with pytest.raises(Missing, match="No matching distribution found") as caught:
        install_xla()
    assert f"torch_xla[tpu]=={SERIES}.*" in caught.value.obstacle
    assert "upgrade=True" in caught.value.remedy


def test_it_is_refused_where_no_notebook_of_colab_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    with pytest.raises(NotOffered, match="Google Colab") as caught:
        install_xla()
    assert isinstance(caught.value, RuntimeError)
    assert "pip install" in caught.value.remedy
