"""A profiled block: a trace for each process, and one table of all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accel_state.errors import SettingError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, ProfileKwargs, ProfilerActivity
from accel_torch.profile import summary

# The profiler says on stderr what it does, and torch warns of kernels that it does not find.
pytestmark = pytest.mark.filterwarnings("ignore")


def profiled(folder: str) -> int:
    accelerator = Accelerator(cpu=True)
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=folder)) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    return next(event.count for event in profiler.key_averages() if event.key == "aten::mm")


def test_each_process_leaves_a_trace_and_one_the_table(two: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "traces"
    assert two.run(profiled, str(folder)) == [1, 1]
    assert sorted(path.name for path in folder.iterdir()) == ["profile_0.json", "profile_1.json", "profile_summary.txt"]
    for rank in range(2):
        events = json.loads((folder / f"profile_{rank}.json").read_text())["traceEvents"]
        assert any(event.get("name") == "aten::mm" for event in events)
    table = (folder / "profile_summary.txt").read_text().splitlines()
    assert table[0].split() == ["mean", "ms", "longest", "ms", "on", "process", "calls", "operation"]
    assert any(line.endswith(" aten::mm") for line in table)


def test_a_schedule_and_what_is_called_when_a_cycle_is_done() -> None:
    ready: list[int] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=lambda profiler: ready.append(profiler.step_num),
    )
    with fresh():
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        assert accelerator.profile_handler is handler
        with accelerator.profile() as profiler:
            for _ in range(6):
                torch.ones(2, 2) @ torch.ones(2, 2)
                profiler.step()
    assert ready == [4]


def test_nothing_is_written_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with fresh(), Accelerator(cpu=True).profile():
        torch.ones(2) + 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"activities": ["gpu"]}, "no activity 'gpu'.*cpu, xpu, mtia, cuda, hpu"),
        ({"schedule_option": {"wait": 1}}, "Add 'active'"),
    ],
)
def test_what_cannot_be_profiled(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(SettingError, match=f"(?s){says}"):
        ProfileKwargs(**wrong)  # type: ignore[arg-type]


def test_profiler_activities_equal_their_names() -> None:
    assert [str(activity) for activity in ProfilerActivity] == ["cpu", "xpu", "mtia", "cuda", "hpu"]
    assert ProfilerActivity("cpu") == "cpu"


def test_the_table_names_the_process_that_took_longest() -> None:
    lines = summary([{"a": (1, 2.0), "b": (1, 9.0)}, {"a": (3, 6.0)}]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["4.500", "9.000", "0", "1", "b"],
        ["4.000", "6.000", "1", "3", "a"],
    ]
