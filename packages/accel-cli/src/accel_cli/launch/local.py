"""The local launcher, and the supervision of the processes that any launcher starts on this machine.

It forwards signals, ends the other processes when one fails (SIGTERM, a grace period, SIGKILL), and returns the exit
code of the process that failed first. If the launcher is killed, Linux kills the processes too; see `runner`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from accel_cli.launch.failures import (
    PORT_TAKEN,
    Cause,
    Failure,
    Fingerprint,
    RestartPolicy,
    find_cause,
    first_failure,
    read_record,
    report,
    shell_code,
)
from accel_cli.launch.interface import LaunchPlan
from accel_cli.launch.outer_launch import PLACE_VARIABLES
from accel_cli.launch.output import Relay
from accel_cli.launch.port import Port
from accel_cli.launch.run_script import PARENT_VARIABLE, STATUS_FOLDER_VARIABLE
from accel_cli.launch.settings import MachineSettings, SupervisionSettings
from accel_cli.launch.signals import ENDING, FORWARDED, GroupWitness, Inbox
from accel_state.errors import LaunchError, SettingError
from accel_state.exit_codes import RESUME
from accel_state.network import SECRET_VARIABLE, loopback_variables, new_secret
from accel_state.proc import oom_kills, with_variable
from accel_state.untrusted import printable
from accel_state.watch.runs import (
    make_launch_folder,
    remove_abandoned_folders,
    remove_launch_folder,
    status_folder_in,
)

if TYPE_CHECKING:
    from accel_cli.launch.hangs import HangWatch
    from accel_cli.launch.interface import LaunchRequest

__all__ = ("Local", "Supervisor", "environment_lines")

# Seconds between checks for error files.
_POLL_INTERVAL_S: Final = 1.0

# Seconds after which a killed process counts as hanging in a system call, of a driver or a network file system.
_KILL_TIMEOUT_S: Final = 10.0

# Seconds to wait for the rest of the output if another process, which still runs, has inherited the stream.
_OUTPUT_TIMEOUT_S: Final = 2.0


class Supervisor:
    """Executes a plan on this machine; a launcher that starts processes here subclasses it and defines `plan`.

    If the plan's `argv` starts one rank (`starts_ranks`), each process gets the variables of its rank.
    """

    def __init__(self) -> None:
        self._inbox = Inbox()

    def run(self, plan: LaunchPlan) -> int:
        """Start the processes, wait for them, and return the exit code of the run; see `Launcher`.

        Raises:
            SettingError: the port is in use.
            LaunchError: a process could not be started.
        """
        base = {name: value for name, value in plan.inherited.items() if name not in plan.removed}
        base.update(plan.environment)
        folder = make_launch_folder()
        if not os.path.isdir(folder):
            problem = f"No folder for temporary files has room for {os.path.basename(folder)}."
            print(
                f"accel launch: {problem} Errors and hangs of this run are not recorded.", file=sys.stderr, flush=True
            )
        try:
            if plan.environment_file:
                base[plan.environment_file] = _environment_file(folder, plan.environment)
            with self._inbox as inbox:
                return self._attempts(plan, base, folder, inbox)
        finally:
            remove_launch_folder(folder)

    def _attempts(self, plan: LaunchPlan, environment: Mapping[str, str], folder: str, inbox: Inbox) -> int:
        """Start the processes, and restart them as long as the restart policy allows it."""
        policy = RestartPolicy(plan.restart_policy, plan.max_restarts, oom_kills(), plan.quiet)
        code = 0
        for attempt in itertools.count():
            processes = _Processes(
                plan, {**environment, _ATTEMPT_VARIABLE: str(attempt)} if attempt else environment, folder
            )
            code, refused = self._accounted(processes, inbox, attempt)
            if (code == 0 and refused is None) or not plan.starts_ranks:
                break
            if not processes.restart(policy, refused):
                if refused is not None:
                    raise refused
                break
            ended_by = policy.wait(inbox.wait, ENDING)
            if ended_by is not None:
                code = shell_code(-ended_by)
                break
            processes.forget()
        _record_in_run(plan, "over")
        return code

    def _accounted(self, processes: _Processes, inbox: Inbox, attempt: int) -> tuple[int, SettingError | None]:
        """Run one attempt; return its exit code and, if the port is temporarily in use, the error."""
        unwritable = _record_in_run(processes.plan, "launch")
        if unwritable is not None and not attempt:
            problem = f"{unwritable}. The records of the run, its time and its failures may be lost."
            print(printable(f"accel launch: Cannot write to the run's folder: {problem}"), file=sys.stderr, flush=True)
        code, refused = 0, None
        try:
            code = self._attempt(processes, inbox)
        except SettingError as error:
            # A previous run may not have released the port yet.
            if processes.plan.restart_policy == "never" or re.search(PORT_TAKEN, str(error)) is None:
                raise
            refused = error
        if code:
            processes.close_accounts()
        return code, refused

    def _attempt(self, processes: _Processes, inbox: Inbox) -> int:
        plan = processes.plan
        if plan.processes == 1 or not plan.starts_ranks:
            return processes.run({}, inbox)
        with Port(plan.port, plan.port_origin) as port:
            store = {"MASTER_ADDR": plan.address, "MASTER_PORT": str(port.number), SECRET_VARIABLE: new_secret()}
            return processes.run(store, inbox)

    def stop(self) -> None:
        """End the run as SIGTERM does."""
        self._inbox.post(signal.SIGTERM)


def _record_in_run(plan: LaunchPlan, event: str) -> OSError | None:
    """Record in the folder of the run, if it has one, that the run begins or ends; return the error if that is lost."""
    if not plan.project_dir or not plan.starts_ranks:
        return None
    from accel_state.watch.goodput import launcher_line

    return launcher_line(plan.project_dir, event)


class Local(Supervisor):
    """Starts the processes of a run on this machine; see `Launcher`."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Plan one process, or one for each device, on this machine."""
        settings = request.settings
        machines = settings.instance(MachineSettings)
        supervision = settings.instance(SupervisionSettings)
        local = request.local_processes()
        inside = loopback_variables(request.machine.environ) if local > 1 else {}
        return LaunchPlan(
            request.environment(local, **inside),
            (request.machine.python, *request.program),
            "local",
            processes=local,
            world_size=local,
            starts_ranks=True,
            address=machines.main_process_ip or "127.0.0.1",
            port=machines.main_process_port or None,
            port_origin=settings["main_process_port"].origin,
            # Without an address here, the variable is that of another run, if it is set.
            removed=PLACE_VARIABLES if machines.main_process_ip else (*PLACE_VARIABLES, "MASTER_ADDR"),
            inherited=request.machine.environ,
            grace_period=supervision.grace_period,
            prefix_output=supervision.prefix_output,
            hang_report_after=supervision.hang_report_after,
            hang_timeout=supervision.hang_timeout,
            quiet=request.quiet,
            restart_policy=supervision.restart_policy,
            max_restarts=settings["max_restarts"].value,
            project_dir=os.path.abspath(folder) if (folder := settings["project_dir"].value) else "",
        )


