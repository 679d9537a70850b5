"""The version is the one that clients expect to find, in the metadata and in the module."""

from __future__ import annotations

from importlib.metadata import metadata, version

from packaging.specifiers import SpecifierSet

import accelerate


def test_the_module_and_the_distribution_agree() -> None:
    assert accelerate.__version__ == version("accelerate")


def test_version_satisfies_the_requirements_of_clients() -> None:
    for asked in ("==1.15.0", ">=1.1.0", ">=1.12,<2", "~=1.15"):
        assert accelerate.__version__ in SpecifierSet(asked)
    assert accelerate.__version__ not in SpecifierSet(">1.15.0")


def test_the_home_page_says_whose_interface_it_is_and_who_did_not_make_it() -> None:
    told = metadata("accelerate")["Home-page"]
    assert "the interface of https://huggingface.co/docs/accelerate" in told
    assert told.startswith("none;")
    assert told.endswith("not made there")
