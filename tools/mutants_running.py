"""Runs tests in a copy of the repository, each time in a new process that is forked from one that has imported torch.

The forked process has imported none of our packages, so it imports the current ones of the copy. The
processes of fixtures such as `two` are forked from it too (see `accel_testing.fork_server`), before the first
test. All of them record the lines that a test executes in one piece of shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

__all__ = ("Copy", "Ended", "Lines", "Measured", "become_warm", "changed", "measure", "run_tests")

_PRELOADED: Final = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""pytest warns of plugins that were imported before it started."""

_OPTIONS: Final = (
    *("-q", "-x", "--no-header", "--tb=line", "-rfE", "--hypothesis-seed=0"),
    *("-p", "no:randomly", "-p", "no:cacheprovider", *_PRELOADED),
)
_KEPT: Final = ".kept"
"""What is appended to the name of a module while it is changed."""

_RANKS: Final = 4
"""Processes that tests start at most."""

_ADOPT_ORPHANS: Final = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""

_HANGING: Final = r"Timeout \(>|was still busy|still running after"
"""How tests report a process that does not end."""


@dataclass(frozen=True)
class Copy:
    """A copy of the files that git tracks.

    Args:
        root: the copy's folder.
    """

    root: Path

    def take(self, repository: Path) -> None:
        """Copies the repository once; restores modules that an interrupted run left changed."""
        for kept in self.root.rglob(f"*{_KEPT}"):
            kept.replace(kept.with_suffix(""))
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=repository,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in filter(None, names.split("\0")):
            target = self.root / name
            if not target.exists() and (repository / name).is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(repository / name, target)

    @property
    def sources(self) -> list[str]:
        """The folders that packages are imported from."""
        return sorted(str(path) for path in self.root.glob("packages/*/src"))


@contextlib.contextmanager
def changed(file: Path, source: bytes) -> Iterator[None]:
    """A block in which a module has another source; what Python compiled is removed, it may be of the same second."""
    kept = file.with_name(file.name + _KEPT)
    shutil.copy2(file, kept)

    def write(text: bytes) -> None:
        file.write_bytes(text)
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    write(source)
    try:
        yield
    finally:
        write(kept.read_bytes())
        kept.unlink()


def become_warm(copy: Copy) -> None:
    """Imports the libraries that tests need, and none of our packages; from then on these come from the copy."""
    os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", PYTHONPATH=os.pathsep.join(copy.sources))
    import hypothesis
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.nn.parallel
    import torch.utils.data

    _ = hypothesis.given
    torch.set_num_threads(1)
    gc.freeze()
    ours = [name for name in sys.modules if name.partition("_")[0] == "accel" or name.startswith("accelerate")]
    assert not ours, ours
    here = [path for path in sys.path if not re.search(r"/packages/[a-z-]+/src$|/tools$", path)]
    sys.path[:] = [*copy.sources, *here]
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)


# ---------------------------------------------------------------- lines
class Lines:
    """Which lines of some modules were executed, by any process forked from this one.

    Args:
        modules: their files with their numbers of lines.
    """

    def __init__(self, modules: Mapping[str, int]) -> None:
        self._first: dict[str, int] = {}
        total = 0
        for file, count in modules.items():
            self._first[file] = total
            total += count + 2
        self._seen = mmap.mmap(-1, max(total, 1))
        self._tracers = {file: self._tracer(first) for file, first in self._first.items()}

    def _tracer(self, first: int) -> Any:
        seen = self._seen

        def trace(frame: FrameType, event: str, _: object) -> Any:
            seen[first + frame.f_lineno] = 1
            return trace

        return trace

    def begin(self) -> None:
        """Watch this process and those forked from it."""

        def trace(frame: FrameType, event: str, _: object) -> Any:
            tracer = self._tracers.get(frame.f_code.co_filename)
            return tracer and tracer(frame, event, None)

        sys.settrace(trace)
        threading.settrace(trace)

    def take(self) -> list[int]:
        """The lines executed since the last call, as numbers that `place` returns."""
        seen = bytes(self._seen)
        self._seen[:] = bytes(len(seen))
        return [match.start() for match in re.finditer(b"\x01", seen)]

    def place(self, file: str, line: int) -> int:
        """The number of a line."""
        return self._first[file] + line


@dataclass
class Measured:
    """One test that passed.

    Args:
        name: its node id.
        seconds: how long it took, watched.
        lines: what it executed.
    """

    name: str
    seconds: float
    lines: list[int]


