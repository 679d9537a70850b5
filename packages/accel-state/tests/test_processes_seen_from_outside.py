"""Finding runs of launchers, and reading what the system and a stack say of their processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_state import PartialState
from accel_state.errors import NoAccess, NotFound, SettingError
from accel_state.proc import process_info, processor_seconds, state_of
from accel_state.process import wait_for_everyone
from accel_state.watch import runs
from accel_state.watch.calls import IMPORT, Location, UserFrame, locate, main_thread_frame
from accel_state.watch.record import STATUS_FOLDER, StatusRecord
from accel_state.watch.runs import (
    PREFIX,
    LaunchedRun,
    announce_run,
    find_run,
    make_launch_folder,
    remove_launch_folder,
    running_runs,
)
from accel_state.watch.stacks import user_frame_in
from accel_state.watch.status import World, read_world, request_world
from accel_testing.processes import Processes

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, in which no other run is; runs beside the tests may write anywhere."""
    monkeypatch.setattr(runs, "PLACES", (str(tmp_path), str(tmp_path)))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def announced(temporary: Path) -> str:
    folder = make_launch_folder()
    assert os.path.dirname(folder) == str(temporary)
    return announce_run(folder)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user that no launcher started."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def mine() -> list[str]:
    """Folders of the runs whose launcher is this process."""
    return [run.status_folder for run in running_runs() if run.pid == os.getpid()]


def test_a_run_is_found_by_the_pid_of_its_launcher_and_by_the_folder_it_was_started_in(temporary: Path) -> None:
    status = announced(temporary)
    assert mine() == [status]
    assert find_run(str(os.getpid())).status_folder == status
    assert find_run(os.getcwd()).status_folder == status


LAUNCHER = """
import sys, time
from accel_state.watch import runs
runs.PLACES = (sys.argv[1], sys.argv[1])
folder = runs.make_launch_folder()
if sys.argv[2] == "announces":
    runs.announce_run(folder)
print(folder, flush=True)
time.sleep(600)
"""


@pytest.fixture
def launcher(temporary: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], Path]]]:
    """Start a process that has a folder as a launcher, and return both."""
    started = []

    def start(how: str) -> tuple[subprocess.Popen[str], Path]:
        command = [sys.executable, "-c", LAUNCHER, str(temporary), how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().rstrip())

    yield start
    for process in started:
        process.kill()
        process.communicate()


@on_linux
@pytest.mark.parametrize("how", ["announces", "is killed before"])
def test_the_folder_of_a_killed_launcher_is_removed_by_the_next_launch_and_by_a_reader(launcher: Any, how: str) -> None:
    _, living = launcher(how)
    for look in (runs.remove_abandoned_folders, running_runs):
        killed, folder = launcher(how)
        look()
        assert folder.is_dir()
        killed.kill()
        killed.wait()
        look()
        assert not folder.exists()
    assert living.is_dir()


@on_linux
def test_a_process_with_the_pid_of_a_killed_launcher_is_no_run(launcher: Any) -> None:
    killed, folder = launcher("announces")
    # Somebody else has the number now, and the folder is still there.
    told = json.loads((folder / "status" / "run.json").read_text())
    (folder / "status" / "run.json").write_text(json.dumps({**told, "pid": os.getpid()}))
    assert mine() == [str(folder / "status")]
    killed.kill()
    killed.wait()
    assert mine() == []


@on_linux
def test_a_run_of_another_container_is_not_shown_and_not_removed(temporary: Path) -> None:
    status = Path(announced(temporary))
    told = json.loads((status / "run.json").read_text())
    (status / "run.json").write_text(json.dumps({**told, "namespace": "pid:[1]"}))
    assert mine() == []
    assert status.is_dir()


