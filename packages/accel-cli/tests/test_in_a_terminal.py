"""Launches from a terminal: typing, interrupting and debugging work as with plain Python."""

from __future__ import annotations

import os
import pty
import select
import sys
import time

import pytest

INTERRUPT = b"\x03"


class Terminal:
    """`accel` with a terminal of its own."""

    def __init__(self, arguments, folder):
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execv(sys.executable, [sys.executable, "-m", "accel_cli.main", *map(str, arguments)])
        self.seen = b""

    def until(self, text, timeout=30.0):
        """Read until a text was printed."""
        deadline = time.monotonic() + timeout
        while text.encode() not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(deadline - time.monotonic(), 0))
            chunk = self._read() if ready else b""
            assert chunk, f"{text!r} did not come, only {self.seen!r}"
            self.seen += chunk

    def type(self, text):
        os.write(self.master, text)

    def end(self):
        """The exit code, and all that was printed."""
        while chunk := self._read():
            self.seen += chunk
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.seen.decode().replace("\r\n", "\n")

    def _read(self):
        try:
            return os.read(self.master, 65536)
        except OSError:
            # How Linux says that the other side has gone.
            return b""


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def open_terminal(*arguments):
        opened.append(Terminal(arguments, tmp_path))
        return opened[-1]

    yield open_terminal
    for one in opened:
        os.close(one.master)


COUNTING = """
    import signal, sys
    count = 0
    def interrupted(number, frame):
        global count
        count += 1
    signal.signal(signal.SIGINT, interrupted)
    print("ready", flush=True)
    while count == 0:
        signal.pause()
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    signal.pause()
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
    opened = terminal("launch", script("import time\nprint('ready', flush=True)\ntime.sleep(600)"))
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
    opened.type(b"p value + 1\n")
    opened.until("42")
    opened.type(b"c\n")
    code, output = opened.end()
    assert (code, output.count("went on")) == (0, count)
