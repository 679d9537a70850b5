"""`accel runs status` of real launches: every state of a process, named from outside while it lasts.

The script of these launches does what a file tells each of its processes, so that one launch shows many states.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from accel_state.proc import environment_of
from accel_testing.processes import Finished, ReservedPort, run_command
from accel_testing.simulated_device import POSSIBLE

ACCEL = (sys.executable, "-m", "accel_cli.main")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

JOB = """
    import ctypes, os, signal, socket, sys, threading, time
    from pathlib import Path

    # A launch in which one process died asks the others to end, and they are to be looked at meanwhile.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    rank = os.environ.get("RANK", "0")

    def wait_for(name):
        while not Path(name).exists():
            time.sleep(0.02)

    if Path("imports").exists() and rank == "1":
        import slow
    import torch
    from accel_torch import Accelerator

    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir="output", check_replicas_every=0)
    accelerator.init_trackers("curves")
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def gather():
        accelerator.gather(torch.ones(1))

    def steps():
        for _ in range(20):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": 0.5})
            time.sleep(0.1)

    def spin():
        released = []
        threading.Thread(target=lambda: (wait_for(f"released{rank}"), released.append(1))).start()
        while not released: pass

    def read():
        Path("pipe").read_text()

    def hold():
        # PyDLL keeps the lock of Python while the call lasts.
        gate = socket.socket(socket.AF_UNIX)
        gate.connect("gate")
        ctypes.PyDLL(None).recv(gate.fileno(), ctypes.create_string_buffer(1), 1, 0)

    def save():
        wait_for(f"released{rank}") if rank == "1" else None
        accelerator.save_state("output/checkpoint")

    def load():
        wait_for(f"released{rank}") if rank == "1" else None
        accelerator.load_state("output/checkpoint")

    def leave():
        sys.exit()

    number = 0
    while True:
        wait_for(f"task{rank}.{number}")
        task = Path(f"task{rank}.{number}").read_text()
        number += 1
        globals()[task]()
        Path(f"done{rank}.{number}").touch()
"""

ON_A_DEVICE = """
    import time
    from pathlib import Path

    import torch
    from accel_testing.simulated_device import simulated_device
    from accel_torch import Accelerator

    with simulated_device():
        held = torch.ones(3, 2**18, device=Accelerator().device)
        while not Path("end").exists():
            time.sleep(0.02)