@on_linux
def test_a_launcher_whose_folder_is_removed_before_it_is_locked_takes_another(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []

    def mkdir(path: str, mode: int) -> None:
        create(path, mode)
        if not removed:
            # Here a reader looks, in another process.
            code = f"from accel_state.watch import runs; runs.PLACES = ({str(temporary)!r},) * 2; runs.running_runs()"
            subprocess.run([sys.executable, "-c", code], check=True, timeout=250)
            removed.append(path)

    create = os.mkdir
    monkeypatch.setattr(os, "mkdir", mkdir)
    folder = make_launch_folder()
    assert removed
    assert removed[0] != folder
    assert os.listdir(temporary) == [os.path.basename(folder)]
    remove_launch_folder(folder)
    assert os.listdir(temporary) == []


@on_linux
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_keep_the_folder_of_its_parent(temporary: Path) -> None:
    code = """if True:
        import os, sys, time
        from accel_state.watch import runs
        runs.PLACES = (sys.argv[1], sys.argv[1])
        runs.make_launch_folder()
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            time.sleep(600)
        os._exit(0)
    """
    with subprocess.Popen([sys.executable, "-c", code, str(temporary)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.wait()
            assert len(os.listdir(temporary)) == 1
            runs.remove_abandoned_folders()
            assert os.listdir(temporary) == []
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": -1}', '{"pid": "1", "folder": 3}'])
def test_folders_with_other_contents_are_not_runs(temporary: Path, content: str) -> None:
    status = Path(announced(temporary))
    (status / "run.json").write_text(content)
    assert mine() == []


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_a_folder_that_other_users_can_enter_is_not_a_run(temporary: Path) -> None:
    status = Path(announced(temporary))
    status.parent.chmod(0o750)
    assert mine() == []


@pytest.mark.skipif(os.name != "posix", reason="links")
def test_a_link_to_a_folder_is_not_a_run(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    elsewhere.chmod(0o700)
    announce_run(str(elsewhere))
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    assert mine() == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives a folder away")
def test_a_folder_of_another_user_is_not_a_run(temporary: Path) -> None:
    status = Path(announced(temporary))
    os.chown(status.parent, 65534, 65534)
    assert mine() == []


def test_a_process_that_no_launcher_started_is_refused(temporary: Path, sleeper: subprocess.Popen[bytes]) -> None:
    with pytest.raises(NotFound, match=f"Process {sleeper.pid} does not belong to a run of `accel launch`"):
        find_run(str(sleeper.pid))


def test_a_process_that_has_ended_is_refused(temporary: Path, sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(NotFound, match="has ended, or never existed on this machine"):
        find_run(str(sleeper.pid))


@on_linux
def test_a_process_of_another_user_is_refused(temporary: Path) -> None:
    if os.geteuid() != 0:
        with pytest.raises(NoAccess, match="process 1 belongs to the user root, and only this user can see"):
            find_run("1")
        return
    other = subprocess.Popen(["sleep", "600"], user=65534, group=65534)
    try:
        with pytest.raises(NoAccess, match=f"Process {other.pid} belongs to the user .*, and only this user can see"):
            find_run(str(other.pid))
    finally:
        other.kill()
        other.wait()


def test_a_folder_in_which_no_run_writes_is_refused(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(NotFound, match="it has finished, or runs on another machine"):
        find_run(str(tmp_path_factory.mktemp("finished")))
    with pytest.raises(NotFound, match="'nowhere' is neither a folder nor a process id"):
        find_run("nowhere")


def test_a_folder_of_several_runs_is_refused_with_their_pids(temporary: Path, sleeper: subprocess.Popen[bytes]) -> None:
    status, other = (Path(announced(temporary)) for _ in range(2))
    told = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**told, "pid": sleeper.pid}))
    with pytest.raises(SettingError, match="2 runs write to") as raised:
        find_run(os.getcwd())
    assert str(sleeper.pid) in raised.value.remedy
    assert find_run(str(os.getpid())).status_folder == str(status)


@on_linux
def test_process_info_has_state_owner_and_memory() -> None:
    info = process_info(os.getpid())
    assert info is not None
    assert (info.state, info.owner) == ("alive", os.geteuid())
    assert info.memory > 2**20
    assert process_info(2**22 + 1) is None
    assert state_of(2**22 + 1) == "ended"


@on_linux
def test_processor_seconds_are_those_of_a_process_and_its_children() -> None:
    computes = "import time\nwhile time.process_time() < 0.5: pass"
    code = f"""if True:
        import subprocess, sys
        subprocess.run([sys.executable, "-c", {computes!r}], check=True)
        living = subprocess.Popen([sys.executable, "-c", {computes + chr(10) + "print(flush=True); time.sleep(600)"!r}])
        living.wait()
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        try:
            parent.stdout.readline()
            # Each counts in ticks of the clock.
            assert (processor_seconds(parent.pid) or 0.0) > 0.9
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    assert processor_seconds(2**22 + 1) is None


DUMP = """\
Thread 0x00007f403e7fc6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f406e404b80 [python] (most recent call first):
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "/venv/lib/python3.11/site-packages/torch/__init__.py", line 12 in <module>
  File "<frozen importlib._bootstrap>", line 1176 in _find_and_load
  File "/runs/of me/train.py", line 3 in <module>
  File "/venv/lib/python3.11/site-packages/accel_cli/launch/run_script.py", line 55 in main
  File "/venv/lib/python3.11/site-packages/accel_cli/launch/runner.py", line 29 in <module>
"""


def test_the_main_thread_is_found_in_a_stack_with_the_line_of_the_user() -> None:
    run = LaunchedRun(1, "", "/runs/of me", 0.0)
    assert user_frame_in(DUMP, run) == UserFrame(Location("train.py", 3), IMPORT)
    computes = re.sub(r".*<frozen importlib.*\n", "", DUMP)
    assert user_frame_in(computes, run) == UserFrame(Location("train.py", 3), "<module>")
    lines = computes.splitlines(keepends=True)
    assert user_frame_in("".join(lines[:4] + lines[5:]), run._replace(working_folder="/runs")) == UserFrame(
        Location("of me/train.py", 3), ""
    )
    assert user_frame_in(computes.replace("/runs/of me/train.py", "<string>"), run) is None
    assert user_frame_in("", run) is None


def test_the_pace_follows_from_the_steps_that_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    record, clock = StatusRecord(), 100.0
    monkeypatch.setattr("accel_state.watch.record.monotonic", lambda: clock)
    assert record.pace() == (0.0, 0.0)
    for steps in (4, 6, 6, 8):
        record.steps = steps
        pace = record.pace()
        clock += 0.5
    # Four steps between the first and the last moment at which a new one was seen, 1.5 s apart.
    assert pace == (pytest.approx(4 / 1.5), 101.5)
    assert record.pace() == pace


def test_an_activity_has_the_line_that_began_it() -> None:
    record = StatusRecord()
    assert record.activity is None
    with record.during("saving"), record.during("loading"):
        activity = record.activity
    assert activity is not None
    assert (activity.name, activity.code.co_filename) == ("loading", __file__)
    assert record.activity is None


def tell_of_others(folder: Path) -> World | None:
    state = PartialState(cpu=True)
    wait_for_everyone()
    heard = None
    if state.process_index == 0:
        request_world(str(folder), 0)
        deadline = time.monotonic() + 250
        while heard is None or not all(seen.has_stack for seen in heard.statuses.values()) or len(heard.statuses) < 2:
            assert time.monotonic() < deadline, heard
            heard = read_world(str(folder))
            time.sleep(0.05)
    wait_for_everyone()
    return heard


def test_one_process_writes_the_statuses_of_all_ranks(two: Processes, tmp_path: Path) -> None:
    heard, _ = two.run(tell_of_others, tmp_path, environment={STATUS_FOLDER: str(tmp_path)})
    assert heard.store_answers
    assert heard.statuses[1].operation == "wait_for_everyone"
    assert heard.statuses[1].memory > 0
    assert heard.ages[1] < 60


@pytest.mark.parametrize(
    "content", ["", "[]", '{"time": 1}', '{"time": 1, "read": 1, "store_answers": 1, "ranks": {"a": 3}}']
)
def test_files_with_other_contents_are_not_read_as_world_statuses(tmp_path: Path, content: str) -> None:
    (tmp_path / "world.json").write_text(content)
    assert read_world(str(tmp_path)) is None


def test_the_main_thread_is_where_the_users_code_calls_the_standard_library(tmp_path: Path) -> None:
    begun, looked, seen = tmp_path / "begun", tmp_path / "looked", []

    def look() -> None:
        while not begun.exists():
            time.sleep(0.01)
        seen.append(main_thread_frame())
        looked.touch()

    looking = threading.Thread(target=look)
    looking.start()
    waits = f"import os; open({str(begun)!r}, 'w').close()\nwhile not os.path.exists({str(looked)!r}): pass"
    line = sys._getframe().f_lineno + 1
    subprocess.run([sys.executable, "-c", waits], check=True)
    looking.join()
    assert seen == [UserFrame(locate(__file__, line), "")]
