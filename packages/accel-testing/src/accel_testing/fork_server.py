"""A process that has imported torch, from which the processes of tests are forked.

Importing torch takes seconds, forking takes milliseconds. It needs `os.fork` and the passing of file descriptors
(Linux); on other systems each process of a test is a new interpreter.
"""

from __future__ import annotations

import array
import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import IO, Any, NoReturn, TypedDict

import torch

from accel_state.settings.environ import publish
from accel_testing.fresh import fresh

__all__ = ("REQUEST_BYTES", "ForkServer", "Forked", "Start", "main", "serve")

REQUEST_BYTES = 1 << 20
"""Maximum size of a request in bytes: environment and path of a process, and names of modules."""

_MOST_FILES = 64
"""Maximum number of open files in a request."""

_FREE_FILES = 500
"""Descriptors from this number on are not in use."""

_ALWAYS_PRELOADED = (
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
    "torch.nn.parallel.distributed",
)
"""Modules that take a process a second or more, and that most processes import: `torch._dynamo` with any optimizer."""

_PRELOADED = ("torch.", "accel_")
"""Modules of these packages are imported before a fork if the process of the tests has imported them."""

_NOT_PRELOADED = ("torch._inductor", "accel_testing.simulated_")
"""Modules that start threads, which are missing in forked processes, or that register a device with torch."""

_STATUS = struct.Struct("i")


class Start(TypedDict):
    """How an interpreter was started, for the process that runs the script instead."""

    arguments: list[str]
    """The program (the path of a script, or `-m` or `-c` and a module or command), and its arguments."""
    unbuffered: bool
    command: list[str]
    path: list[str]
    folder: str
    environment: dict[str, str]
    files: list[int]
    """Numbers of its open files, in the order in which they are passed."""
    umask: int
    ignored: list[int]
    """Numbers of the signals that it ignores."""
    processors: set[int]


class Forked:
    """A process that the server forked, with the methods of `subprocess.Popen` that the tests use.

    Args:
        pid: its process id; it is the leader of a new session.
        status: a pipe from which its exit code can be read when it has ended.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status: IO[bytes] | None = os.fdopen(status, "rb", buffering=0)

    def fileno(self) -> int:
        """A descriptor that can be read from when it has ended; valid as long as `poll` returns None."""
        return self._status.fileno() if self._status is not None else -1

    def poll(self) -> int | None:
        """Its exit code (negative for a signal), or None while it runs."""
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        found = self._read(timeout)
        if found is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return found

    def kill(self) -> None:
        """Send it SIGKILL, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _read(self, timeout: float | None) -> int | None:
        if self._status is not None and select.select([self._status], [], [], timeout)[0]:
            answer = self._status.read(_STATUS.size)
            # If there is no answer, the server itself was killed, and its processes with it.
            self.returncode = _STATUS.unpack(answer)[0] if answer else -signal.SIGKILL
            self._status.close()
            self._status = None
        return self.returncode