class _Recorder:
    """A plugin of pytest that records which lines each test executed."""

    def __init__(self, lines: Lines, report: Callable[[str, float, list[int]], None]) -> None:
        self._lines, self._report = lines, report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._lines.take()
        self._passed = False
        begun = time.monotonic()
        result = yield
        if self._passed:
            self._report(item.nodeid, time.monotonic() - begun, self._lines.take())
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._passed = report.passed


def measure(copy: Copy, lines: Lines, file: str, limit: float) -> list[Measured]:
    """What each test of a file executes; those that fail, or take longer than `limit` seconds, are left out."""
    log = copy.root / "measured.jsonl"
    log.write_bytes(b"")

    def report(name: str, seconds: float, executed: list[int]) -> None:
        with log.open("a") as rows:
            rows.write(json.dumps([name, seconds, executed]) + "\n")

    _forked(copy, [file, "-m", "not slow", "--maxfail=1000"], limit, lines, _Recorder(lines, report))
    return [Measured(*json.loads(row)) for row in log.read_text().splitlines()]


# ---------------------------------------------------------------- tests
@dataclass(frozen=True)
class Ended:
    """How some tests ended.

    Args:
        passed: whether all did.
        hung: whether a test or the whole ran out of time.
        test: the first that failed.
        seconds: how long they took.
        output: what pytest printed.
    """

    passed: bool
    hung: bool
    test: str
    seconds: float
    output: str


def run_tests(copy: Copy, tests: Sequence[str], limit: float, limit_of_each: float) -> Ended:
    """Run tests until the first fails.

    Args:
        copy: the copy to run in.
        tests: their node ids.
        limit: seconds for all of them.
        limit_of_each: seconds for each.
    """
    begun = time.monotonic()
    code, output = _forked(copy, [*tests, "--timeout", str(round(limit_of_each))], limit)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    hung = code is None or (code != 0 and re.search(_HANGING, output) is not None)
    return Ended(code == 0, hung, failed[1] if failed else "", time.monotonic() - begun, output)


def _forked(
    copy: Copy, arguments: Sequence[str], limit: float, lines: Lines | None = None, *plugins: object
) -> tuple[int | None, str]:
    """The exit code of pytest, or None after a timeout, and its output."""
    log = copy.root / "output.txt"
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(_pytest(copy, log, arguments, lines, plugins))
        except BaseException:
            # A module that does not even import.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    deadline = time.monotonic() + limit
    code: int | None = None
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.02)
    _end_children()
    return code, log.read_text(errors="replace")


def _pytest(copy: Copy, log: Path, arguments: Sequence[str], lines: Lines | None, plugins: Sequence[object]) -> int:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy.root)
    if lines is not None:
        lines.begin()
    _fork_servers()
    code = pytest.main([*_OPTIONS, *arguments], plugins=list(plugins))
    sys.stdout.flush()
    return int(code)


def _end_children() -> None:
    """Ends processes that a run of tests left: those without a parent become children of this process."""
    while True:
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


class _Started:
    """A server whose process was forked earlier, with what `ForkServer` asks of a process that it starts."""

    def __init__(self, pid: int) -> None:
        self._pid: int | None = pid

    def poll(self) -> int | None:
        """None while it runs."""
        return self._ended(os.WNOHANG)

    def wait(self) -> int | None:
        """Return when it has ended."""
        return self._ended(0)

    def _ended(self, how: int) -> int | None:
        if self._pid is not None and os.waitpid(self._pid, how)[0]:
            self._pid = None
        return None if self._pid is not None else 0


def _fork_servers() -> None:
    """Fork the servers of the processes of tests now, while this process is as small as a new one.

    Each waits for the socket that the `ForkServer` of a test would give to a process that it starts.
    """
    from accel_testing import fork_server

    ready: list[tuple[socket.socket, _Started]] = []
    for _rank in range(_RANKS):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for other in (ours, *(end for end, _process in ready)):
                other.close()
            _, requests, _, _ = socket.recv_fds(theirs, 1, 1)
            theirs.close()
            if not requests:
                os._exit(0)
            sys.argv[1:] = [str(requests[0])]
            fork_server.main()
        theirs.close()
        ready.append((ours, _Started(pid)))

    def start(arguments: Sequence[str], *, pass_fds: Sequence[int], **_options: object) -> _Started:
        assert arguments[-1] == str(pass_fds[0])
        waiting, started = ready.pop(0)
        with waiting:
            socket.send_fds(waiting, [b"."], pass_fds)
        return started

    starting: Any = fork_server
    starting.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": start})
