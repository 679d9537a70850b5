"""The launchers of this package pass the suite, as far as what they start is installed here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from typing import ClassVar

import pytest

from accel_cli.launch.interface import LauncherManifest
from accel_state.errors import PluginError
from accel_state.proc import state_of
from accel_testing.launchers import LauncherSuite
from accel_testing.processes import run_command


class TestLocal(LauncherSuite):
    launcher = "local"


@pytest.mark.slow
class TestTorchrun(LauncherSuite):
    launcher = "torchrun"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
class TestMpi(LauncherSuite):
    launcher = "mpi"
    environ: ClassVar = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "hosts").write_text("localhost slots=2\n", encoding="utf-8")
        return tmp_path

    options = ("--cpu", "--num_processes=2", "--mpirun_hostfile=hosts")


TORCH_XLA = """
import os, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

def launch(fn, args=(), start_method="spawn", debug_single_process=False):
    with ProcessPoolExecutor(2, mp_context=get_context(start_method)) as pool:
        list(pool.map(in_a_thread, range(2), [fn] * 2, [args] * 2))

def in_a_thread(rank, fn, args):
    os.environ["PJRT_LOCAL_PROCESS_RANK"] = str(rank)
    with ThreadPoolExecutor(1) as threads:
        list(threads.map(lambda index: fn(index, *args), [rank]))
"""


@pytest.mark.slow
class TestTpu(LauncherSuite):
    """With a `torch_xla` that starts processes and threads as torch_xla 2.9 does, and has no devices."""

    launcher = "tpu"
    options = ("--cpu", "--grace_period=1")
    topology = """
import os
from accel_state.topology import Topology
def read_topology():
    return Topology(int(os.environ["PJRT_LOCAL_PROCESS_RANK"]), 2)
"""
    not_applicable: ClassVar = {
        "test_each_process_knows_its_place": "torch_xla tells its processes their place without variables",
        "test_a_failure_ends_the_others_and_gives_its_exit_code": "torch_xla waits for processes that live",
        "test_sigterm_ends_the_processes_and_leaves_none": "torch_xla calls the script in a thread, without handlers",
    }

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        (tmp_path / "fake").mkdir()
        (tmp_path / "fake" / "torch_xla.py").write_text(TORCH_XLA, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
        return tmp_path


ELSEWHERE = "the processes run in containers of Amazon, of which this machine has neither files nor signals"


class TestSageMaker(LauncherSuite):
    launcher = "sagemaker"
    not_applicable: ClassVar = dict.fromkeys(
        (
            "test_each_process_knows_its_place",
            "test_arguments_settings_and_variables_reach_each_process",
            "test_output_and_errors_of_each_process_come_through",
            "test_a_failure_ends_the_others_and_gives_its_exit_code",
            "test_sigterm_ends_the_processes_and_leaves_none",
            "test_interrupt_ends_the_processes_and_leaves_none",
            "test_stop_ends_the_processes_and_leaves_none",
            "test_stop_before_run_ends_the_run",
        ),
        ELSEWHERE,
    )


STARTS_AND_WAITS = f"""#!{sys.executable}
import subprocess, sys
first = next(place for place, word in enumerate(sys.argv) if word.endswith("runner.py"))
sys.exit(subprocess.Popen([sys.executable, *sys.argv[first:]]).wait())
"""

OUTLIVES = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "ignores" else signal.SIG_DFL)
pathlib.Path("partial").write_text(str(os.getpid()))
os.rename("partial", "pid")
time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("answer", ["obeys", "ignores"])
def test_processes_that_outlive_the_program_which_started_them_are_ended(tmp_path, script, monkeypatch, answer):
    program = tmp_path / "bin" / "deepspeed"
    program.parent.mkdir()
    program.write_text(STARTS_AND_WAITS)
    program.chmod(0o755)
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    words = ["--launcher=deepspeed", "--deepspeed_hostfile=hosts", "--deepspeed_multinode_launcher=nossh"]
    words += ["--main_process_ip=127.0.0.1", "--grace_period=1", str(script(OUTLIVES)), answer]
    command = [sys.executable, "-m", "accel_cli.main", "launch", "--cpu", *words]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as launcher:
        deadline = time.monotonic() + 250
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        launcher.terminate()
        _, errors = launcher.communicate(timeout=250)
    assert launcher.returncode == 128 + signal.SIGTERM, errors
    assert state_of(int((tmp_path / "pid").read_text())) == "ended"


RECORDER = """
    from dataclasses import dataclass, replace
    from accel_cli.launch.interface import LauncherManifest, LaunchPlan
    from accel_state.settings.schema import setting

    @dataclass
    class RecorderSettings:
        recorder_pool: str = setting("usual", flag="--recorder_pool", key="recorder_pool", help="Pool of machines.")

    class Recorder:
        def plan(self, request):
            return LaunchPlan({}, request.program, "recorder", details=request.settings["recorder_pool"].value)

        def run(self, plan):
            print("recorded", plan.details, plan.argv[-1])
            return 3

        def stop(self):
            pass

    def called_for(request):
        return "recorder_pool" if request.settings["recorder_pool"].is_set else None

    MANIFEST = LauncherManifest(
        "recorder", "recorder:Recorder", "record", "recorder:RecorderSettings", called_for, priority=100
    )
    LOCAL = replace(MANIFEST, name="local")
