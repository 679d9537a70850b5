from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from accel_state.errors import NotOffered, SettingError
from accel_testing.processes import Processes
from accel_tracking import GeneralTracker, TrackerGroup, read_run, register_tracker_class, registry


class Kept(GeneralTracker):
    name = "kept"
    requires_logging_directory = False

    def __init__(self, run_name: str = "", fails: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__()
        self.run_name, self.fails, self.options = run_name, fails, options
        self.calls: list[tuple[Any, ...]] = []

    @property
    def tracker(self) -> list[tuple[Any, ...]]:
        return self.calls

    def _note(self, *call: Any) -> None:
        if call[0] in self.fails:
            raise OSError(28, "No space left on device")
        self.calls.append(call)

    def start(self) -> None:
        self._note("start")

    def store_init_configuration(self, values: Any) -> None:
        self._note("config", values)

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self._note("log", values, step, kwargs)

    def log_table(self, table_name: str, *args: Any, **kwargs: Any) -> None:
        self._note("table", table_name, *args, kwargs)

    def finish(self) -> None:
        self._note("finish")


def test_each_call_goes_to_every_tracker_in_order() -> None:
    first, second = Kept(), Kept()
    second.name = "second"
    group = TrackerGroup([first, second])
    group.start({"lr": 0.1})
    group.log({"loss": 1.0}, step=2, log_kwargs={"second": {"commit": False}})
    group.log_table("t", columns=["a"], data=[[1]], step=3)
    group.finish()
    table = ("table", "t", ["a"], [[1]], None, {"step": 3})
    assert first.calls == [("start",), ("config", {"lr": 0.1}), ("log", {"loss": 1.0}, 2, {}), table, ("finish",)]
    assert second.calls[2] == ("log", {"loss": 1.0}, 2, {"commit": False})
    assert [tracker.name for tracker in group] == ["kept", "second"]
    assert group.failures == {}


def test_a_failing_tracker_warns_once_is_counted_and_reported_by_finish(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Kept(fails=("log",)), Kept()
    good.name = "good"
    group = TrackerGroup([bad, good])
    group.start()
    with caplog.at_level(logging.WARNING, logger="accel_tracking"):
        for step in range(5):
            group.log({"loss": 1.0}, step=step)
        assert len(caplog.records) == 1
        assert "'kept' failed in log" in caplog.text
        group.finish()
    assert "failed 5 times in this run. First error: log: OSError: [Errno 28] No space left on device" in caplog.text
    assert group.failures == {"kept": 5}
    assert len(good.calls) == 7


def test_a_tracker_that_fails_to_start_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Kept(fails=("start",)), Kept()
    group = TrackerGroup([bad, good])
    group.start({"lr": 1})
    group.log({"a": 1})
    assert bad.calls == []
    assert len(group) == 1
    assert "failed in start" in caplog.text


@pytest.mark.parametrize("action", ["start", "config", "log", "table", "finish"])
def test_strict_propagates_errors(action: str) -> None:
    group = TrackerGroup([Kept(fails=(action,))], strict=True)

    def run() -> None:
        group.start({})
        group.log({})
        group.log_table("t")
        group.finish()

    with pytest.raises(OSError, match="No space left"):
        run()


def test_unsupported_images_are_counted_and_not_raised() -> None:
    group = TrackerGroup([Kept()])
    group.log_images({"a": []})
    assert group.failures == {"kept": 1}
    with pytest.raises(NotOffered):
        TrackerGroup([Kept()], strict=True).log_images({"a": []})


def test_init_kwargs_go_to_the_constructor_of_their_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    register_tracker_class(Kept)
    instance = Kept("own")
    instance.name = "own"
    group = TrackerGroup.of(
        ["kept", instance, "jsonl"],
        "project",
        tmp_path,
        init_kwargs={"kept": {"color": 1}, "jsonl": {"flush_every": 9}},
    )
    assert group.get("kept").run_name == "project"
    assert group.get("kept").options == {"color": 1}
    assert group.get("own") is instance
    assert group.get("own", unwrap=True) is instance.calls
    assert group.get("jsonl").flush_every == 9
    with pytest.raises(SettingError, match="Cannot get the tracker 'wandb'"):
        group.get("wandb")


def test_init_kwargs_of_an_unused_tracker_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    group = TrackerGroup.of(Kept(), "project", init_kwargs={"wandb": {"name": "a"}, "mlflow": None})
    assert [tracker.name for tracker in group] == ["kept"]
    assert caplog.messages == []
    assert len(TrackerGroup.of(None, "project", init_kwargs={"wandb": {}})) == 0
    TrackerGroup.of(Kept(), "project", init_kwargs={"wandbb": {}})
    assert "'wandbb', which does not exist" in caplog.text


def test_arguments_may_be_none(tmp_path: Path) -> None:
    group = TrackerGroup.of("jsonl", "project", tmp_path, init_kwargs={"jsonl": None}, strict=True)
    group.start()
    group.log({"loss": 1.0}, log_kwargs={"jsonl": None, "wandb": {"commit": True}})
    group.finish()


def log_something(folder: str) -> tuple[int, int, bool]:
    from accel_state.process import PartialState

    state = PartialState(cpu=True)
    group = TrackerGroup.of("jsonl", "two", folder)
    group.start({"lr": 0.1})
    group.log({"rank": state.process_index}, step=1)
    tracker = group.get("jsonl")
    tracker.log({"direct": state.process_index}, step=2)
    group.finish()
    return len(group), len(list(Path(folder).rglob("*.jsonl"))) if state.is_main_process else 0, tracker._blank


def test_only_the_main_process_of_two_logs(two: Processes, tmp_path: Path) -> None:
    assert two.run(log_something, str(tmp_path)) == [(1, 1, False), (0, 0, True)]
    assert [dict(record.values) for record in read_run(tmp_path).records] == [{"rank": 0}, {"direct": 0}]


@pytest.mark.parametrize("log_with", [None, []])
def test_a_run_without_log_with_is_stored_by_the_tracker_jsonl(tmp_path: Path, log_with: Any) -> None:
    group = TrackerGroup.of(log_with, "run", tmp_path)
    group.start({"lr": 0.1})
    group.log({"loss": 1.5}, step=3)
    group.finish()
    assert [tracker.name for tracker in group] == ["jsonl"]
    run = read_run(tmp_path)
    assert run.curves()["loss"] == [(3, 1.5)]
    assert len(TrackerGroup.of(log_with, "run")) == 0