_ATTEMPT_VARIABLE: Final = "TORCHELASTIC_RESTART_COUNT"
"""Variable for the number of restarts; torchrun sets it too."""


_PLAIN_WORD: Final = re.compile(r"[^;\n<> \t]+")


def _environment_file(folder: str, environment: Mapping[str, str]) -> str:
    path = os.path.join(folder, "environment")
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(environment_lines(environment))
    except OSError as error:
        raise LaunchError(
            "Cannot write the variables for the processes of other machines.",
            f"The system reports: {error}.",
            "Free some space in the folder for temporary files, or set TMPDIR to another one.",
        ) from error
    return path


def environment_lines(environment: Mapping[str, str]) -> Iterator[str]:
    """Lines of the file with variables; a value that a shell would split is omitted."""
    for name, value in sorted(environment.items()):
        if _PLAIN_WORD.fullmatch(name) and _PLAIN_WORD.fullmatch(value):
            yield f"{name}={value}{os.linesep}"


class _Process:
    """One started process."""

    def __init__(
        self, rank: int, popen: subprocess.Popen[bytes], error_file: str, grouped: bool, relay: Relay | None
    ) -> None:
        self.rank = rank
        self.popen = popen
        self.error_file = error_file
        self.grouped = grouped
        self.relay = relay
        self.told_to_end = False
        self.ended: float | None = None

    @property
    def alive(self) -> bool:
        is_alive = self.popen.poll() is None
        if not is_alive and self.ended is None:
            self.ended = time.time()
        return is_alive

    def signal(self, number: int) -> None:
        """Send a signal to the process, and to its group if it leads one."""
        try:
            if self.grouped:
                os.killpg(self.popen.pid, number)
            elif self.alive:
                self.popen.send_signal(number)
        except (ProcessLookupError, PermissionError):
            # The group has no processes any more.
            pass

    def failure(self) -> Failure | None:
        """Its failure, or None if it has not failed."""
        code = self.popen.poll()
        if code == 0:
            return None
        record = read_record(self.error_file)
        if code is None and not _ends_by_error(record, self.popen.pid):
            return None
        return Failure(self.rank, code, record, self.told_to_end, None if self.alive else self.ended)