"""

WAITS_TO_IMPORT = "import time, os\nwhile not os.path.exists('imported'):\n    time.sleep(0.05)\n"

LINES = textwrap.dedent(JOB).splitlines()


def at(text: str, path: str = "job.py") -> str:
    """Where a line of the script is."""
    (line,) = [number for number, content in enumerate(LINES, 1) if text in content]
    return f"{path}:{line}"


class Job:
    """A launch in the background, whose processes follow commands."""

    def __init__(self, folder: Path, *options: str, ranks: int = 2, script: str = JOB) -> None:
        self.folder = folder
        self.tasks = [0] * ranks
        (folder / "temporary").mkdir(exist_ok=True)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ACCEL", "RANK", "LOCAL_"))},
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "temporary"),
        }
        (folder / "job.py").write_text(textwrap.dedent(script), encoding="utf-8")
        os.mkfifo(folder / "pipe")
        self.process = self.launch(*options)

    def launch(self, *options: str) -> subprocess.Popen[bytes]:
        """Start a launcher, whose output is for whoever looks at a failed test."""
        with open(self.folder / "output.txt", "ab") as output:
            return self._started(options, output)

    def _started(self, options: tuple[str, ...], output: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*ACCEL, "launch", "--hang_report_after", "0", "--grace_period", "60", *options, "job.py"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def do(self, rank: int, task: str) -> None:
        """Let a process do something."""
        path = self.folder / f"task{rank}.{self.tasks[rank]}"
        (self.folder / "partial").write_text(task, encoding="utf-8")
        os.replace(self.folder / "partial", path)
        self.tasks[rank] += 1

    def release(self, *ranks: int) -> None:
        """Let processes go on, and wait until they have handled it."""
        for rank in ranks:
            (self.folder / f"released{rank}").touch()
        for rank in ranks:
            until(lambda rank=rank: (self.folder / f"done{rank}.{self.tasks[rank]}").exists())
            (self.folder / f"released{rank}").unlink()

    def status(self, *arguments: object, run: object = None) -> Finished:
        """What the command says."""
        named = str(self.process.pid if run is None else run)
        command = [*ACCEL, "runs", "status", named, *map(str, arguments)]
        return run_command(command, timeout=250, env=self.environment, cwd=self.folder)

    def look(self, *arguments: str, run: object = None) -> dict[str, Any]:
        """What the command says in JSON."""
        done = self.status("--json", *arguments, run=run)
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    def until(self, rank: int, **expected: object) -> dict[str, Any]:
        """What the command says of a process, as soon as it says this."""
        deadline = time.monotonic() + 250
        # A launcher that has just started is not a run yet.
        until(lambda: self.status().returncode == 0)
        while True:
            said = self.look()
            found = [one for one in said["processes"] if one["rank"] == rank]
            if found and expected.items() <= found[0].items():
                return {**said, "process": found[0]}
            assert time.monotonic() < deadline, said
            time.sleep(0.2)

    def end(self) -> None:
        """End the launch with all its processes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 250
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A launch of two processes that train."""
    job = Job(tmp_path_factory.mktemp("job"), "--cpu", "--num_processes", "2")
    try:
        for rank in (0, 1):
            job.until(rank, state="running", at=at("time.sleep(0.02)"))
            job.do(rank, "steps")
        job.release(0, 1)
        yield job
    finally:
        job.end()


def test_a_process_between_steps_has_its_step_pace_and_memory(job: Job) -> None:
    said = job.look()
    assert said["world_size"] == 2
    assert said["launcher"] == job.process.pid
    assert [one["rank"] for one in said["processes"]] == [0, 1]
    for one in said["processes"]:
        assert one["state"] == "in step"
        assert one["steps"] >= 20
        assert 0 < one["steps_per_second"] < 20
        assert one["memory"] > 50 * 2**20
        assert one["device_memory"] is None
        assert one["at"] == at("time.sleep(0.02)")
    assert said["held_up_by"] == []


def test_a_collective_has_its_call_site_and_the_ranks_that_hold_it_up(job: Job) -> None:
    job.do(0, "gather")
    try:
        job.until(0, state="in collective", operation="gather", at=at("accelerator.gather("))
        said = job.until(0, state="in collective")
        while not said["held_up_by"]:
            said = job.until(0, state="in collective")
        assert said["held_up_by"] == [1]
        assert said["process"]["seconds"] >= 2
        assert "The others wait for rank 1." in job.status().stdout
    finally:
        job.do(1, "gather")
        job.release(0, 1)


def test_a_loop_in_python_has_its_line(job: Job) -> None:
    job.do(1, "spin")
    try:
        job.until(1, state="in step", at=at("while not released: pass"))
        job.until(0, state="in step", at=at("time.sleep(0.02)"))
    finally:
        job.release(1)


def test_a_stopped_process_has_the_state_stopped(job: Job) -> None:
    pid = job.look()["processes"][1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        found = job.until(1, state="stopped", pid=pid)["process"]
        assert found["at"].startswith("job.py:")
        assert f"stopped at {found['at']}" in job.status().stdout
    finally:
        os.kill(pid, signal.SIGCONT)
    job.until(1, state="in step")


def test_a_process_that_reads_a_file_has_its_line(job: Job) -> None:
    job.do(1, "read")
    try:
        job.until(1, at=at('Path("pipe")'))
    finally:
        with open(job.folder / "pipe", "w", encoding="utf-8"):
            pass
        job.release(1)


def test_a_process_in_native_code_that_holds_the_lock_of_python_is_silent_and_has_its_line(job: Job) -> None:
    with socket.socket(socket.AF_UNIX) as gate:
        gate.bind(str(job.folder / "gate"))
        gate.listen()
        job.do(1, "hold")
        held, _ = gate.accept()
        with held:
            found = job.until(1, state="silent")["process"]
            assert found["at"] == at("ctypes.PyDLL(None).recv")
    job.release(1)
    job.until(1, state="in step")


def test_a_process_that_saves_has_the_state_saving_and_the_line_that_saves(job: Job) -> None:
    job.do(0, "save")
    job.do(1, "save")
    try:
        found = job.until(0, state="saving")["process"]
        assert found["at"] == at("accelerator.save_state(")
    finally:
        job.release(1)
        job.release(0)


def test_processes_write_their_stacks(job: Job) -> None:
    for one in job.look("--stacks")["processes"]:
        assert (
            f'File "{job.folder}/job.py", line {at("time.sleep(0.02)").partition(":")[2]} in wait_for' in one["stack"]
        )
    text = job.status("--stacks").stdout
    assert text.count("most recent call first") >= 2


def test_a_process_that_loads_has_the_state_loading_and_the_line_that_loads(job: Job) -> None:
    job.do(0, "save")
    job.do(1, "save")
    job.release(1)
    job.release(0)
    job.do(0, "load")
    job.do(1, "load")
    try:
        found = job.until(0, state="loading")["process"]
        assert found["at"] == at("accelerator.load_state(")
    finally:
        job.release(1)
        job.release(0)


@pytest.mark.parametrize("name", ["output", ".", "pid of a process"])
def test_a_run_is_named_by_its_folder_or_by_a_process(job: Job, name: str) -> None:
    run = str(job.look()["processes"][0]["pid"]) if name == "pid of a process" else name
    assert job.look(run=run)["launcher"] == job.process.pid


@pytest.mark.parametrize("name", ["output", "pid"])
def test_the_curves_of_a_run_are_shown_by_the_same_name(job: Job, name: str) -> None:
    run = str(job.process.pid) if name == "pid" else name
    done = run_command([*ACCEL, "runs", "show", run, "--text"], env=job.environment, cwd=job.folder)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
    assert "curves" in done.stdout


def test_only_the_user_can_enter_the_folder_of_a_run(job: Job) -> None:
    status = Path(environment_of(job.look()["processes"][0]["pid"])["ACCEL_STATUS_FOLDER"])
    assert {folder.stat().st_mode & 0o777 for folder in (status, status.parent)} == {0o700}
    files = list(status.glob("*.status"))
    assert len(files) == 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_watch_shows_a_run_until_it_ends_and_a_killed_process_as_dead(tmp_path: Path) -> None:
    job = Job(tmp_path, "--cpu", "--num_processes", "2")
    try:
        for rank in (0, 1):
            job.until(rank, state="running", at=at("time.sleep(0.02)"))
        watching = subprocess.Popen(
            [*ACCEL, "runs", "status", str(job.process.pid), "--watch", "--json"],
            env=job.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watching.stdout is not None
        shown = [watching.stdout.readline() for _ in range(2)]
        os.kill(job.look()["processes"][1]["pid"], signal.SIGKILL)
        assert job.until(1, state="dead")["process"]["at"].startswith("job.py:")
        job.process.kill()
        output, _ = watching.communicate(timeout=250)
        assert watching.returncode == 0
        assert {json.loads(line)["launcher"] for line in [*shown, *output.splitlines()]} == {job.process.pid}
    finally:
        job.end()


def test_a_process_that_imports_and_one_that_waits_for_it_have_their_states(tmp_path: Path) -> None:
    (tmp_path / "imports").touch()
    (tmp_path / "slow.py").write_text(WAITS_TO_IMPORT, encoding="utf-8")
    job = Job(tmp_path, "--cpu", "--num_processes", "2")
    try:
        found = job.until(1, state="importing")["process"]
        assert found["at"] in ("slow.py:2", "slow.py:3")
        found = job.until(0, state="waiting for others")["process"]
        assert found["at"] == at("Accelerator(cpu=True")
        (tmp_path / "imported").touch()
        job.until(0, state="running", at=at("time.sleep(0.02)"))
        job.do(0, "leave")
        assert job.until(0, state="finished")["world_size"] == 2
    finally:
        job.end()


def test_a_single_process_and_the_message_after_it_has_finished(tmp_path: Path) -> None:
    job = Job(tmp_path, "--cpu", "--num_processes", "1", ranks=1)
    try:
        job.until(0, state="running", at=at("time.sleep(0.02)"))
        job.do(0, "steps")
        found = job.until(0, state="in step", steps=20)["process"]
        assert found["steps_per_second"] > 0
        job.do(0, "leave")
        job.process.wait(timeout=250)
        done = job.status()
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("\n") == 1
        assert f"Process {job.process.pid} has ended, or never existed on this machine. " in done.stderr
        done = job.status(run=".")
        assert done.returncode == 1
        assert "No run writes to '.' now: it has finished, or runs on another machine. " in done.stderr
    finally:
        job.end()


@pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have a device written in Python")
def test_the_memory_of_a_device_is_shown_beside_that_of_the_host(tmp_path: Path) -> None:
    job = Job(tmp_path, "--num_processes", "1", ranks=1, script=ON_A_DEVICE)
    try:
        found = job.until(0, device_memory=3 * 2**20)["process"]
        assert found["memory"] > 50 * 2**20
        head, row = job.status().stdout.splitlines()[1:3]
        assert head.split()[-3:] == ["memory", "device", "memory"]
        assert row.endswith("  3 MiB")
    finally:
        job.end()


@pytest.mark.slow
def test_processes_of_another_machine_are_read_from_the_store(tmp_path: Path) -> None:
    port = ReservedPort()
    place = ("--cpu", "--num_processes", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1")
    place = (*place, "--main_process_port", str(port.reserve()), "--machine_rank")
    (tmp_path / "imports").touch()
    (tmp_path / "slow.py").write_text(WAITS_TO_IMPORT, encoding="utf-8")
    job = Job(tmp_path, *place, "0")
    first, other = job.process, job.launch(*place, "1")
    try:
        # The process of the other machine has not reached its Accelerator yet.
        job.until(0, state="waiting for others")
        job.until(1, state="unknown", host="", pid=0)
        assert "1     ?" in job.status().stdout
        (tmp_path / "imported").touch()
        said = job.until(1, state="running", at=at("time.sleep(0.02)"))
        assert said["store_answers"]
        assert said["world_size"] == 2
        job.do(0, "gather")
        job.process = other
        job.until(0, state="in collective", operation="gather", at=at("accelerator.gather("))
        # The launcher of the first machine hosts the store.
        pid = job.look(run=first.pid)["processes"][0]["pid"]
        for stopped in (first.pid, pid):
            os.kill(stopped, signal.SIGSTOP)
        silent = job.until(0, state="silent", operation="gather")
        while silent["store_answers"]:
            silent = job.until(0, state="silent", operation="gather")
        assert silent["processes"][1]["at"] == at("time.sleep(0.02)")
        assert "The store of the run does not answer" in job.status().stdout
    finally:
        port.release()
        for launcher in (job.process, first, other):
            launcher.kill()
            launcher.wait()
