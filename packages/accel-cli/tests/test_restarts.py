"""First causes, the restart policy, and runs that the local launcher starts again."""

from __future__ import annotations

import errno
import json
import os
import signal

import pytest

from accel_cli.launch.failure_record import failure_fingerprint
from accel_cli.launch.failures import Cause, Decision, Failure, Fingerprint, RestartPolicy, find_cause, first_failure
from accel_state.errors import NonFiniteStep

posix_only = pytest.mark.skipif(os.name != "posix", reason="signals")


def failed(rank, text, time, *, missed=(), errno=None, types=("RuntimeError", "Exception"), **fingerprint):
    """The failure of a process that recorded an error."""
    causes = [{"types": list(types), "errno": errno, "text": text}]
    found = {"type": types[0], "frame": "train.py:4 in main", "step": 0, "samples": [], "causes": causes, **fingerprint}
    extra = {"time": time, "missed": list(missed), "fingerprint": found}
    return Failure(rank, 1, {"message": f"{types[0]}: {text}", "extraInfo": extra})


def cause_of(*failures, codes=None, steps=None, **options):
    found = dict.fromkeys(range(4), 1) | {one.rank: one.code for one in failures} | (codes or {})
    return find_cause(failures, found, steps or {}, options.pop("samples", {}), **options)


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        ("error", failed(1, "wrong", 1.0, types=("ValueError", "Exception"))),
        ("final", failed(1, "No module named x", 1.0, types=("ModuleNotFoundError", "ImportError"))),
        ("final", failed(1, "x", 1.0, types=("Conflict", "SettingError", "AccelError", "ValueError"))),
        ("final", failed(1, "No space", 1.0, errno=errno.ENOSPC, types=("OSError", "Exception"))),
        ("final", failed(1, "denied", 1.0, errno=errno.EACCES, types=("PermissionError", "OSError"))),
        ("outside", failed(1, "stale", 1.0, errno=errno.ESTALE, types=("OSError", "Exception"))),
        ("outside", failed(1, "taken", 1.0, errno=errno.EADDRINUSE, types=("OSError", "Exception"))),
        ("outside", failed(1, "EADDRINUSE, port: 29500", 1.0, types=("DistNetworkError", "DistError"))),
        ("out of memory", failed(1, "CUDA out of memory. Tried to allocate 2.00 GiB", 1.0)),
        ("out of memory", failed(1, "", 1.0, types=("MemoryError", "Exception"))),
        ("outside", failed(1, "refused", 1.0, errno=errno.ECONNREFUSED, types=("ConnectionError", "OSError"))),
        ("killed", failed(1, "DataLoader worker (pid 7) is killed by signal: Killed.", 1.0)),
        ("data", failed(1, "out of memory", 1.0, types=("NonFiniteStep", "BadStep"), kind="data")),
        ("hardware", failed(1, "bad", 1.0, types=("SpikeStep", "BadStep"), kind="hardware")),
        ("killed", Failure(1, -9)),
        ("killed", Failure(1, 137)),
        ("final", Failure(1, -2)),
        ("error", Failure(1, -11)),
        ("error", Failure(1, 3)),
    ],
)
@posix_only
def test_kinds_of_causes(kind, failure):
    cause = cause_of(failure)
    assert (cause.kind, cause.rank) == (kind, 1)


def test_a_system_that_killed_for_memory_is_out_of_memory():
    assert cause_of(Failure(1, -9), oom_killed=True).kind == "out of memory"
    assert cause_of(Failure(1, -11), oom_killed=True).kind == "error"


def test_a_victim_is_never_the_cause():
    broken = failed(0, "[gloo/transport/tcp/pair.cc:537] Connection reset by peer", 1.0)
    own = failed(2, "wrong", 5.0, types=("ValueError", "Exception"))
    aborted = Failure(3, -6, ended=2.0)
    cause = cause_of(broken, own, aborted)
    assert (cause.kind, cause.rank, cause.victims) == ("error", 2, (0,))
    assert first_failure([broken, own, aborted]) is own


def test_the_process_that_was_missed_is_the_cause():
    waits = [failed(rank, "gather()", 1.0, missed=[1], types=("CollectiveError",)) for rank in (0, 2, 3)]
    left = cause_of(*waits, codes={1: 0}, steps={1: 7})
    assert (left.kind, left.rank, left.fingerprint.step, left.victims) == ("error", 1, 7, (0, 2, 3))
    hangs = cause_of(*waits, codes={1: None})
    assert (hangs.kind, hangs.rank) == ("hang", 1)


def test_an_error_that_an_agreement_passed_on_is_that_of_its_process():
    text = "Cannot save. Process 1 failed: OSError: [Errno 28] No space left on device"
    told = failed(0, text, 1.0, missed=[1], types=("CheckpointError", "AccelError"))
    for code in (None, 1):
        cause = cause_of(told, codes={1: code})
        assert (cause.kind, cause.rank, cause.victims) == ("final", 1, (0,))


