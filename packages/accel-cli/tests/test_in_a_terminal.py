"""Launches from a terminal: typing, interrupting and debugging work as with plain Python."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import psutil
import pytest

INTERRUPT = "\x03"


COUNTING = """
    import signal, sys, time
    number = signal.Signals[sys.argv[1]]
    count = 0
    def signalled(number, frame):
        global count
        count += 1
    signal.signal(number, signalled)
    print("ready", flush=True)
    while count == 0:
        time.sleep(0.05)
    time.sleep(0.5)
    print("signals:", count, flush=True)
    # After SIGUSR1, a failure would end the other process.
    sys.exit(0 if number == signal.SIGUSR1 else 9)
"""


@pytest.mark.parametrize("stdin", ["terminal", "file", "pipe"])
@pytest.mark.parametrize("options", [("--num_processes", 1), ("--num_processes", 2)], ids=["one", "two"])
def test_an_interrupt_reaches_each_process_once(terminal, script, options, stdin):
    count = options[1]
    opened = terminal("launch", *options, script(COUNTING), "SIGINT", stdin=stdin)
    opened.until("ready\r\n" * count)
    opened.type(INTERRUPT)
    code, output = opened.end()
    assert output.count("signals: 1\n") == count
    assert code == 9


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["to the launcher", "to its group"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_reaches_each_process_once(start, script, count, send, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("whoever runs the tests ignores this signal already, as nohup does")
    background = start("launch", "--num_processes", count, script(COUNTING), number.name)
    background.lines(count)
    send(background.process.pid, number)
    finished = background.end()
    assert finished.stdout.count("signals: 1\n") == count
    assert finished.returncode == (0 if number == signal.SIGUSR1 else 9)


@pytest.mark.parametrize("stdin", ["terminal", "file"])
@pytest.mark.parametrize("whom", ["terminal", "launcher"])
def test_an_interrupt_reaches_each_process_of_torchrun_once(terminal, script, stdin, whom):
    opened = terminal("launch", "--launcher", "torchrun", "--cpu", script(COUNTING), "SIGINT", stdin=stdin)
    opened.until("ready\r\n")
    if whom == "terminal":
        opened.type(INTERRUPT)
    else:
        os.kill(opened.pid, signal.SIGINT)
    assert opened.end()[1].count("signals: 1\n") == 1


def test_a_signal_may_reach_the_launcher_alone_after_one_to_its_group(start, script):
    body = """
        import os, signal, time
        signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"signal\\n"))
        print("ready", flush=True)
        while True:
            time.sleep(0.05)
    """
    background = start("launch", script(body))
    background.lines(1)
    pid = background.process.pid
    for count in (2, 4):
        seen_by = witness(pid)
        os.killpg(pid, signal.SIGUSR1)
        background.lines(count)
        # The system keeps one pending signal of a kind: a second one before the launcher has handled this is lost.
        while witness(pid) in (None, seen_by):
            assert background.process.poll() is None
        os.kill(pid, signal.SIGUSR1)
        background.lines(count + 1)
    background.process.send_signal(signal.SIGTERM)
    assert background.end().stdout == "ready\n" + "signal\n" * 4


def witness(launcher: int) -> int | None:
    """The process in the launcher's group that tells signals to the group; a new one replaces it after each."""
    for child in psutil.Process(launcher).children():
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and child.name() == "cat":
                return child.pid
    return None


def test_an_interrupted_script_leaves_no_traceback(terminal, script):
    opened = terminal("launch", script("import time\nprint('ready', flush=True)\nwhile True:\n    time.sleep(0.05)"))
    opened.until("ready")
    opened.type(INTERRUPT)
    code, output = opened.end()
    assert code == 130
    assert "Traceback" not in output
    assert output.endswith("accel launch: ended by SIGINT.\n")


@pytest.mark.parametrize("count", [1, 2])
def test_the_first_process_can_be_debugged(terminal, script, count):
    body = "import os\nvalue = 41\nif os.environ.get('RANK', '0') == '0': breakpoint()\nprint('went', 'on')\n"
    opened = terminal("launch", "--num_processes", count, script(body))
    opened.until("(Pdb) ")
    opened.type("p value + 1\n")
    opened.until("42")
    opened.type("c\n")
    code, output = opened.end()
    assert (code, output.count("went on")) == (0, count)
