"""Runs an unchanged script in processes that are forked from this one, which has imported torch once.

A fork takes milliseconds where a new interpreter takes seconds. This process must not have started threads or used a
device, so the Python interface (`accel_check.parity`) starts a command of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import random
import re
import runpy
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel_state.errors import NotOffered, SettingError
from accel_state.network import get_free_port

if TYPE_CHECKING:
    from accel_check.recorder import StepRecorder
    from accel_check.resume_notes import ResumeNotes
    from accel_check.task import Task

__all__ = (
    "CheckedScript",
    "follow_sessions",
    "import_libraries",
    "run",
    "run_forked",
    "run_path",
)

_GRACE_S: Final = 60.0
"""Seconds that the other ranks have after the first one has ended."""
_POLL_INTERVAL_S: Final = 0.01
_TAIL_LINES: Final = 15
"""Lines of a run's output that are shown when it failed."""
_SET_PARENT_DEATH_SIGNAL: Final = 1
_PRELOADED_MODULES: Final = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel.distributed",
    "torch.utils.data.distributed",
)


_OWN_IMPORT: Final = re.compile(r"^\s*(import|from)\s+(accelerate|accel_|transformers)", re.MULTILINE)


class CheckedScript:
    """A script with its arguments.

    Args:
        path: the path of the script.
        arguments: its arguments.

    Raises:
        SettingError: there is no such file.
        NotOffered: this system cannot fork.
    """

    def __init__(self, path: str, arguments: Sequence[str] = ()) -> None:
        if not Path(path).is_file():
            raise SettingError(
                f"Cannot check the script {path!r}.", "There is no such file.", "Give the path of a script."
            )
        if not hasattr(os, "fork"):
            raise NotOffered(
                f"Cannot check the script {path!r}.", "This system cannot fork processes.", "Run the check on Linux."
            )
        self.path, self.arguments = path, tuple(arguments)

    def with_arguments(self, more: Sequence[str]) -> CheckedScript:
        """The script with further arguments."""
        return CheckedScript(self.path, [*self.arguments, *more])


def import_libraries(script: CheckedScript) -> None:
    """Import what the processes of a run need, so that each fork has it."""
    names = [*_PRELOADED_MODULES, "accel_check.recorder"]
    text = Path(script.path).read_text(encoding="utf-8", errors="replace")
    # The Trainer of transformers uses the library as well.
    if _OWN_IMPORT.search(text):
        own = ("accel_torch.accelerator", "accel_check.session_hook")
        names += own if importlib.util.find_spec("accel_torch") else ()
    for name in names:
        importlib.import_module(name)