def test_a_connection_of_the_script_is_its_own():
    types = ("ConnectionResetError", "ConnectionError", "OSError")
    reset = failed(0, "[Errno 104] Connection reset by peer", 2.0, errno=errno.ECONNRESET, types=types)
    broken = failed(1, "gloo/transport/tcp/pair.cc: Connection closed by peer", 1.0, missed=[0])
    cause = cause_of(reset, broken)
    assert (cause.kind, cause.rank, cause.victims) == ("outside", 0, (1,))


def test_samples_of_a_process_that_recorded_nothing():
    cause = cause_of(Failure(1, -11), samples={1: ["8", "9"]})
    assert cause.fingerprint.samples == ("8", "9")
    policy = RestartPolicy("auto", 20)
    policy.decide(cause_of(Failure(1, -11)))
    assert policy.decide(cause).reason == "the same failure occurred again without progress; samples in use: 8, 9"


def test_where_nobody_is_known_to_be_missed_no_process_is_the_cause():
    cause = cause_of(failed(0, "NCCL", 1.0), failed(1, "NCCL", 1.0), codes={2: 0, 3: 0})
    assert (cause.kind, cause.rank) == ("outside", None)
    alone = cause_of(failed(0, "NCCL timeout", 1.0), codes={1: None, 2: 0, 3: None})
    assert (alone.kind, alone.rank) == ("error", 2)


def test_a_crash_of_a_process_that_was_asked_to_end_meanwhile_counts():
    crashed = Failure(1, -11, stopped=True, ended=3.0)
    assert first_failure([failed(0, "Connection closed by peer", 2.0), crashed]) is crashed


def test_the_samples_of_two_failures_are_named():
    policy = RestartPolicy("auto", 20)
    first = Cause("error", 0, Fingerprint("ValueError", "a.py:1 in f", 4, ("40", "41")), "bad")
    assert policy.decide(first).restart
    again = Cause("error", 0, Fingerprint("KeyError", "a.py:2 in f", 9, ("41", "42")), "bad")
    assert policy.decide(again) == Decision(False, "two failures with the same samples: 41")


def test_the_record_of_a_bad_step_has_its_kind_and_its_samples():
    error = NonFiniteStep("Cannot make step 4.", "bad", kind="data", samples=("40", "41"))
    found = failure_fingerprint(error)
    assert (found["kind"], found["samples"]) == ("data", ["40", "41"])
    assert failure_fingerprint(ValueError("bad"))["kind"] == ""


def test_bad_steps_are_repeated_as_their_cause_allows():
    policy = RestartPolicy("auto", 20)
    assert policy.decide(failure("numerics", 40, "SpikeStep")).restart
    assert "without progress" in policy.decide(failure("numerics", 40, "SpikeStep")).reason
    assert policy.decide(failure("hardware", 50, "NonFiniteStep")).restart
    assert policy.decide(failure("hardware", 30, "NonFiniteStep")).restart


def test_the_same_samples_are_not_blamed_for_the_numerics():
    def spike(step):
        return Cause("numerics", 0, Fingerprint("SpikeStep", "a.py:1 in f", step, ("40", "41")), "bad")

    policy = RestartPolicy("auto", 20)
    assert policy.decide(spike(4)).restart
    assert policy.decide(spike(9)).restart
    reason = "the same failure occurred again without progress; samples in use: 40, 41"
    assert policy.decide(spike(9)) == Decision(False, reason)


def failure(kind="killed", step=0, name="SIGKILL"):
    return Cause(kind, 1, Fingerprint(name, step=step), "")


def test_the_same_failure_without_progress_ends_a_run():
    policy = RestartPolicy("auto", 20)
    assert policy.decide(failure("error", 4, "ValueError")).restart
    assert policy.decide(failure("error", 9, "ValueError")).restart
    assert policy.decide(failure("error", 9, "KeyError")).restart
    assert "without progress" in policy.decide(failure("error", 9, "ValueError")).reason


def test_a_transient_failure_may_come_at_other_steps():
    policy = RestartPolicy("auto", 20)
    assert [policy.decide(failure(step=step)).restart for step in (40, 10, 60, 60)] == [True, True, True, False]


def test_a_failure_at_the_start_is_not_repeated_for_ever():
    policy = RestartPolicy("auto", 1000)
    decisions = [policy.decide(failure("outside", 0, "port taken")) for _ in range(4)]
    assert [one.restart for one in decisions] == [True, True, True, False]
    assert [one.pause for one in decisions[:3]] == [1.0, 2.0, 4.0]


def test_pauses_grow_until_there_is_progress():
    policy = RestartPolicy("auto", 20)
    steps = (10, 9, 8, 30, 29)
    assert [policy.decide(failure(step=step)).pause for step in steps] == [0.0, 1.0, 2.0, 0.0, 0.0]


def test_a_second_hang_ends_a_run():
    policy = RestartPolicy("auto", 20)
    assert policy.decide(failure("hang", 5)).restart
    assert policy.decide(failure("hang", 50)) == Decision(False, "it hung for the second time")


