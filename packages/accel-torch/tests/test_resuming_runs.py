"""Runs that are asked to end, or whose processes are killed, end with the losses of an undisturbed run."""

from __future__ import annotations

import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_plugins.checkpoint import boundaries
from accel_plugins.checkpoint.boundaries import Preemption
from accel_state import PartialState, current
from accel_state.errors import SettingError
from accel_state.exit_codes import RESUME
from accel_testing.fresh import fresh
from accel_testing.processes import Finished, Processes, run_command
from accel_torch import ProjectConfiguration

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals"),
    pytest.mark.usefixtures("preloaded_python"),
]

SCRIPT = str(Path(__file__).with_name("resuming_script.py"))
STEPS = 40


def launch(folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> Finished:
    command = [sys.executable, "-m", "accel_cli.main", "launch", "--cpu", "--num_processes", "2", *options, SCRIPT]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    folder.mkdir(exist_ok=True)
    return run_command([*command, str(folder), str(STEPS), *arguments], timeout=250, env=environment)


def run_script(folder: Path, *arguments: str) -> None:
    sys.argv = [SCRIPT, str(folder), str(STEPS), *arguments]
    # One process is one that nobody has launched, and ends at the next step.
    with fresh(launched=os.environ["WORLD_SIZE"] != "1"):
        runpy.run_path(SCRIPT, run_name="__main__")


def start(count: int, folder: Path, *arguments: str) -> list[int]:
    """Run the script in so many new processes; with which codes they would exit."""
    folder.mkdir(exist_ok=True)
    with Processes(count) as group:
        outcomes = group.outcomes(run_script, folder, *arguments)
    codes = []
    for outcome in outcomes:
        left = re.search(r"^SystemExit: (\d+)$", outcome.error or "", re.MULTILINE)
        assert outcome.ok or left, str(outcome)
        codes.append(int(left[1]) if left else 0)
    return codes


def losses(folder: Path, rank: int) -> dict[int, str]:
    """The losses by step; those of steps that were trained again must be the same, or come later."""
    lines = [line.split() for line in (folder / f"losses_{rank}").read_text().splitlines()]
    return {int(step): loss for step, loss in lines}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[int, str]]]:
    """The losses of runs on one and on two processes, of each process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found = {}
    for count in (1, 2):
        assert start(count, folder / str(count)) == [0] * count
        found[count] = [losses(folder / str(count), rank) for rank in range(count)]
    return found


@pytest.mark.parametrize(("how", "at"), [("term", 7), ("usr1", 24)])
def test_a_process_that_is_asked_to_end_saves_and_resumes(
    tmp_path: Path, undisturbed: dict[int, list[dict[int, str]]], how: str, at: int
) -> None:
    assert start(1, tmp_path / "run", how, "0", str(at)) == [RESUME]
    assert list(losses(tmp_path / "run", 0)) == list(range(1, at + 2))

    assert start(1, tmp_path / "run") == [0]
    assert losses(tmp_path / "run", 0) == undisturbed[1][0]
    assert len((tmp_path / "run" / "losses_0").read_text().splitlines()) == STEPS


def test_all_processes_end_at_one_step_when_one_is_asked_to(
    tmp_path: Path, undisturbed: dict[int, list[dict[int, str]]]
) -> None:
    assert start(2, tmp_path / "run", "term", "1", "5") == [RESUME, RESUME]
    ended = [losses(tmp_path / "run", rank) for rank in range(2)]
    assert len(ended[0]) == len(ended[1]) < STEPS

    assert start(2, tmp_path / "run") == [0, 0]
    assert [losses(tmp_path / "run", rank) for rank in range(2)] == undisturbed[2]


def ask_to_end(folder: Path, program: list[str], number: signal.Signals) -> tuple[int, str]:
    """Start a run of two processes that does not end, and send whoever starts them a signal once both train."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-m", *program, SCRIPT, str(folder), "1000000"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        until = time.monotonic() + 250
        while not all((folder / f"losses_{rank}").exists() for rank in range(2)) and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(number)
        _, told = process.communicate(timeout=250)
    return process.returncode, told


