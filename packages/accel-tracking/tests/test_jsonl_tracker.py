from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel_state.errors import NotReady, SettingError
from accel_tracking import JSONLinesTracker, read_run
from accel_tracking.trackers.jsonl import read_runs


def started(folder: Path, **options: Any) -> JSONLinesTracker:
    tracker = JSONLinesTracker("run", folder, **options)
    tracker.start()
    return tracker


def test_read_run_returns_the_logged_values(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.store_init_configuration({"lr": 0.1, "path": Path("x"), "layers": (1, 2)})
    tracker.log({"loss": 0.5, "eval": {"top1": 3}, "note": "first"}, step=10)
    tracker.log({"loss": 0.25}, step=20)
    tracker.log_table("worst", columns=["image", "loss"], data=[[3, 0.5]], step=20)
    tracker.finish()
    run = read_run(tmp_path)
    assert run.name == "run"
    assert run.config == {"lr": 0.1, "path": "x", "layers": [1, 2]}
    assert [record.step for record in run.records] == [10, 20, 20]
    assert run.records[2].table == {"name": "worst", "columns": ["image", "loss"], "rows": [[3, 0.5]]}
    assert run.curves() == {"loss": [(10, 0.5), (20, 0.25)], "eval/top1": [(10, 3)]}
    assert run.finished
    assert run.damaged == 0
    first = json.loads(run.path.read_text().splitlines()[0])
    assert first["config"]["lr"] == 0.1
    assert run.started <= run.records[0].time <= run.records[1].time


def test_tensors_and_numpy_scalars_are_logged(tmp_path: Path) -> None:
    torch, np = pytest.importorskip("torch"), pytest.importorskip("numpy")
    tracker = started(tmp_path)
    tracker.log(
        {"a": torch.tensor(0.5, dtype=torch.bfloat16), "b": np.float32(2), np.int64(3): torch.ones(2)},
        step=torch.tensor(4),
    )
    tracker.finish()
    (record,) = read_run(tmp_path).records
    assert record.values == {"a": 0.5, "b": 2.0, "3": [1.0, 1.0]}
    assert record.step == 4


def test_nan_and_infinity_are_valid_json(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    for value in (math.nan, math.inf, -math.inf, 1.0):
        tracker.log({"loss": value})
    tracker.finish()

    def no_constants(text: str) -> None:
        raise AssertionError(text)

    for line in read_run(tmp_path).path.read_text().splitlines():
        json.loads(line, parse_constant=no_constants)
    points = read_run(tmp_path).curves()["loss"]
    assert [step for step, _ in points] == [0, 1, 2, 3]
    assert math.isnan(points[0][1])
    assert [value for _, value in points[1:]] == [math.inf, -math.inf, 1.0]


def test_each_run_has_its_own_file_and_read_run_takes_the_newest(tmp_path: Path) -> None:
    trackers = [started(tmp_path) for _ in range(3)]
    paths = [tracker.tracker.path for tracker in trackers]
    assert len(set(paths)) == 3
    for number, age in enumerate((2, 3, 1)):
        trackers[number].finish()
        os.utime(paths[number], ns=(age, age))
    assert read_run(tmp_path).path == paths[1]


@pytest.mark.parametrize(("name", "folder"), [("a/b:c", "a_b_c"), ("..", "run"), ("", "run"), ("mnist 2", "mnist 2")])
def test_the_name_of_a_run_becomes_one_folder(tmp_path: Path, name: str, folder: str) -> None:
    tracker = JSONLinesTracker(name, tmp_path)
    tracker.start()
    tracker.finish()
    assert [path.name for path in tmp_path.iterdir()] == [folder]


def attempt(folder: Path, launch: str, steps: range, loss: float, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a run that a launcher started, and that does not reach its end."""
    monkeypatch.setenv("ACCEL_STATUS_FOLDER", f"/dev/shm/{launch}/status")
    tracker = JSONLinesTracker("digits", folder)
    tracker.start()
    for step in steps:
        tracker.log({"loss": loss}, step=step)
    return tracker.tracker.path


def test_the_attempts_of_a_restarted_run_are_one_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = attempt(tmp_path, "accel-launch-1", range(6), 0.5, monkeypatch)
    other = attempt(tmp_path, "accel-launch-2", range(9), 0.1, monkeypatch)
    # From a checkpoint of step 4.
    second = attempt(tmp_path, "accel-launch-1", range(4, 8), 0.2, monkeypatch)
    for number, path in enumerate((first, other, second)):
        os.utime(path, (number, number))
    run = read_run(tmp_path)
    assert run.path == second
    assert run.curves() == {"loss": [(step, 0.5 if step < 4 else 0.2) for step in range(8)]}
    assert [one.launch for one in read_runs(tmp_path)] == ["accel-launch-2", "accel-launch-1"]
    assert len(read_run(first).records) == 6


def test_files_of_other_programs_are_no_runs(tmp_path: Path) -> None:
    tracker = JSONLinesTracker("digits", tmp_path)
    tracker.start()
    tracker.log({"loss": 0.5}, step=1)
    (tmp_path / "goodput").mkdir()
    # What a launch with a project folder writes beside the curves, later.
    for name in ("goodput/rank_0.jsonl", "goodput/launcher_0.jsonl", "failures.jsonl"):
        (tmp_path / name).write_text('{"event": "start", "time": 1.0}\n')
    assert read_run(tmp_path).path == tracker.tracker.path


def test_flush_every_is_the_number_of_lines_of_one_write(tmp_path: Path) -> None:
    tracker = started(tmp_path / "now")
    tracker.log({"a": 1})
    assert len(read_run(tmp_path / "now").records) == 1
    later = started(tmp_path / "later", flush_every=3)
    for number in range(1, 5):
        later.log({"a": number})
        assert len(read_run(tmp_path / "later").records) == 3 * (number // 3)
    later.finish()
    assert len(read_run(tmp_path / "later").records) == 4
    tracker.finish()


def test_a_killed_process_loses_no_line(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom accel_tracking import JSONLinesTracker\n"
        "tracker = JSONLinesTracker('run', sys.argv[1]); tracker.start()\n"
        "for step in range(7): tracker.log({'step': step}, step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=250, check=False)
    assert done.returncode == -signal.SIGKILL
    run = read_run(tmp_path)
    assert len(run.records) == 7
    assert not run.finished


def test_a_full_disk_loses_lines_and_damages_none(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    tracker = started(tmp_path)
    tracker.log({"text": "x" * 100}, step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            tracker.log({"text": "y" * 1000}, step=2)
        tracker.log({"text": "z"}, step=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    tracker.log({"text": "z" * 1000}, step=4)
    tracker.finish()
    run = read_run(tmp_path)
    assert run.damaged == 0
    assert [record.step for record in run.records] == [1, 3, 4]


def test_a_line_that_a_crash_cut_off_is_counted_and_skipped(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log({"a": 1}, step=1)
    tracker.log({"a": 2}, step=2)
    tracker.finish()
    path = read_run(tmp_path).path
    path.write_text(path.read_text()[:-60])
    run = read_run(path)
    assert run.damaged == 1
    assert not run.finished
    assert [record.step for record in run.records] == [1]


def test_a_later_configuration_is_merged(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.store_init_configuration({"lr": 0.1, "seed": 1})
    tracker.log({"a": 1})
    tracker.store_init_configuration({"lr": 0.2})
    tracker.finish()
    assert read_run(tmp_path).config == {"lr": 0.2, "seed": 1}


def test_logging_before_start_and_after_finish_is_an_error(tmp_path: Path) -> None:
    tracker = JSONLinesTracker("run", tmp_path)
    with pytest.raises(NotReady, match="not started"):
        tracker.log({"a": 1})
    tracker.start()
    tracker.finish()
    tracker.finish()
    with pytest.raises(NotReady, match="finished"):
        tracker.log({"a": 1})
    with pytest.raises(SettingError, match="flush_every=0"):
        JSONLinesTracker("run", tmp_path, flush_every=0)


def test_read_run_refuses_other_files_and_formats(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"contains no \.jsonl file"):
        read_run(tmp_path)
    with pytest.raises(SettingError, match="The system cannot read it"):
        read_run(tmp_path / "missing.jsonl")
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(SettingError, match="format 1"):
        read_run(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"run": "later", "format": 2, "time": 1}\n')
    with pytest.raises(SettingError, match="format 1"):
        read_run(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["run", "step", "values", "table", "time", "a"]), inner)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(documents=st.lists(JSON, max_size=5), texts=st.lists(st.text(max_size=20), max_size=2))
@example(documents=[{"time": 10**400}, {"time": 1, "step": 10**400, "values": {}}, {"time": math.nan}], texts=["{"])
def test_read_run_keeps_good_records_between_any_other_lines(
    tmp_path_factory: pytest.TempPathFactory, documents: list[Any], texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "run.jsonl"
    head, *good = ({"run": "r", "format": 1, "time": 1.0}, {"time": 2, "values": {"loss": 3}}, {"time": 4, "end": 1})
    others = [*(json.dumps(document) for document in documents), *texts]
    lines = [json.dumps(head), *others, json.dumps(good[0]), *others, json.dumps(good[1])]
    path.write_bytes("\n".join(lines).encode("utf-8", errors="surrogatepass"))
    run = read_run(path)
    assert [record.time for record in run.records if "loss" in record.values] == [2]
    assert [value for _, value in run.curves()["loss"]] == [3]
    assert run.finished
    no_object = 2 * sum(not isinstance(document, dict) for document in documents)
    assert no_object <= run.damaged <= 2 * (len(documents) + sum(len(text.splitlines()) for text in texts))


@pytest.mark.parametrize("time", [10**400, math.inf, "1", None, True])
def test_read_run_counts_a_line_without_a_finite_time_as_damaged(tmp_path: Path, time: Any) -> None:
    lines = [{"run": "r", "format": 1, "time": 1}, {"time": time, "values": {"a": 1}}, {"time": 2, "step": 10**400}]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(json.dumps({**line, "values": {}}) for line in lines))
    run = read_run(path)
    assert run.damaged == 1
    assert [(record.time, record.step) for record in run.records] == [(1.0, None), (2.0, None)]
