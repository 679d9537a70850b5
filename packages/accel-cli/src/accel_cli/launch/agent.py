"""Runs torch.distributed.run for the launcher, and reports failures in the launcher's format.

    python agent.py --nnodes=1 --nproc-per-node=2 --standalone runner.py script train.py

This program replaces the launcher's process, so that signals and exit codes need no relay. It imports torch, which the
launcher itself never does.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from socket import socketpair
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_cli.launch.failures import Failure
    from accel_cli.launch.hangs import HangWatch
    from accel_cli.launch.port import Port

__all__ = ("main",)

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_POLL_INTERVAL_S = 1.0
_STOP_BYTE = b"\0"


def main(arguments: Sequence[str]) -> int:
    """Start the processes, wait for their end, and return the exit code of the process that failed first."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    from accel_cli.launch.failures import Failure, first_failure, report, shell_code
    from accel_cli.launch.run_script import PARENT_VARIABLE
    from accel_state.exit_codes import NOTICE_VARIABLE, RESUME
    from accel_state.network import SECRET_VARIABLE, new_secret
    from accel_state.watch.goodput import close_accounts
    from accel_state.watch.runs import make_launch_folder, remove_launch_folder

    if "--nnodes=1" in arguments:
        os.environ[SECRET_VARIABLE] = new_secret()
    arguments, port = _seated(arguments)
    # The processes inherit this variable, and end when this process is killed.
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    try:
        with ExitStack() as stack:
            folder = make_launch_folder()
            stack.callback(remove_launch_folder, folder)
            # torch copies the error file of the process that failed first to this path, and warns if there is none.
            os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, "error.json")
            os.environ[NOTICE_VARIABLE] = notice = os.path.join(folder, "resume")
            _pass_on_usr1()
            hangs = _hang_watch(folder, arguments)
            stack.callback(close_accounts, hangs.folder)
            try:
                with _looking(hangs):
                    run(list(arguments))
            except SignalException:
                if hangs.over:
                    print(hangs.ended, file=sys.stderr, flush=True)
                    return 1
                # torch has waited for the processes, and does not return their exit codes.
                if not os.path.exists(notice):
                    raise
                report([Failure(0, RESUME)], 1)
                return RESUME
    except ChildFailedError as error:
        failures = [_failure(rank, failed) for rank, failed in error.failures.items()]
        first = first_failure(failures)
        report(failures, _world_size(failures, arguments), first)
        return first.exit_code
    except SignalException as error:
        print(f"accel launch: ended by {error.sigval.name}.", file=sys.stderr, flush=True)
        return shell_code(-int(error.sigval))
    finally:
        if port is not None:
            port.close()
    return 0


def _seated(arguments: Sequence[str]) -> tuple[list[str], Port | None]:
    """Arguments for what torch would derive from the host name, and the port, reserved until it is closed."""
    own = list(arguments)
    options = _values(own)
    _choose_interface(options)
    if options.get("rdzv-backend") != "c10d" or "rdzv-endpoint" not in options:
        return own, None
    from accel_cli.launch.addresses import seat_at

    host, _, port = options["rdzv-endpoint"].rpartition(":")
    seat = seat_at(host.strip("[]"), int(port))
    more = []
    conf = options.get("rdzv-conf", "")
    if "is_host=" not in conf and seat.serves is not None:
        more.append(f"--rdzv-conf={conf}{',' if conf else ''}is_host={str(seat.serves).lower()}")
    if seat.address is not None and "PET_LOCAL_ADDR" not in os.environ:
        more.append(f"--local-addr={seat.address}")
    # If an option occurs twice, the last one is used; the program follows the options.
    end = next(index for index, argument in enumerate(own) if not argument.startswith("--"))
    return [*own[:end], *more, *own[end:]], seat.port


def _hang_watch(folder: str, arguments: Sequence[str]) -> HangWatch:
    from accel_cli.launch.hangs import HangWatch
    from accel_cli.launch.run_script import STATUS_FOLDER_VARIABLE
    from accel_cli.launch.settings import SupervisionSettings
    from accel_state.settings.environ import from_environment

    settings = from_environment(SupervisionSettings)
    options = _values(arguments)
    alone = options.get("nnodes") == "1" and options.get("nproc-per-node", "").isdecimal()
    size = int(options["nproc-per-node"]) if alone else None
    hangs = HangWatch(folder, settings.hang_report_after, settings.hang_timeout, size)
    os.environ[STATUS_FOLDER_VARIABLE] = hangs.folder
    return hangs


@contextmanager
def _looking(hangs: HangWatch) -> Iterator[None]:
    """Watch the processes while torch waits for them; a run that hangs for too long ends as after SIGTERM.

    torch handles signals by itself. The interpreter also writes their numbers to a socket, so that the report shows the
    processes before torch ends them.
    """
    from accel_cli.launch.signals import ENDING

    reader, writer = socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def look() -> None:
        while not select.select([reader], [], [], _POLL_INTERVAL_S)[0]:
            if hangs.look():
                os.kill(os.getpid(), signal.SIGTERM)
                return
        if any(number in ENDING for number in reader.recv(4096)):
            hangs.tell()

    thread = threading.Thread(target=look, name="accel-hangs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.send(_STOP_BYTE)
        thread.join()
        reader.close()
        writer.close()


def _pass_on_usr1() -> None:
    """Forward SIGUSR1, which batch systems send before the time limit, to the processes, as torch does with SIGTERM."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def passed_on(number: int, frame: FrameType | None) -> None:
        raise SignalException(
            "A batch system has announced that the time limit is near.", sigval=signal.Signals(number)
        )

    usr1 = getattr(signal, "SIGUSR1", None)
    if usr1 is not None and signal.getsignal(usr1) is signal.SIG_DFL:
        signal.signal(usr1, passed_on)


def _failure(rank: int, failed: Any) -> Failure:
    from accel_cli.launch.failures import Failure, read_record

    return Failure(rank, failed.exitcode, read_record(failed.error_file), stopped=failed.exitcode == -15)


def _choose_interface(options: Mapping[str, str]) -> None:
    """Set the network interface for gloo between several machines, unless the variable is already set."""
    host = options.get("master-addr") or options.get("rdzv-endpoint", "").rpartition(":")[0].strip("[]")
    if options.get("nnodes") == "1" or not host or os.environ.get(_INTERFACE_VARIABLE):
        return
    from accel_cli.launch.addresses import interface_towards

    name = interface_towards(host)
    if name is not None:
        os.environ[_INTERFACE_VARIABLE] = name


def _values(arguments: Sequence[str]) -> dict[str, str]:
    """Values of the options of torch.distributed.run, which come before the program."""
    options = itertools.takewhile(lambda argument: argument.startswith("--"), arguments)
    return dict(option.removeprefix("--").split("=", 1) for option in options if "=" in option)


def _world_size(failures: Sequence[Failure], arguments: Sequence[str]) -> int:
    counts = _values(arguments)
    return int(counts.get("nnodes", 1)) * int(counts.get("nproc-per-node", len(failures)))


if __name__ == "__main__":
    # Python puts the folder of this file first; nothing must be imported from there by accident.
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    sys.exit(main(sys.argv[1:]))