def _ends_by_error(record: Mapping[str, object] | None, pid: int) -> bool:
    """Whether an error file shows that the script has failed, although its process may still be running."""
    extra = (record or {}).get("extraInfo")
    return isinstance(extra, dict) and extra.get("pid") == pid


class _Processes:
    """Supervises the processes of one plan, from start to end."""

    def __init__(self, plan: LaunchPlan, environment: Mapping[str, str], folder: str) -> None:
        self.plan = plan
        self._began = time.time()
        self._count = plan.processes if plan.starts_ranks else 1
        self._environment = environment
        self._folder = folder
        self._quiet = plan.quiet
        self._processes: list[_Process] = []
        self._deadline: float | None = None
        self._signalled: int | None = None
        self._witness: GroupWitness | None = None
        self._first: Failure | None = None
        self._hung = ""
        """Why the run was ended although no process failed; empty if it was not."""
        self._held_up_by: list[int] = []
        self._status_folder = status_folder_in(folder)

    def run(self, store: Mapping[str, str], inbox: Inbox) -> int:
        """Start the processes, and wait until the last one has ended."""
        with ExitStack() as stack:
            stack.callback(self._kill)
            if self._count == 1:
                self._witness = stack.enter_context(GroupWitness(FORWARDED))
            for rank in range(self._count):
                self._processes.append(self._start(rank, store))
            # Further imports and preparations run after the start, so that they do not delay the processes.
            self._watch_hangs = self._hang_watch()
            remove_abandoned_folders()
            self._watch(inbox)
        if not self.plan.starts_ranks and self._failures():
            self._end_left_behind(inbox)
        self._finish_output()
        return self._result()

    def _end_left_behind(self, inbox: Inbox) -> None:
        """End the remaining processes of a program that ended before them, such as an engine's launcher."""
        deadline = time.monotonic() + self.plan.grace_period
        signalled: set[int] = set()
        while left := with_variable(STATUS_FOLDER_VARIABLE, self._status_folder):
            late = time.monotonic() - deadline
            for pid in left if late >= 0 else left - signalled:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM if late < 0 else signal.SIGKILL)
            signalled |= left
            if late > _KILL_TIMEOUT_S:
                print(f"accel launch: process {min(left)} hangs in the system.", file=sys.stderr)
                return
            if not set(ENDING).isdisjoint(inbox.wait(_POLL_INTERVAL_S / 10)):
                deadline = time.monotonic()

    def _hang_watch(self) -> HangWatch:
        from accel_cli.launch.hangs import HangWatch

        plan = self.plan
        # Another program starts the processes itself, possibly on several machines.
        supervision = (plan.processes, self._codes_of_ended) if plan.starts_ranks else (None, dict)
        return HangWatch(self._folder, plan.hang_report_after, plan.hang_timeout, *supervision)

    def _start(self, rank: int, store: Mapping[str, str]) -> _Process:
        plan = self.plan
        error_file = os.path.join(self._folder, f"{rank}.json")
        place = {"TORCHELASTIC_ERROR_FILE": error_file, STATUS_FOLDER_VARIABLE: self._status_folder, **store}
        if plan.starts_ranks:
            place[PARENT_VARIABLE] = str(os.getpid())
        if self._count > 1:
            size = str(self._count)
            place |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            place["GROUP_RANK"] = "0"
        pipe = subprocess.PIPE if plan.prefix_output else None
        # A single process keeps the terminal, for debuggers; each of several gets a group, which can be ended whole.
        grouped = os.name == "posix" and self._count > 1
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
            failure = f"Cannot start process {rank} of {self._count}: {' '.join(plan.argv[:3])}."
            raise LaunchError(
                failure, f"The system reports: {error}.", "Check the Python interpreter and the limits (ulimit -a)."
            ) from None
        relay = Relay(popen, f"[rank {rank}] ") if plan.prefix_output else None
        return _Process(rank, popen, error_file, grouped, relay)

    def _watch(self, inbox: Inbox) -> None:
        """Wait until no process is left."""
        while any(process.alive for process in self._processes):
            timeout = (
                _POLL_INTERVAL_S
                if self._deadline is None
                else min(_POLL_INTERVAL_S, max(self._deadline - time.monotonic(), 0.0))
            )
            for number in inbox.wait(timeout):
                self._forward(number)
            if self._first is None and self._signalled is None and not self._hung:
                self._notice_failure(inbox)
                self._notice_hang()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._kill()
                self._deadline = None
        self._read_again(inbox)

    def _read_again(self, inbox: Inbox) -> None:
        """Handle signals that have arrived since the inbox was read; one may be what has ended a process."""
        for number in inbox.wait(0.0):
            self._forward(number)

    def _forward(self, number: int) -> None:
        reached = self._witness is not None and self._witness.saw(number)
        if number not in ENDING:
            if not reached:
                self._signal_all(number)
            return
        if self._signalled is not None:
            # A second signal ends the processes at once.
            self._kill()
            return
        if self._first is None:
            self._watch_hangs.look()
            self._watch_hangs.tell()
        self._signalled = number
        self._deadline = time.monotonic() + self.plan.grace_period
        if self._first is None and not reached:
            self._signal_all(number)

    def _signal_all(self, number: int) -> None:
        for process in self._processes:
            if process.alive:
                process.signal(number)

    def _notice_failure(self, inbox: Inbox) -> None:
        """After a process has failed, ask the others to end."""
        failures = self._failures()
        if failures:
            self._read_again(inbox)
        if not failures or self._signalled is not None:
            return
        self._first = first_failure(failures)
        self._deadline = time.monotonic() + self.plan.grace_period
        failed = {failure.rank for failure in failures}
        for process in self._processes:
            # A process that is ending with an error may run its exit handlers.
            if process.rank not in failed and process.alive:
                process.told_to_end = True
                process.signal(signal.SIGTERM)

    def _notice_hang(self) -> None:
        """Report processes that wait long in a collective; ask all to end after the timeout, or if it cannot end."""
        if self._first is not None:
            return
        if self._watch_hangs.look():
            self._hung = self._watch_hangs.ended
        elif ranks := self._watch_hangs.ended_early(self._codes_of_ended()):
            names = f"Process {ranks[0]} has" if len(ranks) == 1 else f"Processes {', '.join(map(str, ranks))} have"
            self._hung = f"accel launch: {names} ended (exit code 0) while the others wait for all processes."
        if self._hung:
            self._held_up_by = self._watch_hangs.held_up_by
            self._deadline = time.monotonic() + self.plan.grace_period
            for process in self._processes:
                process.told_to_end = process.alive
            self._signal_all(signal.SIGTERM)

    def _codes_of_ended(self) -> dict[int, int]:
        codes = {process.rank: process.popen.poll() for process in self._processes}
        return {rank: code for rank, code in codes.items() if code is not None}

    def restart(self, policy: RestartPolicy, refused: SettingError | None) -> bool:
        """Whether the processes of this failed attempt are restarted; `refused` says that the port was in use."""
        from accel_state.watch.runs import folder_of_output

        ended = time.monotonic()
        if refused is not None:
            taken = Cause("outside", None, Fingerprint("port taken"), " ".join(str(refused).split()))
            return policy.after(taken, self._began, ended, self.plan.project_dir, False)
        saved = any(process.popen.poll() == RESUME for process in self._processes)
        if saved or (self._signalled is not None and self._first is None):
            # It ended on request, or saved its state in order to be resumed.
            return False
        cause = self._cause(policy.killed_for_memory())
        folder = self.plan.project_dir or folder_of_output(self._status_folder)
        return policy.after(cause, self._began, ended, folder, self._signalled is not None)

    def _cause(self, oom_killed: bool) -> Cause:
        from accel_state.watch.status import read_records

        codes = {one.rank: None if one.told_to_end else one.popen.poll() for one in self._processes}
        records = {one.rank: one for one in read_records(self._status_folder)}
        steps = {rank: one.run_step for rank, one in records.items()}
        samples = {rank: one.samples for rank, one in records.items()}
        return find_cause(self._failures(), codes, steps, samples, self._held_up_by, self._hung, oom_killed)

    def close_accounts(self) -> None:
        """Write the last lines of the time accounts of processes that were killed."""
        from accel_state.watch.goodput import close_accounts

        ended = {one.rank: one.ended or time.time() for one in self._processes if not one.alive}
        close_accounts(self._status_folder, ended)

    def forget(self) -> None:
        """Remove the files that the processes of this attempt have written for the launcher."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                os.unlink(process.error_file)
        with contextlib.suppress(OSError):
            for name in os.listdir(self._status_folder):
                os.unlink(os.path.join(self._status_folder, name))

    def _failures(self) -> list[Failure]:
        failures = (process.failure() for process in self._processes)
        return [failure for failure in failures if failure is not None]

    def _kill(self) -> None:
        """Kill all remaining processes of a run that did not end by itself."""
        ended_well = all(process.popen.poll() == 0 for process in self._processes)
        if ended_well and self._signalled is None:
            return
        for process in self._processes:
            process.told_to_end = process.told_to_end or process.alive
            process.signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        for process in self._processes:
            try:
                process.popen.wait(_KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                print(f"accel launch: process {process.popen.pid} hangs in the system.", file=sys.stderr)

    def _finish_output(self) -> None:
        deadline = time.monotonic() + _OUTPUT_TIMEOUT_S
        for process in self._processes:
            if process.relay is not None:
                process.relay.finish(max(deadline - time.monotonic(), 0.0))

    def _result(self) -> int:
        failures = self._failures()
        if self._hung:
            print(self._hung, file=sys.stderr, flush=True)
            return 1
        if not failures:
            return 0
        if self._signalled is not None and self._first is None:
            return self._ended_by_signal(failures, self._signalled)
        first = first_failure(failures)
        report(failures, self._count, first, self._quiet)
        return first.exit_code

    def _ended_by_signal(self, failures: list[Failure], number: int) -> int:
        """The exit code after a request to end: that of a process, or that of the signal if it killed the process."""
        own = [failure for failure in failures if failure.code is not None and failure.code > 0]
        if not self._quiet:
            print(f"accel launch: ended by {signal.Signals(number).name}.", file=sys.stderr, flush=True)
        if own:
            explained = [failure for failure in own if failure.record is not None or failure.code == RESUME]
            if explained:
                report(explained, self._count, quiet=self._quiet)
            return own[0].exit_code
        return shell_code(-number)