class ForkServer:
    """Starts a process that imports torch and forks others. It ends with the process that started it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "accel_testing.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
                | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._owner = os.getpid()
        self._one_request = threading.Lock()
        self._preloaded: set[str] = set()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        """Whether this process can send it requests."""
        return self._owner == os.getpid() and self._process.poll() is None

    def fork(self, calls: int, answers: int, output: int, environment: Mapping[str, str]) -> Forked:
        """Fork a process that serves calls; see `serve`.

        Args:
            calls: the descriptor that it reads calls from.
            answers: the descriptor that it writes answers to.
            output: the descriptor that its standard output and error go to.
            environment: its environment variables.
        """
        return self._fork((dict(environment), sys.path, os.getcwd()), (calls, answers, output), ())

    def run(self, start: Start, files: Sequence[int], modules: Sequence[str]) -> Forked:
        """Fork a process that runs a script in place of an interpreter.

        Args:
            start: how the interpreter was started.
            files: its open files, in the order of `start["files"]`.
            modules: modules that the process has already imported.
        """
        return self._fork(start, files, modules)

    def _fork(self, request: Any, files: Sequence[int], modules: Sequence[str]) -> Forked:
        status, theirs = os.pipe()
        fds = array.array("i", (theirs, *files))
        with self._one_request:
            message = pickle.dumps((request, self._to_preload(modules)))
            self._socket.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            pid = _STATUS.unpack(self._socket.recv(_STATUS.size))[0]
        os.close(theirs)
        return Forked(pid, status)

    def _to_preload(self, modules: Sequence[str]) -> list[str]:
        """What is not preloaded yet of `modules`, and of the modules that this process has imported, in that order."""
        imported = [name for name in list(sys.modules) if _can_preload(name)]
        wanted = dict.fromkeys((*_ALWAYS_PRELOADED, *imported, *modules))
        names = [name for name in wanted if name not in self._preloaded]
        self._preloaded.update(names)
        return names

    def close(self) -> None:
        """End it; processes that it forked continue until their pipes are closed."""
        if self.alive:
            self._socket.close()
            self._process.wait()


def main() -> None:
    """Fork a process for each request until the other end of the socket is closed."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    while True:
        readable = select.select([requests.fileno(), awake], [], [])[0]
        if awake in readable:
            os.read(awake, 4096)
            _report_ended(children)
        if requests.fileno() in readable:
            received = _receive(requests)
            if received is None:
                os._exit(0)
            (request, modules), (status, *files) = received
            _preload(modules)
            pid = os.fork()
            if pid == 0:
                for fd in (requests.detach(), awake, wake, status, *children.values()):
                    os.close(fd)
                if isinstance(request, dict):
                    _run(request, files)  # type: ignore[arg-type]
                calls, answers, output = files
                _become_member(output, *request)
                serve(calls, answers)
            for fd in files:
                os.close(fd)
            children[pid] = status
            requests.send(_STATUS.pack(pid))


def _receive(requests: socket.socket) -> tuple[Any, Sequence[int]] | None:
    """A request and its descriptors, or None when the other end is closed."""
    message, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES, _MOST_FILES)
    return (pickle.loads(message), fds) if message else None


def _can_preload(module: str) -> bool:
    return module.startswith(_PRELOADED) and not module.startswith(_NOT_PRELOADED)


def _preload(modules: Sequence[str]) -> None:
    """Import the modules that exist, and exclude their objects from garbage collection."""
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    if modules:
        gc.collect()
        gc.freeze()


def _report_ended(children: dict[int, int]) -> None:
    """Send the exit code of each process that has ended."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        pipe = children.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, _STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(pipe)


def _become_member(output: int, environment: Mapping[str, str], path: list[str], folder: str) -> None:
    """Give a forked process the session, output, environment and paths of a new interpreter."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    os.chdir(folder)


def _run(start: Start, files: Sequence[int]) -> NoReturn:
    """Run a program as a new interpreter would, and exit."""
    _become_interpreter(start, files)
    first, *arguments = start["arguments"]
    main_module = ModuleType("__main__")
    vars(main_module)["__builtins__"] = builtins
    sys.modules["__main__"] = main_module
    code = 0
    try:
        if first == "-m":
            sys.argv[:] = ["-m", *arguments[1:]]
            sys.path[:] = [os.getcwd(), *start["path"]]
            runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
        elif first == "-c":
            sys.argv[:] = ["-c", *arguments[1:]]
            sys.path[:] = ["", *start["path"]]
            exec(compile(arguments[0], "<string>", "exec", dont_inherit=True), vars(main_module))
        else:
            sys.argv[:] = [first, *arguments]
            path = os.path.join(os.getcwd(), first)
            sys.path[:] = [os.path.dirname(os.path.realpath(path)), *start["path"]]
            loader = SourceFileLoader("__main__", path)
            vars(main_module).update(__file__=path, __loader__=loader, __cached__=None)
            exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), vars(main_module))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if ended.code is not None and not isinstance(ended.code, int):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException as error:
        # The traceback should not include the frame of this function.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end_interpreter(code)


