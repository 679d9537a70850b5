"""The actor of a process, without Ray: output, exit codes, errors, signals, and an end that leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel_ray.process import ProcessUpdate, RankProcess

AttemptStart = Callable[..., RankProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[AttemptStart]:
    started = []

    def run(script: str, **environment: str) -> RankProcess:
        (tmp_path / "job.py").write_text(script, encoding="utf-8")
        started.append(RankProcess())
        started[-1].start(("script", "job.py", "an argument"), environment, str(tmp_path))
        return started[-1]

    yield run
    for process in started:
        process.close(kill=True)


def ended(process: RankProcess) -> tuple[ProcessUpdate, dict[int, bytes]]:
    """The last progress, and all output by stream."""
    output: dict[int, bytes] = {1: b"", 2: b""}
    seen, deadline = 0, time.monotonic() + 250
    while time.monotonic() < deadline:
        progress = process.follow(seen, 1.0)
        seen = progress.seen
        for stream, chunk in progress.output:
            output[stream] += chunk
        if progress.code is not None:
            return progress, output
    raise AssertionError("the process did not end")


def test_output_and_exit_code_arrive(start: AttemptStart) -> None:
    job = "import os, sys\nprint(sys.argv[1], os.environ['GIVEN'])\nprint('bad', file=sys.stderr)\nsys.exit(7)"
    progress, output = ended(start(job, GIVEN="text"))
    assert progress.code == 7
    assert output == {1: b"an argument text\n", 2: b"bad\n"}


def test_much_output_waits_for_the_launcher(start: AttemptStart) -> None:
    process = start("import sys\nfor _ in range(200): sys.stdout.write('x' * 65535 + '\\n')")
    progress, output = ended(process)
    assert progress.code == 0
    assert len(output[1]) == 200 * 65536


def test_a_question_may_be_repeated(start: AttemptStart) -> None:
    process = start("import os\nos.write(1, b'once')")
    first = process.follow(0, 250.0)
    assert process.follow(0, 250.0).output[: len(first.output)] == first.output
    assert process.follow(first.seen, 250.0).seen >= first.seen
    assert ended(process)[1][1] == b""


def test_an_error_is_recorded(start: AttemptStart) -> None:
    progress, _ = ended(start("raise ValueError('of the script')"))
    assert progress.code == 1
    assert progress.record is not None
    assert "of the script" in progress.record["message"]


def test_a_signal_reaches_the_process_and_what_it_started(start: AttemptStart, tmp_path: Path) -> None:
    job = (
        "import subprocess, sys\nchild = subprocess.Popen(['sleep', '600'])\nprint(child.pid, flush=True)\nchild.wait()"
    )
    process = start(job)
    child = int(process.follow(0, 250.0).output[0][1])
    process.signal(signal.SIGKILL)
    progress, _ = ended(process)
    assert progress.code == -signal.SIGKILL
    wait_until_gone(child)


def test_the_process_dies_with_its_actor(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)")
    actor = (
        "from accel_ray.process import RankProcess\nimport time, threading\np = RankProcess()\n"
        # As Ray calls a method: in a thread that may end.
        f"t = threading.Thread(target=p.start, args=(('script', 'job.py'), {{}}, {str(tmp_path)!r}))\n"
        "t.start(); t.join(); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", actor]) as owner:
        deadline = time.monotonic() + 250
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.2)
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)
        owner.kill()
    wait_until_gone(pid)


def test_a_folder_that_is_absent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RankProcess().start(("script", "job.py"), {}, str(tmp_path / "absent"))


def wait_until_gone(pid: int) -> None:
    """Wait until a process has ended; a zombie whose parent does not look has."""
    deadline = time.monotonic() + 250
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
