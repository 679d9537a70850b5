"""What a test file defines can be pickled in the processes of a test, wherever the file lies."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from accel_testing.processes import Processes

SOURCE = """
import pickle

class Made:
    pass

def pickled():
    return Made.__qualname__.encode() in pickle.dumps(Made())
"""


def test_a_class_under_packages_that_exist_by_name_only(
    one: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "made_up.py"
    file.write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("no_such_package.tests.made_up", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(module)
    assert one.run(module.pickled) == [True]
