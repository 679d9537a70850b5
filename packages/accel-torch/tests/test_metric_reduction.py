"""Metrics of all processes logged as one number each."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from accel_state.errors import SettingError, ShapeMismatch
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_testing.recording_transport import recording
from accel_torch import Accelerator, GeneralTracker


class Kept(GeneralTracker):
    """Keeps what it is given."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[dict[str, Any], int | None]] = []

    @property
    def tracker(self) -> Kept:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.lines.append((dict(values), step))


def logged(reduction: str) -> tuple[list[Any], int]:
    kept = Kept()
    accelerator = Accelerator(cpu=True, log_with=kept)
    accelerator.init_trackers("run")
    rank = accelerator.process_index
    values = {
        "loss": torch.tensor(1.0 + rank, requires_grad=True),
        "seen": torch.tensor([4 + rank]),
        "exact": torch.tensor(2**53 + 2 * rank),
        "time": 0.5 * rank,
        "right": numpy.float32(rank),
        "of": {"top5": rank, "deep": {"er": -rank}},
    }
    with recording() as records:
        accelerator.log(values, step=7, reduce=reduction)
    return kept.lines, len(records)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("mean", [1.5, 4.5, 2.0**53, 0.25, 0.5, 0.5, -0.5]),
        ("sum", [3.0, 9.0, 2.0**54, 0.5, 1.0, 1.0, -1.0]),
        ("min", [1.0, 4.0, 2.0**53, 0.0, 0.0, 0.0, -1.0]),
        ("max", [2.0, 5.0, 2.0**53 + 2, 0.5, 1.0, 1.0, 0.0]),
    ],
)
def test_one_number_by_one_collective(two: Processes, reduction: str, expected: list[float]) -> None:
    (lines, collectives), other = two.run(logged, reduction)
    names = ["loss", "seen", "exact", "time", "right", "of/top5", "of/deep/er"]
    ((values, step),) = lines
    assert step == 7
    assert values == dict(zip(names, expected, strict=True))
    assert other == ([], 1)
    assert collectives == 1


def different(how: str) -> str:
    accelerator = Accelerator(cpu=True, log_with=Kept())
    accelerator.init_trackers("run")
    second = accelerator.process_index == 1
    values: dict[str, Any] = {"loss": 1.0, "extra" if second else "only": 2.0}
    if how == "text":
        values = {"loss": 1.0, "note": "text" if second else 2.0}
    if how == "vector":
        values = {"loss": torch.ones(2) if second else torch.ones(())}
    kind = ShapeMismatch if how == "names" else SettingError
    with pytest.raises(kind) as caught:
        accelerator.log(values, reduce="mean")
    accelerator.log({"loss": 1.0}, reduce="mean")
    return str(caught.value)


def test_other_names_are_an_error_on_every_process_that_lists_them(two: Processes) -> None:
    for message in two.run(different, "names"):
        assert "process 0: only; process 1: extra" in message


@pytest.mark.parametrize(("how", "name"), [("text", "note"), ("vector", "loss")])
def test_what_is_no_number_is_an_error_on_every_process(two: Processes, how: str, name: str) -> None:
    for message in two.run(different, how):
        assert f"'{name}' (process 1)" in message


def only_the_main_process_has_trackers() -> bool:
    accelerator = Accelerator(cpu=True, log_with=Kept())
    if accelerator.is_main_process:
        accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0}, reduce="mean")
    return True


def test_trackers_may_be_started_on_the_main_process_alone(two: Processes) -> None:
    assert two.run(only_the_main_process_has_trackers) == [True, True]


def test_alone_and_an_unknown_reduction() -> None:
    with fresh():
        kept = Kept()
        accelerator = Accelerator(cpu=True, log_with=kept)
        accelerator.init_trackers("run")
        accelerator.log({"loss": torch.tensor(2.0), "steps": 3}, step=1, reduce="mean")
        accelerator.log({}, reduce="sum")
        assert kept.lines == [({"loss": 2.0, "steps": 3.0}, 1), ({}, None)]
        with pytest.raises(SettingError, match="Choose from mean, sum, min, max"):
            accelerator.log({"loss": 1.0}, reduce="median")
        assert len(kept.lines) == 2


def test_a_tracker_by_name_before_any_was_started_keeps_nothing() -> None:
    with fresh():
        accelerator = Accelerator(cpu=True)
        accelerator.get_tracker("tensorboard").log({"loss": 1.0})
        with pytest.raises(SettingError, match="no such tracker"):
            Accelerator(cpu=True, log_with="no such tracker")
        kept = Accelerator(cpu=True, log_with=Kept())
        kept.init_trackers("run")
        assert kept.get_tracker("kept").lines == []
        with pytest.raises(SettingError, match="tensorboard"):
            kept.get_tracker("tensorboard")


class Full(Kept):
    """Stands before a disk without room."""

    name = "full"

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        raise OSError("no space left on device")


def test_a_tracker_that_fails_stops_a_run_only_where_that_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with fresh():
        accelerator = Accelerator(cpu=True, log_with=Full())
        accelerator.init_trackers("run")
        for step in range(3):
            accelerator.log({"loss": 1.0}, step=step)
        assert [message.partition(".")[0] for message in caplog.messages] == ["The tracker 'full' failed in log"]
        accelerator.end_training()
        assert "The tracker 'full' failed 3 times in this run" in caplog.text
        accelerator.init_trackers("run", strict=True)
        with pytest.raises(OSError, match="no space left"):
            accelerator.log({"loss": 1.0})
