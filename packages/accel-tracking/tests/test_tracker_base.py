from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from accel_state.errors import NotOffered
from accel_state.testing.fresh import fresh
from accel_tracking import GeneralTracker, is_main_process, on_main_process


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


def test_a_tracker_without_its_three_attributes_is_refused_with_their_names() -> None:
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


def test_a_blank_tracker_takes_every_call_and_keeps_nothing() -> None:
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


def test_what_a_tracker_cannot_keep_it_refuses() -> None:
    with pytest.raises(NotOffered, match="cannot keep images"):
        Kept().log_images({"a": []})
    with pytest.raises(NotOffered, match="cannot keep tables"):
        Kept().log_table("t")


def test_who_is_main_is_asked_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_package_and_its_jsonl_tracker_load_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, accel_tracking, accel_tracking.trackers.jsonl, tempfile\n"
        "tracker = accel_tracking.JSONLinesTracker('run', tempfile.mkdtemp())\n"
        "tracker.start(); tracker.log({'loss': 1.0}); tracker.finish()\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
