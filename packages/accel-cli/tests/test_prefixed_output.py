"""What `--prefix_output` passes on: every byte, in lines of bounded length."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import pytest

from accel_cli.launch.output import Relay


@pytest.fixture
def relayed(capfdbinary):
    """The output of a program as the relay passes it on, and the most memory that this took."""

    def run(program):
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        tracemalloc.start()
        try:
            relay = Relay(process, "[rank 0] ")
            relay.finish(80.0)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
        return capfdbinary.readouterr().out, peak

    return run


def test_a_line_without_an_end_is_passed_on_in_bounded_memory(relayed):
    length = 2**24
    out, peak = relayed(f"print('x' * {length}, end='')")
    assert out.count(b"x") == length
    assert peak < 2**21
    first, *further = out.splitlines()
    assert first.startswith(b"[rank 0] x")
    assert all(line.startswith(b"[rank 0]+x") for line in further)


def test_a_line_after_a_long_one_begins_with_the_usual_prefix(relayed):
    out, _ = relayed("print('x' * 100_000); print('next')")
    assert out.endswith(b"x\n[rank 0] next\n")


def test_progress_bars_and_foreign_line_ends(relayed):
    out, _ = relayed(
        "import sys, time; out = sys.stdout.buffer\n"
        "for piece in (b'10%\\r', b'20%\\r', b'\\n', b'\\r\\n', b'a\\r\\nb'):\n"
        "    out.write(piece); out.flush(); time.sleep(0.2)"
    )
    assert out == b"[rank 0] 10%\r[rank 0] 20%\r\n[rank 0] \r\n[rank 0] a\r\n[rank 0] b\n"
