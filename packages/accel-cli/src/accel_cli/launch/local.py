"""The local launcher, and the supervision of the processes that any launcher starts on this machine.

It forwards signals, ends the other processes when one fails (SIGTERM, a grace period, SIGKILL), and returns the exit
code of the process that failed first. If the launcher is killed, Linux kills the processes too; see `runner`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final

from accel_cli.launch.backends import check_several_devices, selection_of
from accel_cli.launch.check import check_own_launcher
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
from accel_cli.launch.group_signals import GroupWitness
from accel_cli.launch.interface import LaunchPlan, LaunchRequest
from accel_cli.launch.outer_launch import PLACE_VARIABLES
from accel_cli.launch.rendezvous import Port
from accel_cli.launch.run_script import PARENT_VARIABLE, STATUS_FOLDER_VARIABLE
from accel_cli.launch.settings import MachineSettings, SupervisionSettings
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

__all__ = (
    "ENDING",
    "FORWARDED",
    "Inbox",
    "Local",
    "PrefixedLines",
    "Relay",
    "Supervisor",
    "environment_lines",
    "local_processes",
)

# Seconds between checks for error files.
_TICK: Final = 1.0

# Seconds after which a killed process counts as hanging in a system call, of a driver or a network file system.
_LAST_PATIENCE: Final = 10.0

# Seconds to wait for the rest of the output if another process, which still runs, has inherited the stream.
_OUTPUT_PATIENCE: Final = 2.0


class Supervisor:
    """Executes a plan on this machine; a launcher that starts processes here subclasses it and defines `plan`.

    If the plan's `argv` starts one rank (`starts_ranks`), each process gets the variables of its rank.
    """

    def __init__(self) -> None:
        self._inbox: Inbox | None = None
        self._stopped = False

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
            told = f"No folder for temporary files has room for {os.path.basename(folder)}."
            print(f"accel launch: {told} Errors and hangs of this run are not recorded.", file=sys.stderr, flush=True)
        try:
            if plan.environment_file:
                base[plan.environment_file] = _environment_file(folder, plan.environment)
            with Inbox() as inbox:
                self._inbox = inbox
                if self._stopped:
                    self.stop()
                return self._attempts(plan, base, folder, inbox)
        finally:
            self._inbox = None
            remove_launch_folder(folder)

    def _attempts(self, plan: LaunchPlan, environment: Mapping[str, str], folder: str, inbox: Inbox) -> int:
        """Start the processes, and restart them as long as the restart policy allows it."""
        policy = RestartPolicy(plan.restart_policy, plan.max_restarts, oom_kills(), plan.quiet)
        code = 0
        for attempt in itertools.count():
            processes = _Processes(plan, {**environment, _ATTEMPT: str(attempt)} if attempt else environment, folder)
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
            told = f"{unwritable}. The records of its time and its failures may be lost."
            print(printable(f"accel launch: Cannot write to the run's folder: {told}"), file=sys.stderr, flush=True)
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
        self._stopped = True
        if self._inbox is not None:
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
        check_own_launcher(settings)
        machines = settings.instance(MachineSettings)
        supervision = settings.instance(SupervisionSettings)
        local = local_processes(request)
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


def local_processes(request: LaunchRequest) -> int:
    """Number of processes to start on this machine.

    Raises:
        SettingError: the kind of run needs several devices, and the machine has only one.
    """
    settings = request.settings
    machines, selection = settings.instance(MachineSettings), selection_of(settings)
    if machines.num_processes is not None:
        return machines.num_processes // machines.num_machines
    if settings["cpu"].value or (selection is not None and selection.alone):
        return 1
    if machines.gpu_ids not in (None, "all"):
        return len([part for part in str(machines.gpu_ids).split(",") if part.strip()])
    count = request.machine.devices()
    check_several_devices(settings, count * machines.num_machines)
    return count


_ATTEMPT: Final = "TORCHELASTIC_RESTART_COUNT"
"""Variable for the number of restarts; torchrun sets it too."""


_PLAIN: Final = re.compile(r"[^;\n<> \t]+")


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
        if _PLAIN.fullmatch(name) and _PLAIN.fullmatch(value):
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
        asked: set[int] = set()
        while left := with_variable(STATUS_FOLDER_VARIABLE, self._status_folder):
            late = time.monotonic() - deadline
            for pid in left if late >= 0 else left - asked:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM if late < 0 else signal.SIGKILL)
            asked |= left
            if late > _LAST_PATIENCE:
                print(f"accel launch: process {min(left)} hangs in the system.", file=sys.stderr)
                return
            if not set(ENDING).isdisjoint(inbox.wait(_TICK / 10)):
                deadline = time.monotonic()

    def _hang_watch(self) -> HangWatch:
        from accel_cli.launch.hangs import HangWatch

        plan = self.plan
        # Another program starts the processes itself, possibly on several machines.
        known = (plan.processes, self._codes_of_ended) if plan.starts_ranks else (None, dict)
        return HangWatch(self._folder, plan.hang_report_after, plan.hang_timeout, *known)

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
            asked = f"Cannot start process {rank} of {self._count}: {' '.join(plan.argv[:3])}."
            raise LaunchError(
                asked, f"The system reports: {error}.", "Check the Python interpreter and the limits (ulimit -a)."
            ) from None
        relay = Relay(popen, f"[rank {rank}] ") if plan.prefix_output else None
        return _Process(rank, popen, error_file, grouped, relay)

    def _watch(self, inbox: Inbox) -> None:
        """Wait until no process is left."""
        while any(process.alive for process in self._processes):
            timeout = _TICK if self._deadline is None else min(_TICK, max(self._deadline - time.monotonic(), 0.0))
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
        found = (process.failure() for process in self._processes)
        return [failure for failure in found if failure is not None]

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
            told = [failure for failure in own if failure.record is not None or failure.code == RESUME]
            if told:
                report(told, self._count, quiet=self._quiet)
            return own[0].exit_code
        return shell_code(-number)


def _existing(*names: str) -> tuple[int, ...]:
    return tuple(int(getattr(signal, name)) for name in names if hasattr(signal, name))


ENDING: Final = _existing("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals that ask the run to end."""

