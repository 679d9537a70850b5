"""The tests that every launcher must pass.

    class TestExample(LauncherSuite):
        launcher = "example"

The suite runs `accel launch --launcher NAME` in separate processes, as users do. Each process of a run locks a file
until it ends, so that the suite also finds orphans on other nodes; the folder of the test must be visible on every
node.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from accel_cli.config.resolved import label, resolve_settings
from accel_cli.launch.interface import Launcher, LaunchPlan, LaunchRequest, Machine, Script
from accel_cli.launch.launchers import LOCAL, find_launcher, launch_classes, load_launcher
from accel_cli.launch.request import check_request, decide, request_of
from accel_cli.launch.script import check_script
from accel_state.errors import SettingError
from accel_state.settings.environ import Given
from accel_state.settings.schema import settings_of

__all__ = ("LauncherSuite", "make_plan", "make_request", "prepare_launch", "run_and_stop")

JOB = """
import fcntl, json, os, signal, sys, threading, time

def main():
    folder, what, *arguments = sys.argv[1:]
    place = read_topology()
    lock = open(os.path.join(folder, f"lock{place.rank}"), "w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def write(name, content):
        partial = os.path.join(folder, f"{name}{place.rank}.partial")
        with open(partial, "w") as file:
            json.dump(content, file)
        os.replace(partial, os.path.join(folder, f"{name}{place.rank}.json"))

    def end(number, frame):
        write("signal", number)
        sys.exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)
    print(f"output of {place.rank}", flush=True)
    print(f"error of {place.rank}", file=sys.stderr, flush=True)
    write("started", {"place": place._asdict(), "arguments": arguments, "environment": dict(os.environ)})
    rank, _, code = what.partition(":")
    if what != "end":
        while not all(os.path.exists(os.path.join(folder, f"started{one}.json")) for one in range(place.world_size)):
            time.sleep(0.05)
        if rank == str(place.rank):
            sys.exit(int(code))
        while True:
            time.sleep(0.05)

if __name__ == "__main__":
    main()
