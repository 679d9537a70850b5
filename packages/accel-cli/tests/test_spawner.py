"""The local launcher: what processes are told, how a run ends, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from accel_cli.launch.port import Port, owner_of
from accel_state.errors import SettingError
from accel_state.watch.runs import running_runs
from accel_testing.processes import ReservedPort

PLACE = """
    import json, os
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
    place = {name: os.environ.get(name) for name in names}
    print(json.dumps({**place, "port": os.environ.get("MASTER_PORT"), "mine": os.environ.get("ACCEL_LAUNCHER_PID")}))
"""

# Short sleeps: Python handles a signal that comes just before a long one only after it.
READY_THEN_WAIT = """
    import os, time
    print(os.getpid(), flush=True)
    while True:
        time.sleep(0.05)
"""

STUBBORN = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    while True:
        time.sleep(60)
"""


def test_one_process_gets_no_rank_variables(accel, script):
    finished = accel("launch", script(PLACE), env={"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    place = json.loads(finished.stdout)
    assert set(place.values()) == {None}
    assert "$RANK=3 and $WORLD_SIZE=4 are ignored" in finished.stderr


def test_two_processes_are_told_their_places(accel, script):
    finished = accel("launch", "--quiet", "--cpu", "--num_processes", "2", script(PLACE))
    assert (finished.returncode, finished.stderr) == (0, "")
    places = sorted(map(json.loads, finished.stdout.splitlines()), key=lambda place: place["RANK"])
    ports = {place.pop("port") for place in places}
    assert len(ports) == 1
    assert int(ports.pop()) > 1023
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "mine": None}
    threads = str(max(len(os.sched_getaffinity(0)) // 2, 1))
    assert places == [{"RANK": rank, "LOCAL_RANK": rank, **shared, "OMP_NUM_THREADS": threads} for rank in ("0", "1")]


def test_the_port_can_be_listened_on_as_torchs_store_does(accel, script):
    body = """
        import os, socket
        if os.environ["RANK"] == "0":
            for _ in range(2):
                with socket.socket() as server:
                    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    server.bind(("0.0.0.0", int(os.environ["MASTER_PORT"])))
                    server.listen()
            print("listened")
    """
    assert accel("launch", "--num_processes", "2", script(body)).stdout == "listened\n"


def test_a_given_port_is_used_and_one_in_use_is_refused_with_its_owner(accel, script):
    reserved = ReservedPort()
    free = str(reserved.reserve())
    finished = accel("launch", "--num_processes", "2", "--main_process_port", free, script(PLACE))
    reserved.release()
    assert {json.loads(line)["port"] for line in finished.stdout.splitlines()} == {free}, finished.stderr
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        finished = accel("launch", "--num_processes", "2", "--main_process_port", taken, script(PLACE))
    assert (finished.returncode, finished.stdout) == (2, "")
    assert f"Cannot use main_process_port={taken} (--main_process_port)." in finished.stderr
    assert f"(pid {os.getpid()})" in finished.stderr
    assert "0 to select a free one" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_second_launch_with_the_port_of_a_first_is_refused_before_anybody_listens(accel, start, script):
    with Port() as chosen:
        port = chosen.number
    first = start("launch", "--cpu", "--num_processes", "2", "--main_process_port", port, script(READY_THEN_WAIT))
    first.lines(2)
    second = accel("launch", "--cpu", "--num_processes", "2", "--main_process_port", port, script(PLACE))
    assert (second.returncode, second.stdout) == (2, "")
    assert "The port is in use; another launch may have reserved it." in second.stderr
    first.process.send_signal(signal.SIGKILL)
    first.end()
    third = accel("launch", "--cpu", "--num_processes", "2", "--main_process_port", port, script(PLACE))
    assert third.returncode == 0, third.stderr


def test_a_port_is_kept_from_others_while_it_is_held():
    with Port() as held, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", held.number))
        assert owner_of(held.number) is None


def test_a_port_that_may_not_be_used():
    with Port() as held, socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", held.number))
        listening.listen()
        with pytest.raises(SettingError, match="in use"):
            Port(held.number, "test")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("body", "code"), [("import sys; sys.exit(3)", 3), ("import os; os._exit(7)", 7), ("", 0)])
def test_exit_codes_are_kept(accel, script, count, body, code):
    finished = accel("launch", "--num_processes", count, script(body))
    assert finished.returncode == code
    assert ("ended with exit code" in finished.stderr) == (code != 0)


def test_an_error_is_shown_once_and_last(accel, script):
    body = """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("the cause")
        time.sleep(60)
    """
    finished = accel("launch", "--num_processes", "2", "--grace_period", "5", script(body))
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[1] == "accel launch: Process 1 of 2 failed first and ended with exit code 1."
    assert finished.stderr.count("Traceback") == 1
    assert finished.stderr.endswith("ValueError: the cause\n")


def test_the_error_of_a_single_process_is_shown_once_and_last(accel, script):
    finished = accel("launch", script("print('before')\nraise ValueError('wrong')"))
    assert (finished.returncode, finished.stdout) == (1, "before\n")
    assert finished.stderr.count("Traceback") == 1
    assert finished.stderr.endswith("ValueError: wrong\n")


def test_the_first_error_counts_and_the_others_are_told_in_a_line(accel, script, tmp_path):
    for name in ("deaf", "failed"):
        os.mkfifo(tmp_path / name)
    body = """
        import os, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "1":
            import atexit
            # The other process cannot be ended any more.
            open("deaf").close()
            # It goes on once this one has failed, and before it has left.
            atexit.register(lambda: open("failed", "w").close())
            raise ValueError("the cause")
        open("deaf", "w").close()
        open("failed").close()
        raise RuntimeError("connection reset")
    """
    finished = accel("launch", "--num_processes", "2", script(body))
    assert finished.returncode == 1
    assert "Process 1 of 2 failed first" in finished.stderr
    assert "  Process 0 failed too: RuntimeError: connection reset\n" in finished.stderr
    assert finished.stderr.endswith("ValueError: the cause\n")


def test_quiet_leaves_only_the_traceback(accel, script):
    finished = accel("launch", "-q", script("raise ValueError('wrong')"))
    assert finished.stderr.strip().startswith("Traceback")


@pytest.mark.parametrize("count", [1, 2])
def test_a_death_by_signal_is_explained(accel, script, count):
    finished = accel("launch", "--num_processes", count, script("import os; os.kill(os.getpid(), 9)"))
    assert finished.returncode == 137
    assert "killed by signal 9 (SIGKILL): probably the machine ran out of memory" in finished.stderr


def test_the_others_are_ended_when_one_fails(accel, script, gone):
    body = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(5)
        print(os.getpid(), flush=True)
        time.sleep(600)
    """
    finished = accel("launch", "--num_processes", "2", script(body))
    assert finished.returncode == 5
    assert all(gone(int(pid)) for pid in finished.stdout.split())


def test_one_that_will_not_end_is_killed_after_the_grace_period(start, script, gone, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    body = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "1":
            open("fifo").close()
            os._exit(5)
        print(os.getpid(), flush=True)
        open("fifo", "w").close()
        time.sleep(600)
    """
    background = start("launch", "--num_processes", "2", "--grace_period", "0.5", script(body))
    (pid,) = map(int, background.lines(1))
    assert background.end().returncode == 5
    assert gone(pid)


def test_an_error_counts_although_its_process_does_not_leave(accel, script):
    body = """
        import os, threading, time
        if os.environ["RANK"] == "1":
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise ValueError("the cause")
        time.sleep(600)
    """
    finished = accel("launch", "--num_processes", "2", "--grace_period", "0.5", script(body))
    assert finished.returncode == 1
    assert finished.stderr.endswith("ValueError: the cause\n")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_local_launcher_forwards_signals_to_all_processes(start, script, gone, count, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("whoever runs the tests ignores this signal already, as nohup does")
    background = start("launch", "--num_processes", count, script(READY_THEN_WAIT))
    pids = list(map(int, background.lines(count)))
    background.process.send_signal(number)
    finished = background.end()
    assert finished.returncode == 128 + number
    assert finished.stderr.endswith(f".\naccel launch: ended by {number.name}.\n")
    assert all(map(gone, pids))


def test_a_process_may_answer_a_signal_with_its_own_exit_code(start, script):
    body = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"checkpoint\\n"))
        print("ready", flush=True)
        while True:
            time.sleep(0.05)
    """
    background = start("launch", "--num_processes", "2", script(body))
    background.lines(2)
    background.process.send_signal(signal.SIGUSR1)
    assert background.lines(4)[2:] == ["checkpoint", "checkpoint"]
    background.process.send_signal(signal.SIGTERM)
    assert background.end().returncode == 75


def test_a_second_signal_ends_at_once(start, script, gone):
    background = start("launch", "--num_processes", "2", script(STUBBORN))
    pids = list(map(int, background.lines(2)))
    background.process.send_signal(signal.SIGTERM)
    background.process.send_signal(signal.SIGINT)
    assert background.end().returncode in (143, 130)
    assert all(map(gone, pids))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends the children of a killed process")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("body", [READY_THEN_WAIT, STUBBORN])
def test_no_process_outlives_a_killed_launcher(start, script, gone, count, body):
    background = start("launch", "--num_processes", count, script(body))
    pids = list(map(int, background.lines(count)))
    background.process.kill()
    assert all(map(gone, pids))
    assert background.end().returncode == -9


def announced(pid, timeout=250):
    """The folder of a launcher, once it names the launcher."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for run in running_runs():
            if run.pid == pid:
                return Path(run.status_folder).parent
        time.sleep(0.05)
    raise AssertionError(f"process {pid} has announced no run")


def test_the_next_launch_removes_the_folders_of_killed_launchers_alone(accel, start, script, gone):
    waits = script("import time; time.sleep(600)", "waits.py")
    killed, living = (start("launch", "--cpu", waits) for _ in range(2))
    left, kept = (announced(launch.process.pid) for launch in (killed, living))
    killed.process.kill()
    # From here on any launcher on this machine may remove it.
    assert gone(killed.process.pid)
    assert accel("launch", "--cpu", script("")).returncode == 0
    assert (left.exists(), kept.exists()) == (False, True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends the children of a killed process")
def test_no_program_outlives_a_killed_launcher(start, gone):
    background = start("launch", "--no_python", "sh", "-c", "echo $$; exec sleep 600")
    (pid,) = map(int, background.lines(1))
    background.process.kill()
    assert gone(pid)


def test_what_a_failed_process_had_started_is_ended(start, script, gone, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    body = """
        import os, subprocess, sys
        helper = subprocess.Popen(["sleep", "600"])
        print(helper.pid, flush=True)
        if os.environ["RANK"] == "1":
            open("fifo").close()
            sys.exit(5)
        open("fifo", "w").close()
        helper.wait()
    """
    background = start("launch", "--num_processes", "2", script(body))
    helpers = list(map(int, background.lines(2)))
    assert background.end().returncode == 5
    assert all(map(gone, helpers))


def test_an_ignored_signal_stays_ignored(script, start):
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        pytest.skip("whoever runs the tests ignores hang-ups already")
    finished = start("launch", script("import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)")).end()
    assert finished.stdout == "False\n"
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        background = start("launch", script(READY_THEN_WAIT))
        background.lines(1)
        background.process.send_signal(signal.SIGHUP)
        background.process.send_signal(signal.SIGTERM)
        assert background.end().returncode == 143
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_output_with_ranks(accel, script):
    body = """
        import os, sys
        print("one\\ntwo"); print("error", file=sys.stderr); print("bar\\rbar", end="")
    """
    finished = accel("launch", "--num_processes", "2", "--prefix_output", script(body))
    assert finished.returncode == 0
    for rank in "01":
        for line in ("one\n", "two\n", "bar\r", "bar\n"):
            assert f"[rank {rank}] {line}" in finished.stdout
        assert f"[rank {rank}] error\n" in finished.stderr


def test_modules_programs_and_untouched_arguments(accel, script):
    script("import sys; print(sys.argv[1:], __name__)", "package/train.py")
    arguments = ["--num_processes", "5", "--", "-m", ""]
    assert accel("launch", "-m", "package.train", *arguments).stdout == f"{arguments} __main__\n"
    assert accel("launch", "--no_python", "echo", *arguments[:-1]).stdout == "--num_processes 5 -- -m\n"
    assert accel("launch", "--", script("import sys; print(sys.argv[1:])"), "--", "x").stdout == "['--', 'x']\n"


def test_standard_input_reaches_the_first_process(script, tmp_path):
    from subprocess import run

    body = script("import os, sys; print(os.environ.get('RANK'), sys.stdin.read())")
    argv = [sys.executable, "-m", "accel_cli.main", "launch", "--num_processes", "2", str(body)]
    finished = run(argv, input="typed", capture_output=True, text=True, timeout=250)
    assert sorted(finished.stdout.splitlines()) == ["0 typed", "1 "]


def test_a_launch_inside_a_launch(accel, script):
    script(PLACE, "inner.py")
    body = """
        import os, subprocess, sys
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
        if os.environ["RANK"] == "0":
            subprocess.run([sys.executable, "-m", "accel_cli.main", "launch", "-q", "inner.py"], check=True)
    """
    finished = accel("launch", "-q", "--num_processes", "2", "--mixed_precision", "bf16", script(body))
    assert (finished.returncode, finished.stderr) == (0, "")
    assert set(json.loads(finished.stdout).values()) == {None}


def test_an_interpreter_that_cannot_be_started_is_a_typed_error(tmp_path):
    from accel_cli.launch.interface import LaunchPlan
    from accel_cli.launch.local import Local
    from accel_state.errors import LaunchError

    plan = LaunchPlan({}, (str(tmp_path / "none"), "x"), "local", processes=2, starts_ranks=True)
    with pytest.raises(LaunchError) as caught:
        Local().run(plan)
    assert "process 0 of 2" in caught.value.failure


RAISES = """
    from accel_state.settings.run import RunSettings
    from accel_state.settings.schema import settings_of
    def choose():
        settings_of(RunSettings)["mixed_precision"].parse("bf17", "here")
    {call}
"""


@pytest.mark.parametrize("count", [1, 2])
def test_our_frames_are_folded_in_the_traceback_of_our_own_errors(accel, script, count):
    finished = accel("launch", "--num_processes", count, script(RAISES.format(call="choose()")))
    shown = finished.stderr[finished.stderr.index("Traceback") :]
    assert "in choose\n" in shown
    assert "  (... 1 frame of accel)\n" in shown
    assert "schema.py" not in shown
    assert "Cannot use mixed_precision='bf17' (here)." in shown


def test_our_frames_are_folded_in_each_link_of_a_chain_and_a_fault_of_ours_keeps_its_frame(accel, script):
    call = """
    try:
        choose()
    except Exception as error:
        settings_of(RunSettings)["mixed_precision"].type.choices = 3
    """
    shown = accel("launch", script(RAISES.format(call=call))).stderr
    chain = shown.split("During handling of the above exception, another exception occurred:")
    assert len(chain) == 2
    assert "(... 1 frame of accel)" in chain[0]
    assert "frame of accel" not in chain[1]
    fault = """settings_of(RunSettings)["mixed_precision"].parse(3, "here")"""
    assert "in parse\n" in accel("launch", script(RAISES.format(call=fault))).stderr


def test_a_folder_of_the_run_that_cannot_be_written_is_told_and_does_not_end_the_run(accel, script, tmp_path):
    (tmp_path / "file").write_text("")
    done = accel("launch", "--cpu", "--project_dir", tmp_path / "file", script("print('done')"))
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "accel launch: Cannot write to the run's folder:" in done.stderr