def _end_interpreter(code: int) -> NoReturn:
    """Exit as an interpreter does, except that torch does not free its memory."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _become_interpreter(start: Start, files: Sequence[int]) -> None:
    """Set up in a forked process everything that a new interpreter inherits from its parent."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in start["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, _FREE_FILES) for file in files]
    for fd in {0, 1, 2, *files}:
        os.close(fd)
    for file, number in zip(apart, start["files"], strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    unbuffered = start["unbuffered"]
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = _stream(number, mode, unbuffered) if number in start["files"] else None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.umask(start["umask"])
    os.sched_setaffinity(0, start["processors"])
    os.environ.clear()
    os.environ.update(start["environment"])
    os.chdir(start["folder"])
    sys.orig_argv[:] = start["command"]
    sys.excepthook = sys.__excepthook__
    torch.set_num_threads(1)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        # Python's own generators are seeded anew in a fork.
        numpy.random.seed()


def _stream(number: int, mode: str, unbuffered: bool) -> IO[str]:
    """A standard stream; standard error is line-buffered and escapes characters that it cannot encode."""
    if mode == "r":
        return open(number, encoding="utf-8", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(number, mode, closefd=False)),
        encoding="utf-8",
        errors="backslashreplace" if number == 2 else "strict",
        line_buffering=number == 2 or os.isatty(number),
        write_through=unbuffered,
    )


def _module(name: str, file: str) -> ModuleType:
    """The module of a test file, under its name in the parent process, so that its classes can be pickled."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # pickle imports the outermost package of a module, and the package of a test file may not exist.
    package = name.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        sys.modules[package] = ModuleType(package)
    spec.loader.exec_module(module)
    return module


def _call(name: str, file: str, function: str, args: tuple[Any, ...], place: dict[str, str]) -> tuple[Any, str | None]:
    """The return value of a function, or the traceback of its error."""
    with fresh(launched=True):
        try:
            found: Any = _module(name, file)
            for part in function.split("."):
                found = getattr(found, part)
            publish(place)
            return found(*args), None
        except BaseException:
            error = traceback.format_exc()
            _end_reducers()
            return None, error


def _end_reducers() -> None:
    """Free the reducers of DistributedDataParallel before their process groups.

    The frames of an error keep a model alive longer than the groups. Its reducer would then end the threads of the
    groups while it holds the GIL, for which these threads may be waiting.
    """
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None:
        return
    for found in gc.get_objects():
        if issubclass(type(found), parallel.DistributedDataParallel):
            for name in ("logger", "reducer"):
                vars(found).pop(name, None)


def _answer(answers: IO[bytes], value: Any, error: str | None) -> None:
    try:
        text = pickle.dumps((value, error))
    except Exception:
        text = pickle.dumps((None, "The value could not be pickled.\n" + traceback.format_exc()))
    answers.write(text)
    answers.flush()


def _next_call(calls: IO[bytes]) -> Any:
    """The next call, or None at the end."""
    try:
        return pickle.load(calls)
    except EOFError:
        return None


def serve(calls_from: int, answers_to: int) -> NoReturn:
    """Serve calls until None arrives, or the other end of the pipe is closed.

    Args:
        calls_from: the descriptor from which calls are read.
        answers_to: the descriptor to which answers are written.
    """
    torch.set_num_threads(1)
    # A shell that runs the tests in the background ignores interrupts, and this process would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # If processes are not forked from this one (Python 3.14 and newer), each would import it again.
    multiprocessing.set_forkserver_preload(["torch"])
    calls, answers = os.fdopen(calls_from, "rb"), os.fdopen(answers_to, "wb")
    while (call := _next_call(calls)) is not None:
        value, error = _call(*call)
        sys.stdout.flush()
        _answer(answers, value, error)
    # An orderly exit of torch takes longer than most calls.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main()
    else:
        serve(int(sys.argv[1]), int(sys.argv[2]))
