from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from accel_state.errors import Missing, NotOffered
from accel_state.settings.installed import Requirement
from accel_testing.fresh import fresh
from accel_tracking import GeneralTracker, LibraryTracker, is_main_process, on_main_process


class Kept(GeneralTracker):
    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.seen

    @on_main_process
    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.seen.append((values, step, kwargs))


class KeptEverywhere(Kept):
    main_process_only = False


def test_a_tracker_class_without_required_attributes_is_refused() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotOffered, match="`requires_logging_directory`, `tracker`") as error:
        Half()
    assert isinstance(error.value, NotImplementedError)


def test_a_tracker_attribute_may_be_set_before_the_base_is_initialised() -> None:
    class Late(GeneralTracker):
        name = "late"
        requires_logging_directory = False

        def __init__(self) -> None:
            self.tracker = "writer"
            super().__init__()

    assert Late().tracker == "writer"


def test_a_blank_tracker_accepts_every_call_and_stores_nothing() -> None:
    blank: Any = GeneralTracker(_blank=True)
    before = dict(vars(blank))
    answers = [
        blank.start(),
        blank.store_init_configuration({"a": 1}),
        blank.log({"a": 1}, step=1, more=2),
        blank.log_images({"a": []}),
        blank.log_table("t", columns=["a"], data=[[1]]),
        blank.finish(),
    ]
    assert answers == [None] * 6
    assert vars(blank) == before


def test_images_and_tables_are_refused_by_default() -> None:
    with pytest.raises(NotOffered, match="does not support images"):
        Kept().log_images({"a": []})
    with pytest.raises(NotOffered, match="does not support tables"):
        Kept().log_table("t")


def test_on_main_process_checks_the_rank_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh():
        tracker, everywhere = Kept(), KeptEverywhere()
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("WORLD_SIZE", "2")
            tracker.log({"rank": rank}, step=3, more=1)
            everywhere.log({"rank": rank})
        assert tracker.seen == [({"rank": "0"}, 3, {"more": 1})]
        assert [values["rank"] for values, _, _ in everywhere.seen] == ["0", "1"]
        assert not is_main_process()
    assert on_main_process(Kept.finish).__name__ == "finish"


class Listed(LibraryTracker):
    name = "listed"
    requirement = Requirement("json")

    run = LibraryTracker.tracker

    def open(self) -> Any:
        return [self.run_name, self.init_kwargs]


def test_a_library_tracker_opens_its_run_in_start_and_on_the_main_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh():
        for rank, opened in (("1", None), ("0", ["digits", {"mode": "offline"}])):
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("WORLD_SIZE", "2")
            tracker = Listed("digits", mode="offline")
            assert tracker.tracker is None
            tracker.start()
            assert tracker.tracker == tracker.run == opened
    # Scripts subclass a tracker, override `start`, and assign the attribute that the documented interface has.
    tracker.run = "other"
    assert tracker.tracker == "other"


def test_a_library_tracker_without_its_library_is_an_error_at_start() -> None:
    class Absent(Listed):
        requirement = Requirement("no_such_library")

    tracker = Absent("digits")
    with pytest.raises(Missing, match=r"Cannot start the tracker 'listed'[^$]*no_such_library"):
        tracker.start()


def test_the_package_and_its_jsonl_tracker_load_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, accel_tracking, accel_tracking.trackers.jsonl, tempfile\n"
        "tracker = accel_tracking.JSONLinesTracker('run', tempfile.mkdtemp())\n"
        "tracker.start(); tracker.log({'loss': 1.0}); tracker.finish()\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=250, check=False).returncode == 0
