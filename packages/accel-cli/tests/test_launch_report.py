"""Which failure came first, what it means, and how it is told."""

from __future__ import annotations

import signal

import pytest

from accel_cli.launch.failures import Failure, first_failure, meaning, read_record, report, shell_code


def record(text="ValueError: wrong", time=None, trace="Traceback\nValueError: wrong\n", shown=False):
    return {"message": text, "extraInfo": {"py_callstack": trace, "timestamp": "5", "time": time, "shown": shown}}


def test_exit_codes_as_a_shell_shows_them():
    assert [shell_code(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]
    assert Failure(0, -9).exit_code == 137
    assert Failure(0, 3, record()).exit_code == 3
    assert Failure(0, None, record(), stopped=True).exit_code == 1
    assert Failure(0, -6, record()).exit_code == 1


def test_meaning_of_signals():
    assert meaning(9).startswith("signal 9 (SIGKILL): probably the machine ran out of memory")
    assert meaning(signal.SIGUSR1) == f"signal {int(signal.SIGUSR1)} (SIGUSR1)"
    assert meaning(63) == "signal 63"


def test_the_first_failure_is_the_cause_of_the_others():
    early, late = Failure(0, 1, record(time=5.0)), Failure(1, 1, record(time=4.5))
    assert first_failure([early, late]) is late
    killed = Failure(2, -9)
    assert first_failure([early, late, killed]) is killed
    ended = Failure(3, -15, stopped=True)
    assert first_failure([ended, early]) is early
    assert first_failure([ended]) is ended
    without_time = Failure(4, 1)
    assert first_failure([without_time, early]) is early


def waited(rank, missed, time):
    """The failure of a process that waited for others."""
    failure = Failure(rank, 1, record("CollectiveError: Cannot complete gather().", time))
    failure.record["extraInfo"]["missed"] = missed
    return failure


def test_a_process_that_waited_in_vain_is_not_the_cause(capsys):
    cause = Failure(1, 1, record(time=9.0))
    assert first_failure([waited(0, [1], 5.0), cause]) is cause
    left = Failure(1, 3)
    assert first_failure([waited(0, [1], 5.0), left]) is left
    report([waited(0, [5], 5.0), waited(1, [5], 6.0)], 8)
    said = capsys.readouterr().err
    assert said.startswith(
        "accel launch: Process 0 of 8 waited without success for process 5 and ended with exit code 1.\n"
    )
    report([waited(0, list(range(1, 20)), 5.0)], 20)
    assert "for process 1, 2, 3, 4, 5, 6, 7, 8 and others and" in capsys.readouterr().err
    assert waited(0, "all", 5.0).missed == []


def test_a_failure_whose_process_was_ended_may_still_be_the_first():
    recorded = Failure(0, -15, record(time=1.0), stopped=True)
    assert first_failure([recorded, Failure(1, 1, record(time=2.0))]) is recorded


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": 5', "null", '{"other": 1}'])
def test_error_files_that_cannot_be_read(tmp_path, text):
    path = tmp_path / "error.json"
    path.write_text(text)
    assert read_record(str(path)) is None
    assert read_record(str(tmp_path / "none.json")) is None


def test_error_files_of_torch(tmp_path):
    path = tmp_path / "error.json"
    path.write_text('{"message": "signalled"}')
    assert Failure(0, 1, read_record(str(path))).message == "signalled"
    path.write_text('{"message": {"message": "E: m", "extraInfo": {"py_callstack": "T", "timestamp": "7"}}}')
    failure = Failure(0, 1, read_record(str(path)))
    assert (failure.message, failure.trace, failure.time) == ("E: m", "T", 7.0)


def test_a_report_ends_with_the_traceback(capsys):
    report(
        [
            Failure(1, 1, record(time=1.0)),
            Failure(0, 1, record("RuntimeError: reset", 2.0)),
            Failure(2, -15, stopped=True),
        ],
        3,
    )
    assert capsys.readouterr().err.splitlines() == [
        "accel launch: Process 1 of 3 failed first and ended with exit code 1.",
        "  Process 0 failed too: RuntimeError: reset",
        "",
        "Traceback",
        "ValueError: wrong",
    ]


def test_a_traceback_that_was_shown_is_not_repeated(capsys):
    report([Failure(0, 1, record(shown=True))], 1)
    assert capsys.readouterr().err == (
        "accel launch: The script ended with exit code 1. Its traceback is above:\n  ValueError: wrong\n"
    )


def test_quiet_report_prints_the_traceback_only(capsys):
    report([Failure(0, 1, record())], 1, quiet=True)
    assert capsys.readouterr().err.split() == ["Traceback", "ValueError:", "wrong"]
    report([Failure(0, 3)], 1, quiet=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a.Missing: What was asked.\n  An obstacle.\n  A remedy.", "a.Missing: What was asked. An obstacle."),
        (
            "RuntimeError: Error(s) in loading:\n\tMissing key: x\n\tMore",
            "RuntimeError: Error(s) in loading: Missing key: x",
        ),
        ("ValueError: first\nsecond\nlast", "ValueError: first"),
        ('  File "job.py", line 1\n    1 +\n    ^\nSyntaxError: invalid syntax', "SyntaxError: invalid syntax"),
        ("KeyError: " + "k" * 10_000, "KeyError: " + "k" * 390 + " ..."),
    ],
)
def test_the_first_part_of_an_error_is_shown_in_the_summary(capsys, text, part):
    report([Failure(0, 1, record(time=1.0)), Failure(1, 1, record(text, time=2.0))], 2)
    assert f"  Process 1 failed too: {part}\n" in capsys.readouterr().err


def test_a_traceback_that_stands_above_is_summarised(capsys):
    report([Failure(0, 1, record("E: asked\n  obstacle\n  remedy", shown=True))], 2)
    assert capsys.readouterr().err.endswith("Its traceback is above:\n  E: asked obstacle\n")
