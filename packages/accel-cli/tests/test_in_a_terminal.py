"""Launches from a terminal: typing, interrupting and debugging work as with plain Python."""

from __future__ import annotations

import os
import signal

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
@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_to_the_launcher_reaches_each_process_once(start, script, count, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("whoever runs the tests ignores this signal already, as nohup does")
    background = start("launch", "--num_processes", count, script(COUNTING), number.name)
    background.lines(count)
    os.kill(background.process.pid, number)
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
