"""Fills the field that libraries ask before they use this package, and writes the stubs of the old modules."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE = Path(__file__).parent / "src"


class BuildWithStubs(build_py):
    """Copies the modules; type checkers need the stubs in a wheel, and beside the sources of an editable install."""

    def run(self) -> None:
        super().run()
        # The package around the table needs packages that a build does not have.
        table = SOURCE / "accelerate" / "names" / "__init__.py"
        spec = importlib.util.spec_from_file_location("accelerate_names", table)
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
        import_module("accelerate_names.stubs").write_stubs(SOURCE if self.editable_mode else Path(self.build_lib))


setup(
    cmdclass={"build_py": BuildWithStubs},
    # `pyproject.toml` cannot fill the field `Home-page`.
    url="none; this package has the interface of https://huggingface.co/docs/accelerate, and is not made there",
)
