"""`TrackerSuite`: the tests that every tracker passes. Subclass it, and define how to construct one and read it back.

For example:

    class TestMyTracker(TrackerSuite):
        tracker_class = MyTracker

        def make(self, folder):
            return MyTracker("run", folder)

        def read(self, folder, tracker):
            return {"loss": [(1, 0.5), (2, 0.25)]}   # read from the files of the library
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from accel_state.errors import Missing, NotOffered
from accel_state.plugins import plugins_of
from accel_tracking.base import GeneralTracker

__all__ = ("Curves", "TrackerSuite", "leveldb_records")

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""Metric name to its points (step, value)."""

_LOGGED_CURVES: Curves = {"loss": [(1, 0.5), (2, 0.25)], "accuracy": [(1, 1.0), (2, 3.0)], "eval/loss": [(2, 0.75)]}

_LOG_HEADER_BYTES = 7
_BLOCK_BYTES = 32 * 1024
_RECORD_HEADER_BYTES = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class _Scalar:
    """A scalar with the interface of torch and numpy scalars, without either library."""

    size = 1

    def __init__(self, value: float) -> None:
        self.value = value

    def item(self) -> float:
        return self.value

    def tolist(self) -> float:
        return self.value


class TrackerSuite:
    """Tests of one tracker from construction to `finish`, with the real library and without a network."""

    tracker_class: ClassVar[type[GeneralTracker]]
    """The class under test."""

    separator: ClassVar[str] = "/"
    """Separator between the names of nested metrics in the files of the library."""

    def make(self, folder: Path) -> GeneralTracker:
        """Construct a tracker that writes only into `folder`; do not start it."""
        raise NotImplementedError("define how to construct the tracker")

    def read(self, folder: Path, tracker: Any) -> Curves:
        """Read the curves of a finished tracker from its files."""
        raise NotImplementedError("define how to read the run")

    def read_config(self, folder: Path, tracker: Any) -> Mapping[str, Any] | None:
        """Read the hyperparameters of a finished run; None if the library's files cannot be read."""
        return None

    @pytest.fixture(autouse=True)
    def _library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        requirement = self.tracker_class.requirement
        if requirement is not None and requirement.obstacle() is not None:
            pytest.skip(f"{requirement.obstacle()} {requirement.remedy()}")
        # Some libraries write into the working directory, which must not be the repository.
        monkeypatch.chdir(tmp_path)

    def test_an_entry_point_has_its_name(self) -> None:
        target = f"{self.tracker_class.__module__}:{self.tracker_class.__qualname__}"
        names = [plugin.name for plugin in plugins_of("accel.trackers") if plugin.target == target]
        assert names == [self.tracker_class.name]

    def test_its_module_imports_neither_the_library_nor_torch(self) -> None:
        requirement = self.tracker_class.requirement
        heavy = {"torch", "numpy", requirement.module if requirement is not None else "torch"}
        code = f"import sys, {self.tracker_class.__module__}\nprint(*sorted({heavy!r} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == []

    def test_the_constructor_touches_neither_library_nor_disk(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path / "nowhere")
        assert isinstance(tracker, GeneralTracker)
        assert not (tmp_path / "nowhere").exists()

    def test_a_missing_library_is_an_error_with_the_install_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        requirement = self.tracker_class.requirement
        if requirement is None:
            pytest.skip("it needs no library")
        tracker = self.make(tmp_path)
        monkeypatch.setattr(
            type(requirement), "obstacle", lambda self: f"The package {self.module!r} is not installed."
        )
        with pytest.raises(Missing, match="pip install"):
            tracker.start()

    def test_logged_values_and_configuration_are_read_back(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.start()
        tracker.store_init_configuration({"lr": 0.1, "optimizer": {"name": "sgd"}, "layers": [1, 2], "none": None})
        tracker.log({"loss": 0.5, "accuracy": 1}, step=1)
        tracker.log({"loss": _Scalar(0.25), "accuracy": 3, "eval": {"loss": 0.75}}, step=2)
        assert tracker.tracker is not None  # type: ignore[attr-defined]
        tracker.finish()
        expected = {name.replace("/", self.separator): list(points) for name, points in _LOGGED_CURVES.items()}
        stored = self.read(tmp_path, tracker)
        assert {name: list(stored[name]) for name in expected} == expected
        config = self.read_config(tmp_path, tracker)
        assert config is None or str(config["lr"]) == "0.1"

    def test_tensors_and_numpy_scalars_are_stored_as_numbers(self, tmp_path: Path) -> None:
        if any(importlib.util.find_spec(name) is None for name in ("torch", "numpy")):
            pytest.skip("torch and numpy are not both installed")
        import numpy as np
        import torch

        tracker = self.make(tmp_path)
        tracker.start()
        tracker.log(
            {
                "a": torch.tensor(1.5, requires_grad=True),
                "b": torch.tensor([2.0]),
                "c": np.float32(0.5),
                "d": np.float64(0.25),
                "e": np.int64(3),
                "f": np.bool_(True),
                "g": torch.tensor(False),
            },
            step=1,
        )
        tracker.finish()
        stored = self.read(tmp_path, tracker)
        expected = {"a": 1.5, "b": 2.0, "c": 0.5, "d": 0.25, "e": 3, "f": 1, "g": 0}
        assert {name: list(stored[name]) for name in expected} == {
            name: [(1, value)] for name, value in expected.items()
        }

    def test_bools_are_stored_as_numbers(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.start()
        tracker.log({"flag": True, "eval": {"flag": False}}, step=1)
        tracker.log({"flag": False}, step=2)
        tracker.finish()
        stored = self.read(tmp_path, tracker)
        assert list(stored["flag"]) == [(1, 1.0), (2, 0.0)]
        assert list(stored[f"eval{self.separator}flag"]) == [(1, 0.0)]

    def test_text_bools_and_missing_steps_are_accepted(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.start()
        tracker.log({"note": "first", "flag": True, "loss": 1.0})
        tracker.log({"loss": 2.0})
        tracker.finish()
        assert [value for _, value in self.read(tmp_path, tracker)["loss"]][-1] == 2.0

    def test_tables_are_stored_or_refused(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.start()
        try:
            tracker.log_table("worst", columns=["image", "loss"], data=[[3, 0.5]], step=1)
        except NotOffered as refusal:
            assert tracker.name in str(refusal)  # noqa: PT017 - either outcome is right
        tracker.log({"loss": 1.0}, step=2)
        tracker.finish()
        assert list(self.read(tmp_path, tracker)["loss"]) == [(2, 1.0)]

    def test_other_processes_write_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if not self.tracker_class.main_process_only:
            pytest.skip("it logs from every process")
        from accel_testing.fresh import fresh

        with fresh():
            monkeypatch.setenv("RANK", "1")
            monkeypatch.setenv("WORLD_SIZE", "2")
            tracker = self.make(tmp_path / "nowhere")
            tracker.start()
            tracker.store_init_configuration({"lr": 0.1})
            tracker.log({"loss": 1.0}, step=1)
            tracker.finish()
        assert not (tmp_path / "nowhere").exists()


def leveldb_records(path: Path) -> Iterator[bytes]:
    """The messages of an offline run of wandb or swanlab, as bytes.

    Both write the log format of LevelDB (https://github.com/google/leveldb/blob/main/doc/log_format.md) after a header
    of seven bytes: blocks of 32 KiB with records, each with checksum, length and type. A message may span records.
    """
    content = path.read_bytes()
    position = _LOG_HEADER_BYTES
    message = b""
    while position + _RECORD_HEADER_BYTES <= len(content):
        if _BLOCK_BYTES - position % _BLOCK_BYTES < _RECORD_HEADER_BYTES:
            position += _BLOCK_BYTES - position % _BLOCK_BYTES
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        position += _RECORD_HEADER_BYTES
        message = (message if kind in (_MIDDLE, _LAST) else b"") + content[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            yield message