"""


@pytest.fixture
def recorder(tmp_path, script, monkeypatch):
    """A package with a launcher, also one that calls itself local, and one that cannot be loaded."""
    script(RECORDER, "recorder.py")
    folder = tmp_path / "recorder-1.0.dist-info"
    folder.mkdir()
    lines = ["[accel.launchers]", "recorder = recorder:MANIFEST", "local = recorder:LOCAL", "broken = recorder:NONE"]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    return {"PYTHONPATH": str(tmp_path)}


def test_a_launcher_of_another_package_is_named_or_called_for(accel, script, recorder):
    job = script("pass")
    named = accel("launch", "--launcher", "recorder", job, env=recorder)
    assert (named.returncode, named.stdout) == (3, f"recorded usual {job}\n"), named.stderr
    called = accel("launch", "--recorder_pool", "large", job, env=recorder)
    assert (called.returncode, called.stdout) == (3, f"recorded large {job}\n"), called.stderr
    assert accel("launch", "--launcher", "local", job, env=recorder).returncode == 0


def test_a_launcher_that_cannot_be_loaded_or_is_unknown_is_a_typed_error(accel, script, recorder):
    job = script("pass")
    broken = accel("launch", "--launcher", "broken", job, env=recorder)
    assert (broken.returncode, "could not be loaded" in broken.stderr) == (2, True)
    unknown = accel("launch", "--launcher", "recordr", job, env=recorder)
    assert (unknown.returncode, "Did you mean 'recorder'?" in unknown.stderr) == (2, True)
    assert accel("launch", job, env=recorder).returncode == 0


def test_a_launcher_whose_reason_raises_is_a_typed_error(accel, script, recorder, tmp_path):
    job = script("print('ran')")
    path = tmp_path / "recorder.py"
    path.write_text(path.read_text(encoding="utf-8").replace("def called_for(request)", "def called_for()"))
    done = accel("launch", job, env=recorder)
    assert (done.returncode, "for 'recorder' raised TypeError" in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
    assert accel("launch", "--launcher", "local", job, env=recorder).stdout == "ran\n"


@pytest.mark.parametrize(("name", "target"), [("auto", "a:B"), ("two words", "a:B"), ("good", "nowhere")])
def test_a_manifest_that_is_malformed_is_refused(name, target):
    with pytest.raises(PluginError):
        LauncherManifest(name, target)


@pytest.mark.parametrize("preflight", [False, True])
def test_no_module_of_the_doctor_is_loaded_without_preflight(script, preflight):
    job, switch = script("pass"), ["--preflight"] if preflight else []
    program = "import sys; from accel_cli.main import main; assert main(sys.argv[1:]) == 0\n"
    program += "print(sum(name.startswith('accel_cli.doctor') for name in sys.modules))"
    done = run_command([sys.executable, "-c", program, "launch", *switch, str(job)])
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 0) == preflight


LATER = ("glob", "logging", "shutil", "tempfile", "traceback", "urllib.parse", "accel_cli.launch.hangs")

STARTED_AFTER = """
import sys
loaded = []
sys.addaudithook(lambda event, _: event == "subprocess.Popen" and loaded.append(set(sys.modules)))
from accel_cli.main import main
assert main(sys.argv[2:]) == 0
print(len(loaded), *(name for name in sys.argv[1].split() if name in loaded[0]))
"""


def test_processes_start_before_the_launcher_imports_what_they_do_not_need(script):
    launch = ("launch", "--cpu", "--num_processes", "2", str(script("")))
    done = run_command([sys.executable, "-c", STARTED_AFTER, " ".join(LATER), *launch])
    assert done.stdout.split() == ["2"], done.stderr
