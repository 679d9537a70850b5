"""The spawner: starts the processes of one machine, looks after them, and leaves none behind.

It forwards signals, ends the other processes when one fails (SIGTERM, a grace period, SIGKILL), and returns the exit
code of the one that failed first. Should it be killed itself, the system kills the processes (Linux; see `runner`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from accel_cli.launch.deepspeed import environment_lines
from accel_cli.launch.hangs import HangWatch
from accel_cli.launch.output import Relay
from accel_cli.launch.parts import LaunchPlan
from accel_cli.launch.ports import Port
from accel_cli.launch.report import Failure, first_failure, read_record, report, shell_code
from accel_cli.launch.runner import PARENT_VARIABLE
from accel_cli.launch.signals import ENDING, Inbox
from accel_state.errors import LaunchError
from accel_state.exit_codes import RESUME
from accel_state.network import SECRET_VARIABLE, new_secret
from accel_state.run_status.find import PREFIX

__all__ = ("run",)

# The runner whose processes are children of this one.
_DIRECT: Final = "spawner"

# How often error files are looked for when nothing else happens.
_TICK: Final = 1.0

# A killed process that is still there after so long hangs inside the system, in a driver or a network file system.
_LAST_PATIENCE: Final = 10.0

# How long the rest of the output is waited for when a process has left its output to one that lives on.
_OUTPUT_PATIENCE: Final = 2.0


@dataclass
class _Process:
    """One started process."""

    rank: int
    popen: subprocess.Popen[bytes]
    error_file: str
    grouped: bool
    relay: Relay | None = None
    told_to_end: bool = False
    recorded: Failure | None = field(default=None)

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def signal(self, number: int) -> None:
        """Signal the process, and with it what it has started when it leads a group of its own."""
        try:
            if self.grouped:
                os.killpg(self.popen.pid, number)
            elif self.alive:
                self.popen.send_signal(number)
        except (ProcessLookupError, PermissionError):
            # Nobody is left in the group.
            pass

    def failure(self) -> Failure | None:
        """How it failed, or None while it has not."""
        code = self.popen.poll()
        if code == 0:
            return None
        record = read_record(self.error_file)
        if code is None and not _ends_by_error(record, self.popen.pid):
            return None
        return Failure(self.rank, code, record, stopped=self.told_to_end)


def _ends_by_error(record: Mapping[str, object] | None, pid: int) -> bool:
    """Whether an error file says that the script is over, though its process may still be leaving."""
    extra = (record or {}).get("extraInfo")
    return isinstance(extra, dict) and extra.get("pid") == pid


def run(plan: LaunchPlan, environ: Mapping[str, str], port_origin: str = "", quiet: bool = False) -> int:
    """Start what the plan says on this machine, wait for it, and return the exit code of the run.

    Args:
        plan: the plan; its runner is not "torchrun".
        environ: the launcher's own variables.
        port_origin: who asked for the plan's port.
        quiet: report nothing but the traceback of the process that failed first.

    Raises:
        SettingError: the port is in use.
        LaunchError: a process could not be started.
    """
    base = {name: value for name, value in environ.items() if name not in plan.removed}
    base.update(plan.environment)
    folder = tempfile.mkdtemp(prefix=PREFIX)
    try:
        if plan.environment_file:
            base[plan.environment_file] = _environment_file(folder, plan.environment)
        if plan.processes == 1:
            return _Spawner(plan, base, folder, quiet).run({})
        with Port(plan.port, port_origin) as port:
            store = {"MASTER_ADDR": plan.address, "MASTER_PORT": str(port.number), SECRET_VARIABLE: new_secret()}
            return _Spawner(plan, base, folder, quiet).run(store)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment_file(folder: str, environment: Mapping[str, str]) -> str:
    path = os.path.join(folder, "environment")
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(environment_lines(environment))
    return path


class _Spawner:
    def __init__(self, plan: LaunchPlan, environment: Mapping[str, str], folder: str, quiet: bool) -> None:
        self._plan = plan
        self._environment = environment
        self._folder = folder
        self._quiet = quiet
        self._processes: list[_Process] = []
        self._deadline: float | None = None
        self._signalled: int | None = None
        self._first: Failure | None = None
        self._hung = False
        # Another starter has processes of its own, maybe on several machines.
        known = (plan.processes, self._codes_of_ended) if plan.runner == _DIRECT else (None, dict)
        self._watch_hangs = HangWatch(folder, plan.hang_report_after, plan.hang_timeout, *known)

    def run(self, store: Mapping[str, str]) -> int:
        """Start the processes and stay until the last has ended."""
        with Inbox() as inbox:
            try:
                for rank in range(self._plan.processes):
                    self._processes.append(self._start(rank, store))
                self._watch(inbox)
            finally:
                self._kill()
        self._finish_output()
        return self._result()

    def _start(self, rank: int, store: Mapping[str, str]) -> _Process:
        plan = self._plan
        error_file = os.path.join(self._folder, f"{rank}.json")
        place = {"TORCHELASTIC_ERROR_FILE": error_file, **self._watch_hangs.variables, **store}
        if plan.runner == _DIRECT:
            place[PARENT_VARIABLE] = str(os.getpid())
        if plan.processes > 1:
            size = str(plan.processes)
            place |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            place["GROUP_RANK"] = "0"
        pipe = subprocess.PIPE if plan.prefix_output else None
        # A process alone keeps the terminal, for debuggers; several get groups of their own, to be ended as a whole.
        grouped = os.name == "posix" and plan.processes > 1
        try:
            popen = subprocess.Popen(
                plan.argv,
                env={**self._environment, **place},
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                start_new_session=grouped,
            )
        except OSError as error:
            asked = f"Cannot start process {rank} of {plan.processes}: {' '.join(plan.argv[:3])}."
            raise LaunchError(asked, f"The system refused: {error}.", "Check the interpreter and limits.") from None
        relay = Relay(popen, f"[rank {rank}] ") if plan.prefix_output else None
        return _Process(rank, popen, error_file, grouped, relay)

    def _watch(self, inbox: Inbox) -> None:
        """Stay until no process is left."""
        while any(process.alive for process in self._processes):
            timeout = _TICK if self._deadline is None else min(_TICK, max(self._deadline - time.monotonic(), 0.0))
            for number in inbox.wait(timeout):
                self._forward(number)
            if self._first is None and self._signalled is None and not self._hung:
                self._notice_failure()
                self._notice_hang()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._kill()
                self._deadline = None

    def _forward(self, number: int) -> None:
        if number not in ENDING:
            self._signal_all(number)
            return
        if self._signalled is not None:
            # Asked a second time: no more patience.
            self._kill()
            return
        if self._first is None:
            self._watch_hangs.look()
            self._watch_hangs.tell()
        self._signalled = number
        self._deadline = time.monotonic() + self._plan.grace_period
        if self._first is None and not self._reaches_processes_itself(number):
            self._signal_all(number)

    def _reaches_processes_itself(self, number: int) -> bool:
        """Whether the terminal sent an interrupt to the process as well, which shares the launcher's group."""
        if number != signal.SIGINT or self._plan.processes > 1:
            return False
        try:
            return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
        except (OSError, ValueError, AttributeError):
            return False

    def _signal_all(self, number: int) -> None:
        for process in self._processes:
            if process.alive:
                process.signal(number)

    def _notice_failure(self) -> None:
        """Once a process has failed, ask the others to end."""
        failures = self._failures()
        if not failures:
            return
        self._first = first_failure(failures)
        self._deadline = time.monotonic() + self._plan.grace_period
        failed = {failure.rank for failure in failures}
        for process in self._processes:
            # One that is leaving because of an error may finish what it does at its end.
            if process.rank not in failed and process.alive:
                process.told_to_end = True
                process.signal(signal.SIGTERM)

    def _notice_hang(self) -> None:
        """Report processes that wait in a collective for long, and ask all to end when that is too long."""
        if self._first is None and self._watch_hangs.look():
            self._hung = True
            self._deadline = time.monotonic() + self._plan.grace_period
            for process in self._processes:
                process.told_to_end = process.alive
            self._signal_all(signal.SIGTERM)

    def _codes_of_ended(self) -> dict[int, int]:
        codes = {process.rank: process.popen.poll() for process in self._processes}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _failures(self) -> list[Failure]:
        found = (process.failure() for process in self._processes)
        return [failure for failure in found if failure is not None]

    def _kill(self) -> None:
        """End for good whatever is left of a run that did not end by itself."""
        ended_well = all(process.popen.poll() == 0 for process in self._processes)
        if ended_well and self._signalled is None:
            return
        for process in self._processes:
            process.told_to_end = process.told_to_end or process.alive
            process.signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        for process in self._processes:
            try:
                process.popen.wait(_LAST_PATIENCE)
            except subprocess.TimeoutExpired:
                print(f"accel launch: process {process.popen.pid} hangs in the system.", file=sys.stderr)

    def _finish_output(self) -> None:
        deadline = time.monotonic() + _OUTPUT_PATIENCE
        for process in self._processes:
            if process.relay is not None:
                process.relay.finish(max(deadline - time.monotonic(), 0.0))

    def _result(self) -> int:
        failures = self._failures()
        if self._hung:
            print(self._watch_hangs.ended, file=sys.stderr, flush=True)
            return 1
        if not failures:
            return 0
        if self._signalled is not None and self._first is None:
            return self._ended_by_signal(failures, self._signalled)
        rank = self._first.rank if self._first is not None else first_failure(failures).rank
        first = next(failure for failure in failures if failure.rank == rank)
        report(failures, self._plan.processes, first, self._quiet)
        return first.exit_code

    def _ended_by_signal(self, failures: list[Failure], number: int) -> int:
        """The launcher was asked to end: a process's own exit code counts, death by the signal is the signal's."""
        own = [failure for failure in failures if failure.code is not None and failure.code > 0]
        if not self._quiet:
            print(f"accel launch: ended by {signal.Signals(number).name}.", file=sys.stderr, flush=True)
        if own:
            told = [failure for failure in own if failure.record is not None or failure.code == RESUME]
            if told:
                report(told, self._plan.processes, quiet=self._quiet)
            return own[0].exit_code
        return shell_code(-number)