def test_kinds_that_end_a_run_at_once():
    policy = RestartPolicy("auto", 20)
    full = Cause("final", 1, Fingerprint("OSError"), "OSError: No space left on device")
    assert policy.decide(full) == Decision(False, f"another attempt would end in the same way: {full.message}")
    assert policy.decide(failure("out of memory")).reason.startswith("out of memory: the same sizes would need")


def test_the_budget_and_the_policy():
    policy = RestartPolicy("auto", 2)
    assert [policy.decide(failure(step=step)).restart for step in (1, 2, 3)] == [True, True, False]
    assert RestartPolicy("never", 2).decide(failure()) == Decision(False, "restart_policy is never")


def test_a_folder_that_cannot_be_written_disturbs_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "run", tmp_path / "run"):
        policy = RestartPolicy("auto", 1)
        assert policy.after(failure(), 0.0, 0.0, str(folder), asked_to_end=False)
    assert json.loads((tmp_path / "run" / "failures.jsonl").read_text())["rank"] == 1


# ---------------------------------------------------------------------- launches

COUNTED = """
    import os, signal, sys, time
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    rank = int(os.environ.get("RANK", "0"))
"""
AUTO = ("launch", "--cpu", "--num_processes", "2", "--restart_policy", "auto", "--max_restarts", "5")


@posix_only
def test_a_killed_process_is_started_again(accel, script):
    body = (
        COUNTED
        + """
    if attempt == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    print("attempt", attempt)
    """
    )
    finished = accel(*AUTO, script(body))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("attempt 1\n") == 2
    assert "Process 1 of 2 failed first and was killed by signal 9" in finished.stderr
    assert "accel launch: Starting again: killed: restart 1 of 5.\n" in finished.stderr


def test_an_error_that_comes_again_ends_the_run(accel, script, tmp_path):
    body = (
        COUNTED
        + """
    if rank == 1:
        raise ValueError("wrong")
    """
    )
    finished = accel(*AUTO, script(body), tmp_path)
    assert finished.returncode == 1
    assert finished.stderr.count("ValueError: wrong\n") == 2
    assert finished.stderr.endswith(
        "accel launch: Not started again: the same failure occurred again without progress.\n"
    )


def test_an_import_that_fails_ends_the_run_at_once(accel, script):
    finished = accel(*AUTO, script("import no_such_module"))
    assert finished.returncode == 1
    assert finished.stderr.count(" failed first and ended with exit code 1.\n") == 1
    assert "Not started again: another attempt would end in the same way: ModuleNotFoundError: " in finished.stderr


def test_without_a_policy_nothing_is_said_or_repeated(accel, script):
    finished = accel("launch", "--cpu", script("raise SystemExit(3)"))
    assert finished.returncode == 3
    assert "tarted again" not in finished.stderr


@posix_only
def test_a_pause_ends_with_a_signal(start, script):
    body = (
        COUNTED
        + """
    if rank == 1:
        # The launcher may end the other process before that prints.
        print("begun", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    )
    running = start(*AUTO, script(body))
    # The longest pause of this failure.
    running.errors_until("Starting again in 2 s")
    running.process.send_signal(signal.SIGINT)
    finished = running.end()
    assert finished.returncode == 130
    assert finished.stderr.endswith("accel launch: ended by SIGINT.\n")


@posix_only
def test_a_signal_while_a_failed_attempt_ends_ends_the_run(start, script):
    body = (
        COUNTED
        + """
    if rank == 1:
        # The other process cannot be ended any more.
        open("deaf").close()
        os._exit(3)

    def end(number, frame):
        print("ending", flush=True)
        # Until the launcher has been asked to end.
        open("asked").close()
        sys.exit(1)

    signal.signal(signal.SIGTERM, end)
    open("deaf", "w").close()
    while True:
        time.sleep(0.05)
    """
    )
    program = script(body)
    for name in ("deaf", "asked"):
        os.mkfifo(program.parent / name)
    running = start(*AUTO, program)
    assert running.lines(1) == ["ending"]
    running.process.send_signal(signal.SIGINT)
    (program.parent / "asked").write_text("")
    finished = running.end()
    assert finished.stdout == "ending\n", finished.stderr
    # The launcher may read the signal only after it has seen both processes end.
    assert finished.returncode in (3, 130)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (("--restart_policy", "auto"), ("restart_policy=auto (--restart_policy)", "max_restarts=0", "--max_restarts")),
        (("--restart_policy", "sometimes"), ("restart_policy", "never", "auto")),
        (("--restart_policy", "auto", "--max_restarts", "-1"), ("max_restarts", "at least 0")),
        (
            ("--restart_policy", "auto", "--max_restarts", "2", "--launcher", "torchrun"),
            ("restart_policy=auto", "launcher=torchrun", "only counts restarts"),
        ),
    ],
)
def test_policies_that_are_refused(accel, script, options, texts):
    finished = accel("launch", "--cpu", *options, script("print('ran')"))
    assert (finished.returncode, finished.stdout) == (2, "")
    assert all(text in finished.stderr for text in texts), finished.stderr
    assert "Traceback" not in finished.stderr
