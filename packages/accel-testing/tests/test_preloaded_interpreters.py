"""Scripts run in processes that have imported torch already as they do in new interpreters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from accel_testing.processes import Finished, run_command

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="file descriptors are passed to other processes on Linux"),
    pytest.mark.usefixtures("preloaded_python"),
]

# What a script sees of the interpreter; the first line says whether torch was there before it was imported.
SEEN = """
    import os, signal, sys
    print("torch" in sys.modules, file=sys.stderr)
    print(sys.argv, __name__, __file__, sys.path[0], os.getcwd(), os.environ["GIVEN"], sorted(os.sched_getaffinity(0)))
    print(sys.modules["__main__"].__dict__ is globals(), sys.stdin.read(), os.umask(0o22), os.isatty(1))
    print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1))
    print("to the standard error", file=sys.stderr)
"""


def script(folder: Path, body: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(body), encoding="utf-8")
    return str(path)


def python(*arguments: str, **options: object) -> Finished:
    return run_command([sys.executable, *arguments], **options)  # type: ignore[arg-type]


def test_a_script_sees_what_it_sees_in_a_new_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "a value")
    script(tmp_path, SEEN)
    here = python("script.py", "--one", "two", cwd=tmp_path)
    monkeypatch.delenv("PRELOADED_PYTHON")
    new = python("script.py", "--one", "two", cwd=tmp_path)

    assert (here.returncode, here.stdout) == (new.returncode, new.stdout) == (0, new.stdout)
    assert here.stderr == "True\nto the standard error\n"
    assert new.stderr == "False\nto the standard error\n"


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os; os._exit(7)", 7, ""),
        ("import atexit; atexit.register(print, 'at the end')", 0, ""),
        ("import threading, time; threading.Timer(0.1, print, ['at the end']).start()", 0, ""),
    ],
)
def test_a_script_ends_as_in_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, code: int, told: str
) -> None:
    here = python(script(tmp_path, body))
    monkeypatch.delenv("PRELOADED_PYTHON")

    assert here == python(script(tmp_path, body))
    assert here.returncode == code
    assert here.stderr.endswith(told)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_the_script(tmp_path: Path, number: signal.Signals) -> None:
    body = """
        import signal, sys
        signal.signal(int(sys.argv[1]), lambda number, frame: sys.exit(40))
        print("ready", flush=True)
        while True:
            signal.pause()
    """
    command = [sys.executable, script(tmp_path, body), str(int(number))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(250) == 40


def test_nothing_of_a_script_is_left_when_its_interpreter_is_killed(tmp_path: Path) -> None:
    body = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, script(tmp_path, body)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        own = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        # The end of the pipe: nobody has it open any more.
        assert process.stdout.read() == b""
    os.close(own)


def test_open_files_are_inherited(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, script(tmp_path, "import os, sys; os.write(int(sys.argv[1]), b'here')"), str(writing)]
    assert subprocess.run(command, pass_fds=(writing,), timeout=250).returncode == 0
    os.close(writing)
    assert os.read(reading, 100) == b"here"
    os.close(reading)


def test_processes_that_a_script_spawns_and_forks_find_its_functions(tmp_path: Path) -> None:
    body = """
        import multiprocessing
        def double(number):
            return 2 * number
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(double, [1, 2]))
    """
    assert python(script(tmp_path, body)) == Finished(0, "[2, 4]\n[2, 4]\n", "")


def test_commands_and_torchrun_run_as_in_a_new_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(tmp_path, "import sys; print(sys.argv[1:])")
    commands = (
        ("-c", "import sys; print('torch' in sys.modules); import torch; print(sys.argv, __name__)", "--one"),
        ("-m", "torch.distributed.run", "--nproc-per-node=1", path, "two"),
    )
    here = [python(*command, cwd=tmp_path) for command in commands]
    monkeypatch.delenv("PRELOADED_PYTHON")
    new = [python(*command, cwd=tmp_path) for command in commands]

    assert [one.returncode for one in here] == [one.returncode for one in new] == [0, 0]
    assert here[0].stdout == "True\n" + new[0].stdout.removeprefix("False\n")
    assert here[1].stdout == new[1].stdout == "['two']\n"


def test_programs_that_do_not_import_torch_start_as_usual(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import sys; print('torch' in sys.modules)")
    for arguments in (("-m", "module"), ("-c", "import module"), ("-E", "-s", "module.py")):
        assert python(*arguments, cwd=tmp_path).stdout == "False\n"


def test_signals_that_come_too_late_do_not_start_the_script_again(tmp_path: Path) -> None:
    late = tmp_path / "late.py"
    late.write_text(
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
        "with open(sys.argv[1], 'a') as file:\n    file.write('once')\n"
        "sys.exit(7)\n"
    )
    for turn in range(5):
        seen = tmp_path / str(turn)
        with subprocess.Popen([sys.executable, str(late), str(seen)]) as process:
            while not seen.exists():
                time.sleep(0.01)
            while process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        assert (process.returncode, seen.read_text()) == (7, "once")
