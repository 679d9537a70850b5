"""Passes a program to a process that has already imported torch; see `accel_testing.preloaded`.

Every interpreter with this folder in PYTHONPATH imports this file when it starts; the file imports only the standard
library. The interpreter passes on its open files, environment and working folder, forwards signals, and exits as the
program does.
"""

from __future__ import annotations

import os
import sys

_PARENT = "ACCEL_LAUNCHER_PID"
"""Pid of the launcher; this process must end with it, see `accel_cli.launch.run_script`."""


_MODULES = ("torch.distributed.run",)
"""Modules that import torch immediately."""

_IMPORTS = (
    *("import torch", "from torch", "from accel_state import", "import accelerate", "from accelerate"),
    *("accel_bigmodel", "accel_cli.launch.notebook", "accel_data", "accel_ops", "accel_plugins", "accel_torch"),
)
"""Texts of commands that import torch, or a package that imports it."""


def _program(arguments: list[str]) -> list[str] | None:
    """The program and its arguments; None if Python was started in another way."""
    rest = arguments[1:] if arguments[:1] == ["-u"] else arguments
    first, second = (*rest, "", "")[:2]
    # multiprocessing starts its helper processes with a command.
    imports = any(text in second for text in _IMPORTS)
    command = first == "-c" and imports and not second.startswith("from multiprocessing")
    module = first == "-m" and second in _MODULES
    return rest if command or module or first.endswith(".py") else None


def _hand_over(address: str, arguments: list[str]) -> None:
    """Run the program in another process, and end with it; return if that process no longer exists."""
    import array
    import contextlib
    import pickle
    import signal
    import socket
    import struct
    import threading

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        return
    _die_with_launcher()
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    kept = []
    for file in files:
        with contextlib.suppress(OSError):
            if os.get_inheritable(file):
                kept.append(file)
    umask = os.umask(0)
    os.umask(umask)
    ignored = [int(number) for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    start = {
        "arguments": arguments,
        "unbuffered": sys.orig_argv[1] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED")),
        "command": sys.orig_argv,
        "path": sys.path,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "files": kept,
        "umask": umask,
        "ignored": ignored,
        "processors": os.sched_getaffinity(0),
    }

    forwarded = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    forwarded -= set(ignored)
    # Handlers would be nested if many signals arrived at the same time.
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)

    def forward() -> None:
        while True:
            number = signal.sigwait(forwarded)
            # The program, and with it the listener, may have ended a moment ago.
            with contextlib.suppress(OSError):
                connection.send(struct.pack("i", number))

    connection.sendmsg([pickle.dumps(start)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", kept))])
    try:
        threading.Thread(target=forward, daemon=True).start()
        answer = connection.recv(4)
        code = struct.unpack("i", answer)[0] if answer else 255
        if code < 0:
            with contextlib.suppress(OSError):
                signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
            # The forwarding thread must not receive it.
            signal.pthread_kill(threading.get_ident(), -code)
        os._exit(code)
    finally:
        # After an error the interpreter would run the program again.
        os._exit(255)


def _die_with_launcher() -> None:
    launcher = os.environ.pop(_PARENT, "")
    if launcher:
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
        if os.getppid() != int(launcher):
            os._exit(128 + signal.SIGKILL)


_ADDRESS, _, _PREFIX = os.environ.get("PRELOADED_PYTHON", "").partition("|")
_ARGUMENTS = _program(sys.orig_argv[1:])
if sys.prefix == _PREFIX and _ARGUMENTS is not None:
    _hand_over(_ADDRESS, _ARGUMENTS)
