from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from accel_state.errors import Missing, PluginError, SettingError
from accel_state.plugins import forget_plugins
from accel_state.settings.installed import Requirement
from accel_testing.fresh import fresh
from accel_tracking import (
    GeneralTracker,
    JSONLinesTracker,
    LoggerType,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
    registry,
    tracker_class,
    tracker_names,
)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_unregistered", set())


def made(tracker_name: str, folder: bool = False, needs: str | None = None) -> type[GeneralTracker]:
    class Made(GeneralTracker):
        name = tracker_name
        requires_logging_directory = folder
        requirement = None if needs is None else Requirement(needs)

        @property
        def tracker(self) -> Any:
            return None

    return register_tracker_class(Made)


def test_a_registered_class_is_found_by_name_and_replaces_one_of_the_same_name() -> None:
    first = made("mine")
    assert tracker_class("mine") is first
    with pytest.warns(UserWarning, match="replaces the registered tracker 'mine'"):
        second = made("mine")
    assert tracker_class("mine") is second
    assert tracker_names().count("mine") == 1


def test_an_unregistered_class_is_found_again_after_it_is_registered() -> None:
    made("mine")
    for name in ("mine", "jsonl"):
        registry.unregister_tracker_class(name)
        assert name not in tracker_names()
        with pytest.raises(SettingError, match=f"Cannot use the tracker {name!r}"):
            registry.unregister_tracker_class(name)
    register_tracker_class(JSONLinesTracker)
    assert tracker_class("jsonl") is JSONLinesTracker


class Undecided(GeneralTracker):
    name = "undecided"


@pytest.mark.parametrize("wrong", [object, 3, GeneralTracker, Undecided])
def test_other_objects_are_not_registered_as_trackers(wrong: Any) -> None:
    with pytest.raises(SettingError, match="as a tracker"):
        register_tracker_class(wrong)


def test_the_built_in_trackers_come_through_entry_points() -> None:
    assert tracker_class("jsonl") is JSONLinesTracker
    assert tracker_class(LoggerType.JSONL) is JSONLinesTracker
    assert {str(member) for member in LoggerType} - {"all"} == set(tracker_names())


def test_every_built_in_tracker_class_has_the_name_of_its_entry_point() -> None:
    for name in tracker_names():
        assert tracker_class(name).name == name


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a distribution of three trackers, of which one can be loaded."""
    (tmp_path / "stranger.py").write_text(
        "from accel_tracking import GeneralTracker\n"
        "class StrangerTracker(GeneralTracker):\n"
        "    name = 'stranger'\n    requires_logging_directory = False\n    tracker = None\n"
    )
    (tmp_path / "broken_stranger.py").write_text("raise RuntimeError('half installed')\n")
    info = tmp_path / "stranger-1.2.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(
        "[accel.trackers]\nstranger = stranger:StrangerTracker\nbroken = broken_stranger:Nothing\n"
        "no_tracker = stranger:__name__\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_plugins()
    yield tmp_path
    forget_plugins()
    for name in ("stranger", "broken_stranger"):
        sys.modules.pop(name, None)


def test_a_broken_entry_point_is_reported_and_does_not_affect_other_trackers(stranger: Path) -> None:
    assert tracker_class("stranger").__module__ == "stranger"
    with pytest.warns(UserWarning, match="Cannot use the tracker"):
        assert "stranger" in get_available_trackers()
    assert "broken" in tracker_names()
    with pytest.warns(UserWarning, match="Cannot use the tracker") as warned:
        assert {"broken", "no_tracker"}.isdisjoint(filter_trackers("all", "logs"))
    assert [("half installed" in str(w.message), "not a subclass" in str(w.message)) for w in warned] == [
        (True, False),
        (False, True),
    ]
    with pytest.raises(PluginError, match=r"broken_stranger:Nothing of stranger 1\.2 could not be .*half installed"):
        tracker_class("broken")
    with pytest.raises(PluginError, match=r"stranger:__name__ of stranger 1\.2 is not a subclass of GeneralTracker"):
        tracker_class("no_tracker")


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(SettingError, match="'jsonl'"):
        filter_trackers("jsonnl", "logs")


def test_names_instances_and_lists_are_resolved_each_once() -> None:
    kind = made("mine")
    instance = kind()
    assert filter_trackers(["mine", instance, "mine", instance, LoggerType.JSONL], "logs") == [
        "mine",
        instance,
        "jsonl",
    ]
    assert filter_trackers("mine") == ["mine"]
    assert filter_trackers(instance) == [instance]
    assert filter_trackers(None) == filter_trackers([]) == []


def test_a_missing_library_is_an_error_by_name_and_skipped_by_all() -> None:
    made("absent", needs="no_such_library")
    made("here")
    with pytest.raises(Missing, match=r'pip install "no_such_library"'):
        filter_trackers("absent")
    chosen = filter_trackers("all", "logs")
    assert {"here", "jsonl"} <= set(chosen)
    assert "absent" not in chosen


def test_of_several_trackers_one_without_its_library_is_omitted_with_a_warning() -> None:
    made("absent", needs="no_such_library")
    made("here")
    with pytest.warns(UserWarning, match=r"'absent'(?s:.)*pip install \"no_such_library\"") as warned:
        assert filter_trackers(["absent", "here"]) == ["here"]
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="'absent'"):
        assert "here" in filter_trackers(["all", "absent"])
    with pytest.raises(Missing):
        filter_trackers(["absent"])
    with pytest.raises(SettingError, match="Cannot use the tracker 'heer'"):
        filter_trackers(["here", "heer"])


def test_only_the_main_process_is_told_of_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    made("absent", needs="no_such_library")
    made("here")
    with fresh():
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert filter_trackers(["absent", "here"]) == ["here"]


def test_a_tracker_without_its_folder_is_an_error_by_name_and_skipped_by_all() -> None:
    with pytest.raises(SettingError, match="none is configured"):
        filter_trackers("jsonl")
    assert "jsonl" not in filter_trackers("all")