def run(task: Task, script: CheckedScript, world: int, environment: Mapping[str, str], timeout: float) -> str | None:
    """Run a script in forked processes, and return why the run failed; None if it did not.

    Args:
        task: what the processes record.
        script: the script.
        world: the number of processes.
        environment: their variables, without those of the rank.
        timeout: seconds after which the run is stopped.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port()), "WORLD_SIZE": str(world)}
    place |= {"LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0"}
    shared = {**environment, **place}
    return run_forked(
        Path(task.folder), shared, range(world), lambda rank: _run_script(task, script, rank, world), timeout
    )


def run_forked(
    folder: Path, environment: Mapping[str, str], ranks: Iterable[int], body: Callable[[int], int], timeout: float
) -> str | None:
    """Run a function in a forked process for each rank, and return why it failed; None if it did not.

    Args:
        folder: folder for the output of the processes.
        environment: their variables, without those of the rank.
        ranks: the ranks.
        body: called with the rank in each process; returns its exit code.
        timeout: seconds after which they are stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    running: dict[int, int] = {}
    for rank in ranks:
        variables = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with warnings.catch_warnings():
            # The forked process does not use the threads of this one.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            _become_rank(folder, rank, variables, body)
        running[process] = rank
    try:
        codes = _wait(running, timeout)
    finally:
        _kill(running)
    failed = next((rank for rank, code in sorted(codes.items(), key=lambda one: one[1] < 0) if code), None)
    if failed is None:
        return None
    if codes[failed] == -signal.SIGKILL:
        return f"rank {failed} did not end within {timeout:g} s, or {_GRACE_S:g} s after another rank"
    output = (folder / f"output_{failed}.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([f"rank {failed} ended with exit code {codes[failed]}:", *output[-_TAIL_LINES:]])


def _wait(running: dict[int, int], timeout: float) -> dict[int, int]:
    """The exit codes by rank; -9 for a rank that had to be killed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while running and time.monotonic() < deadline:
        for process in list(running):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                _kill_group(process)
                codes[running.pop(process)] = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_INTERVAL_S)
    return codes | dict.fromkeys(running.values(), -signal.SIGKILL)


def _kill(running: Mapping[int, int]) -> None:
    for process in running:
        _kill_group(process)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)


def _kill_group(process: int) -> None:
    """Kill what a rank started, such as the workers of its loaders."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _become_rank(folder: Path, rank: int, variables: Mapping[str, str], body: Callable[[int], int]) -> None:
    """Run a function as one rank, and end this process."""
    code = 1
    try:
        os.setpgid(0, 0)
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        output = os.open(folder / f"output_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        silent = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((silent, 0), (output, 1), (output, 2)):
            os.dup2(old, new)
        os.environ.clear()
        os.environ.update(variables)
        code = body(rank)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run_script(task: Task, script: CheckedScript, rank: int, world: int) -> int:
    import numpy as np
    import torch

    from accel_check.one_process import shrink_world
    from accel_check.recorder import StepRecorder, StopScript
    from accel_check.resume_notes import ResumeNotes
    from accel_check.scratch import redirect_saves

    torch.set_num_threads(1)
    if task.resume is None:
        # Ranks that begin with equal generators by accident would hide that the script does not seed them.
        torch.manual_seed(4001 + rank)
    seed = 4001 + rank if task.resume is None else random.SystemRandom().randrange(2**31)
    random.seed(seed)
    np.random.seed(seed)
    if task.is_reference:
        shrink_world()
    recorder = StepRecorder(task, script.path, rank, world)
    notes = None if task.resume is None else ResumeNotes(recorder, task.resume)
    recorder.follower = notes
    recorder.install()
    redirect_saves(recorder)
    follow_sessions(recorder, notes)
    code = 0
    try:
        run_path(script)
    except StopScript:
        pass
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    recorder.finish()
    _meet(Path(task.folder), rank, world)
    return code


def run_path(script: CheckedScript) -> None:
    """Run a script in this process, as `python script arguments` does."""
    sys.argv = [script.path, *script.arguments]
    sys.path[0] = str(Path(script.path).resolve().parent)
    runpy.run_path(str(Path(script.path).resolve()), run_name="__main__")


def _meet(folder: Path, rank: int, world: int) -> None:
    """Wait until every rank has recorded its last step, since this one may serve the store or hold their messages."""
    (folder / f"done_{rank}").touch()
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and any(not (folder / f"done_{one}").exists() for one in range(world)):
        time.sleep(_POLL_INTERVAL_S)


def follow_sessions(recorder: StepRecorder, notes: ResumeNotes | None) -> None:
    """Follow the sessions of this process, if accel-torch is installed.

    Args:
        recorder: the recorder of this process.
        notes: the notes of a check of a resumed run; None in another check.
    """
    if importlib.util.find_spec("accel_torch") is None:
        return
    from accel_torch.hooks import PROCESS_HOOKS, Hook

    class Follow(Hook):
        """Is replaced by the hook that follows sessions when there is one: other scripts are spared its imports."""

        def configure(self, options: Any) -> Any:
            """Called with the arguments of the first Accelerator."""
            from accel_check.session_hook import SessionHook

            hook = SessionHook(recorder, notes)
            PROCESS_HOOKS[PROCESS_HOOKS.index(self)] = hook
            return hook.configure(options)

    PROCESS_HOOKS.append(Follow())