@pytest.mark.parametrize(
    ("launcher", "number"),
    [("local", signal.SIGTERM), ("torchrun", signal.SIGTERM), ("torchrun", signal.SIGUSR1)],
)
def test_the_launcher_passes_the_signal_and_the_answer_on(
    tmp_path: Path, launcher: str, number: signal.Signals
) -> None:
    program = ["accel_cli.main", "launch", "--num_processes", "2", "--launcher", launcher, "--grace_period", "100"]
    code, told = ask_to_end(tmp_path, program, number)
    assert code == RESUME, told
    assert "launch it again to resume" in told
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]


def test_processes_of_torchrun_itself_save_and_end(tmp_path: Path) -> None:
    program = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, told = ask_to_end(tmp_path, program, signal.SIGTERM)
    # torchrun has its own exit code whenever it is asked to end.
    assert code != 0
    assert "SIGKILL" not in told
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]
    assert len(losses(tmp_path, 0)) == len(losses(tmp_path, 1))


def kill_and_restart(folder: Path, rank: int, at: int) -> Finished:
    options = ("--max_restarts", "1", "--monitor_interval", "0.1")
    return launch(folder, "kill", str(rank), str(at), options=options)


def test_a_killed_process_leads_to_a_restart_that_resumes(
    tmp_path: Path, undisturbed: dict[int, list[dict[int, str]]]
) -> None:
    done = kill_and_restart(tmp_path / "run", 1, 13)

    assert done.returncode == 0, done.stderr
    assert [losses(tmp_path / "run", rank) for rank in range(2)] == undisturbed[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_of_twenty_restarts_resume(tmp_path: Path, undisturbed: dict[int, list[dict[int, str]]]) -> None:
    chance = random.Random(7)
    for number in range(20):
        rank, at = chance.randrange(2), chance.randrange(STEPS)
        done = kill_and_restart(tmp_path / str(number), rank, at)
        assert done.returncode == 0, (number, rank, at, done.stderr)
        assert [losses(tmp_path / str(number), each) for each in range(2)] == undisturbed[2], (number, rank, at)


def test_saving_on_a_signal_needs_a_name_for_the_checkpoint() -> None:
    with pytest.raises(SettingError, match="automatic_checkpoint_naming"):
        ProjectConfiguration(save_on_signal=True)


def test_copies_of_a_signal_are_ignored_and_a_late_one_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    with fresh():
        PartialState(cpu=True)
        watching = Preemption(current.process(), lambda: None)
        before = signal.getsignal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGTERM) is before
        monkeypatch.setattr(boundaries, "_SIGNAL_PATIENCE_S", -1.0)
        monkeypatch.setattr(boundaries.signal, "raise_signal", ended.append)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(SystemExit) as leaving:
            watching.between_batches()
        assert leaving.value.code == RESUME
        watching.leave()


def uneven(ahead: int, signalled: int) -> int:
    """Processes that are at different boundaries, as inside accumulation windows; where they end."""
    PartialState(cpu=True)
    process = current.process()
    watching = Preemption(process, lambda: None, deadline=250.0)
    passed = 0
    try:
        for _ in range(ahead * process.rank):
            watching.between_batches()
            passed += 1
        if process.rank == signalled:
            signal.raise_signal(signal.SIGTERM)
        while passed < 1_000_000:
            passed += 1
            time.sleep(0.01)
            watching.between_batches()
    except SystemExit:
        return passed
    finally:
        watching.leave()
        process.transport.barrier()
    return -1


@pytest.mark.parametrize("signalled", [0, 1])
@pytest.mark.parametrize("ahead", [0, 3])
def test_processes_that_are_apart_end_at_the_same_boundary(two: Processes, ahead: int, signalled: int) -> None:
    first, second = two.run(uneven, ahead, signalled)
    assert first == second >= 3 * (ahead > 0)