FORWARDED: Final = (*ENDING, *_existing("SIGUSR1", "SIGUSR2"))
"""Signals that the launcher passes on to the processes."""

_CHILD_ENDED: Final = _existing("SIGCHLD")

# Without a signal for the end of a process, the launcher polls.
_LONGEST_WAIT: Final = float("inf") if _CHILD_ENDED else 0.1


class Inbox:
    """A context manager that collects signals; a signal that was ignored before (`nohup`) stays ignored."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[int, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> Inbox:
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*FORWARDED, *_CHILD_ENDED):
            if number in _CHILD_ENDED or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, _already_in_the_inbox)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()

    def post(self, number: int) -> None:
        """Add a signal, from any thread; without effect after the context has ended."""
        try:
            self._writer.send(bytes([number]))
        except (OSError, ValueError):
            # The run has ended.
            return

    def wait(self, timeout: float) -> list[int]:
        """Signals to forward since the last call; returns early if a signal arrives or a process ends."""
        if not select.select([self._reader], [], [], min(timeout, _LONGEST_WAIT))[0]:
            return []
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return []
        return [number for number in numbers if number in FORWARDED]


def _already_in_the_inbox(number: int, frame: object) -> None:
    """Do nothing: for a signal with a handler, the interpreter itself writes the number into the inbox."""


_CHUNK: Final = 65536
_LONGEST: Final = 65536
"""Largest number of bytes of an incomplete line in memory; a longer line is forwarded in parts of about this length."""

_LINE_ENDS: Final = (b"\n", b"\r")


class Relay:
    """Copies the output and the errors of a process line by line; a progress bar's `\\r` ends a line as well.

    A line of more than 64 KiB is split into several. With the prefix `[rank 0] `, the parts after the first begin with
    `[rank 0]+`, because lines of other processes may be printed between them.

    Args:
        process: started with pipes.
        prefix: prefix of each line; a continuation replaces its last character.
    """

    def __init__(self, process: subprocess.Popen[bytes], prefix: str) -> None:
        self._prefix = prefix.encode()
        pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        self._threads = [
            threading.Thread(target=self._copy, args=(source, target.buffer), daemon=True)
            for source, target in pairs
            if source is not None
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, deadline_seconds: float) -> None:
        """Wait for the rest of the output, at most this number of seconds for each stream."""
        for thread in self._threads:
            thread.join(deadline_seconds)

    def _copy(self, source: IO[bytes], target: IO[bytes]) -> None:
        lines = PrefixedLines(self._prefix)
        try:
            while chunk := source.read1(_CHUNK):  # type: ignore[attr-defined]
                _write(target, lines.take(chunk))
            _write(target, lines.rest())
        except (OSError, ValueError):
            # The reader of the launcher's own output has closed it.
            source.close()


class PrefixedLines:
    """The lines of one stream: complete lines with prefixes, and the start of the next line.

    Args:
        prefix: prefix of each line; a continuation replaces its last character.
    """

    def __init__(self, prefix: bytes) -> None:
        self._first = self._prefix = prefix
        self._further = prefix[:-1] + b"+"
        self._start = bytearray()
        self._after_return = False

    def take(self, chunk: bytes) -> bytes:
        """The text that can be written after a chunk has arrived."""
        ended: list[bytes] = []
        for piece in chunk.splitlines(keepends=True):
            if piece == b"\n" and self._after_return and not self._start:
                # The second character of a line end; the first one was written with its line.
                ended.append(piece)
                self._after_return = False
                continue
            self._start += piece
            self._after_return = piece.endswith(b"\r")
            if piece.endswith(_LINE_ENDS):
                ended.append(self._line())
                self._prefix = self._first
            elif len(self._start) >= _LONGEST:
                ended.append(self._line() + b"\n")
                self._prefix = self._further
        return b"".join(ended)

    def rest(self) -> bytes:
        """A last line without a line end."""
        return self._line() + b"\n" if self._start else b""

    def _line(self) -> bytes:
        line = self._prefix + self._start
        self._start.clear()
        return line


def _write(target: IO[bytes], lines: bytes) -> None:
    if lines:
        target.write(lines)
        target.flush()