"""

JOB_SCRIPT = Script("script", "job.py", ("--lr", "1e-3"))

Start = Callable[..., "subprocess.Popen[str]"]


class LauncherSuite:
    """Base class of a launcher's tests: subclass it in a test file, and set the attributes that differ.

    Attributes:
        launcher: name of the launcher.
        options: options of `accel launch` that start `processes` processes.
        processes: number of processes of a run.
        environ: variables of `accel launch`, in addition to those of the tests.
        patience: time limit in seconds for the start and for the end of a run.
        not_applicable: tests that do not apply to this launcher, by name, with the reason; they are skipped.
        topology: Python code of a function `read_topology`, for processes that do not get their rank from the variables
            that `accel_state.topology` reads.
    """

    launcher: ClassVar[str]
    options: ClassVar[Sequence[str]] = ("--cpu", "--num_processes=2")
    processes: ClassVar[int] = 2
    environ: ClassVar[dict[str, str]] = {}
    patience: ClassVar[float] = 150.0
    not_applicable: ClassVar[Mapping[str, str]] = {}
    topology: ClassVar[str] = "from accel_state.topology import read_topology"

    @pytest.fixture(autouse=True)
    def applicable(self, request: pytest.FixtureRequest) -> None:
        """Skip a test that the launcher declares as not applicable."""
        unknown = [name for name in self.not_applicable if not hasattr(self, name)]
        assert not unknown, f"not_applicable names no test of the suite: {unknown}"
        if request.node.name in self.not_applicable:
            pytest.skip(self.not_applicable[request.node.name])

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Folder into which the processes write; it must be visible on every node."""
        return tmp_path

    @pytest.fixture
    def start(self, folder: Path, applicable: None) -> Iterator[Start]:
        """Start a run in the background; `what` is "end", "wait", or rank and exit code such as "1:7"."""
        (folder / "job.py").write_text(f"{self.topology}\n{JOB}", encoding="utf-8")
        # Tests in the background may ignore interrupts, which the processes would inherit.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        started = []

        def run(what: str, *arguments: str, options: Sequence[str] = ()) -> subprocess.Popen[str]:
            words = [f"--launcher={self.launcher}", *self.options, *options]
            argv = [sys.executable, "-m", "accel_cli.main", "launch", *words, "job.py", str(folder), what, *arguments]
            pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            environ = {**os.environ, "SUITE_VARIABLE": "of the user", **self.environ}
            started.append(subprocess.Popen(argv, cwd=folder, env=environ, text=True, start_new_session=True, **pipes))
            return started[-1]

        yield run
        for process in started:
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=self.patience)

    def ended(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Run `accel launch` to its end; return exit code, standard output and standard error."""
        output, errors = process.communicate(timeout=self.patience)
        return process.returncode, output, errors

    def read(self, folder: Path, name: str) -> list[Any]:
        """Wait until every rank has written a file, and return their contents."""
        deadline = time.monotonic() + self.patience
        paths = [folder / f"{name}{rank}.json" for rank in range(self.processes)]
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, f"only {sorted(os.listdir(folder))}"
            time.sleep(0.05)
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def alive(self, folder: Path) -> list[int]:
        """Ranks with running processes."""
        ranks = []
        for rank in range(self.processes):
            with open(folder / f"lock{rank}", "w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    ranks.append(rank)
        return ranks

    def test_the_manifest_is_read_without_torch(self) -> None:
        """Manifest, settings and requirements load without torch."""
        program = (
            "import sys; from accel_cli.launch.launchers import find_launcher, launcher_settings\n"
            f"find_launcher({self.launcher!r}, 'test'); launcher_settings(); assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=self.patience)
        assert find_launcher(self.launcher, "test").help

    def test_each_process_knows_its_place(self, start: Start, folder: Path) -> None:
        """Every rank exists once and knows the world size, and all have the same address."""
        code, _, errors = self.ended(start("end"))
        assert code == 0, errors
        places = [one["place"] for one in self.read(folder, "started")]
        assert [place["rank"] for place in places] == list(range(self.processes))
        assert {place["world_size"] for place in places} == {self.processes}
        assert all(0 <= place["local_rank"] < place["local_world_size"] for place in places)
        assert len({(place["node_rank"], place["local_rank"]) for place in places}) == self.processes
        assert len({(place["master_addr"], place["master_port"]) for place in places}) == 1
        assert places[0]["master_addr"]
        assert places[0]["master_port"]

    def test_arguments_settings_and_variables_reach_each_process(self, start: Start, folder: Path) -> None:
        """Arguments are not split, settings become variables, and the user's variables are inherited."""
        arguments = ("--lr", "1e-3", "two words", "", "it's", '"$HOME"', "--num_processes=9", "--")
        code, _, errors = self.ended(start("end", *arguments, options=("--mixed_precision=bf16",)))
        assert code == 0, errors
        for one in self.read(folder, "started"):
            assert one["arguments"] == list(arguments)
            assert one["environment"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
            assert one["environment"]["SUITE_VARIABLE"] == "of the user"

    def test_output_and_errors_of_each_process_come_through(self, start: Start, folder: Path) -> None:
        """The standard output and standard error of the processes are forwarded to those of the launch."""
        code, output, errors = self.ended(start("end"))
        assert code == 0, errors
        assert all(output.count(f"output of {rank}") == 1 for rank in range(self.processes))
        assert all(f"error of {rank}" in output + errors for rank in range(self.processes))

    def test_a_failure_ends_the_others_and_gives_its_exit_code(self, start: Start, folder: Path) -> None:
        """The run has the exit code of the failed process, and no process is left."""
        code, _, errors = self.ended(start(f"{self.processes - 1}:7"))
        assert code == 7, errors
        assert self.alive(folder) == []

    def test_sigterm_ends_the_processes_and_leaves_none(self, start: Start, folder: Path) -> None:
        """The processes get SIGTERM, and the launch ends after them."""
        process = start("wait")
        self.read(folder, "started")
        process.send_signal(signal.SIGTERM)
        code, _, errors = self.ended(process)
        assert code not in (0, None), errors
        assert self.read(folder, "signal") == [signal.SIGTERM] * self.processes
        assert self.alive(folder) == []

    def test_interrupt_ends_the_processes_and_leaves_none(self, start: Start, folder: Path) -> None:
        """Ctrl-C ends the run."""
        process = start("wait")
        self.read(folder, "started")
        process.send_signal(signal.SIGINT)
        code, _, errors = self.ended(process)
        assert code not in (0, None), errors
        assert self.alive(folder) == []

    def test_stop_ends_the_processes_and_leaves_none(self, start: Start, folder: Path) -> None:
        """`stop` from another thread ends a run."""
        assert self._stopped(folder, "started") != 0
        assert self.alive(folder) == []

    def test_stop_before_run_ends_the_run(self, start: Start, folder: Path) -> None:
        """A run that is stopped before its start ends."""
        assert self._stopped(folder, "") != 0
        assert self.alive(folder) == []

    def test_a_name_that_is_unknown_is_a_typed_error(self) -> None:
        """A misspelled name raises an error that suggests the closest name."""
        with pytest.raises(SettingError, match=self.launcher):
            find_launcher(f"{self.launcher}x", "--launcher")

    def _stopped(self, folder: Path, after: str) -> int:
        words = [f"--launcher={self.launcher}", *self.options, "job.py", str(folder), "wait"]
        program = (
            "import sys; from accel_testing.launchers import run_and_stop\n"
            f"sys.exit(run_and_stop({words!r}, {str(folder)!r}, {self.processes}, {after!r}))"
        )
        environ = {**os.environ, **self.environ}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=folder, env=environ, capture_output=True, timeout=self.patience
        )
        return done.returncode


def run_and_stop(words: Sequence[str], folder: str, processes: int, after: str) -> int:
    """Run a command line of `accel launch` and stop it, for the suite; returns the exit code of the run.

    Args:
        words: the arguments of `accel launch`.
        folder: folder into which the processes write.
        processes: number of processes.
        after: name of the file that each rank writes before `stop` is called; empty to call it before `run`.
    """
    launcher, plan = prepare_launch(words, os.environ)
    if not after:
        launcher.stop()
        return launcher.run(plan)

    def stop() -> None:
        while not all(os.path.exists(os.path.join(folder, f"{after}{rank}.json")) for rank in range(processes)):
            time.sleep(0.05)
        launcher.stop()

    threading.Thread(target=stop, daemon=True).start()
    return launcher.run(plan)


def make_request(
    values: Mapping[str, Any],
    script: Script = JOB_SCRIPT,
    *,
    file: Mapping[str, Any] | None = None,
    devices: int = 1,
    environ: Mapping[str, str] | None = None,
) -> LaunchRequest:
    """The request of a launch on a machine with 8 processors, whose interpreter is called `python`.

    Args:
        values: values of the command line, by the label of their setting.
        script: what to run.
        file: values of a config file, by the label of their setting.
        devices: number of devices of the machine.
        environ: variables of the launch.

    Raises:
        SettingError: the settings select something that is not installed.
    """
    classes, environ = launch_classes(), environ or {}
    settings_by_label = {label(one): one for settings_class in classes for one in settings_of(settings_class).values()}
    flags = {name: Given(value, settings_by_label[name].flag or "run.yaml:1") for name, value in values.items()}
    there = {name: Given(value, "run.yaml:2") for name, value in (file or {}).items()}
    settings = resolve_settings(classes, flags, environ, there)
    return decide(LaunchRequest(settings, script, Machine("python", 8, lambda: devices, environ), LOCAL))


def make_plan(request: LaunchRequest) -> LaunchPlan:
    """Create the plan of the launcher for a request, as `accel launch` does.

    Raises:
        SettingError: a setting cannot be used here; `Conflict` if two contradict each other.
        NotOffered: the launcher does not support this kind of script.
    """
    check_request(request)
    return load_launcher(request.launcher).plan(request)


def prepare_launch(words: Sequence[str], environ: Mapping[str, str]) -> tuple[Launcher, LaunchPlan]:
    """The launcher of a command line and its plan.

    Args:
        words: the arguments of `accel launch`.
        environ: the variables of the launch.

    Raises:
        AccelError: `accel launch` would raise the same error.

    Example:
        >>> prepare_launch(["--launcher", "local", "--num_processes", "2", "train.py"], {})  # doctest: +SKIP
    """
    request = request_of(words, environ)
    check_script(request.script)
    launcher = load_launcher(request.launcher)
    return launcher, launcher.plan(request)
