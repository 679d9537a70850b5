"""Launches from a terminal: typing, interrupting and debugging work as with plain Python."""

from __future__ import annotations

import pytest

INTERRUPT = "\x03"


COUNTING = """
    import signal, sys, time
    count = 0
    def interrupted(number, frame):
        global count
        count += 1
    signal.signal(signal.SIGINT, interrupted)
    print("ready", flush=True)
    while count == 0:
        time.sleep(0.05)
    time.sleep(0.5)
    print("interrupts:", count, flush=True)
    sys.exit(9)
"""


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupt_reaches_each_process_once(terminal, script, count):
    opened = terminal("launch", "--num_processes", count, script(COUNTING))
    opened.until("ready\r\n" * count)
    opened.type(INTERRUPT)
    code, output = opened.end()
    assert output.count("interrupts: 1\n") == count
    assert code == 9


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
