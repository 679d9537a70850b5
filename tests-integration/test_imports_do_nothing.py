"""Importing a package only defines names: it opens no socket, starts no process and no thread, and writes no file.

Each package is imported with all of its modules in a process of its own, under an audit hook of Python and beside the
system's own lists of threads and open sockets, which also show what extensions written in C do. torch and numpy are
imported first, once, in the process that these are forked from: what they do themselves (numpy starts the threads of
its OpenBLAS) is not of this project.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.name.replace("-", "_") for path in (ROOT / "packages").iterdir() if path.is_dir())

AUDITED = """
import os, pkgutil, sys
from importlib import import_module

FORBIDDEN = {
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "os.startfile",
    "os.chmod", "os.chown", "os.kill", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink",
    "os.truncate", "os.utime", "pty.spawn", "shutil.copyfile", "shutil.move", "shutil.rmtree", "subprocess.Popen",
    "_thread.start_new_thread", "_thread.start_joinable_thread", "urllib.Request",
}
READING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
seen = []

def audit(event, arguments):
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & READING
    if writes and str(arguments[0]) != os.devnull or event in FORBIDDEN or event.startswith("socket."):
        seen.append((event, *map(repr, arguments[:1])))

def threads():
    return len(os.listdir("/proc/self/task"))

def sockets():
    targets = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return [target for target in targets if os.path.islink(target) and os.readlink(target).startswith("socket:")]

def check(name, first, planted):
    for one in filter(None, first.split(",")):
        import_module(one)
    before = threads(), dict(os.environ)
    sys.addaudithook(audit)
    package = import_module(name)
    exec(planted)
    imported = 0
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            try:
                import_module(found.name)
                imported += 1
            except ImportError:
                pass  # The engine of this module is not installed.
    assert seen == [], seen
    assert (threads(), dict(os.environ)) == before, "a thread was started, or the environment changed"
    assert sockets() == [], "a socket is open"
    assert imported > 0

import numpy, torch
print("ready", flush=True)
for line in sys.stdin:
    name, first, planted, folder = line.rstrip("\\n").split("|")
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        code = 1
        try:
            check(name, first, planted)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

FIRST = {"accel_check": "torch.distributed._tools.mem_tracker"}
"""What is imported before a package, if it is more than torch and numpy: this module of torch makes a folder."""

WRITERS = {
    "a file": "open('left-behind', 'w')",
    "a folder": "os.mkdir('left-behind')",
    "a process": "__import__('subprocess').run(['true'])",
    "a thread": "t = __import__('threading'); t.Thread(target=t.Event().wait, daemon=True).start()",
    "a socket": "__import__('socket').socket()",
    "a variable": "os.environ['LEFT_BEHIND'] = '1'",
}


class Audited:
    """An interpreter that keeps no bytecode and has imported torch and numpy, which forks a process for each import."""

    def __init__(self, errors: Path) -> None:
        self.errors = errors
        with errors.open("w") as written:
            self.process = subprocess.Popen(
                [sys.executable, "-B", "-c", AUDITED],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
            )
        assert self._answer() == "ready"

    def code(self, package: str, folder: Path, planted: str = "") -> int:
        """The exit code of a process that imports all modules of a package, in an empty folder."""
        assert self.process.stdin is not None
        print(package, FIRST.get(package, ""), planted, folder, sep="|", file=self.process.stdin, flush=True)
        return int(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    started = Audited(tmp_path_factory.mktemp("audited") / "errors")
    yield started
    started.end()


pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads and sockets are read from /proc")


@pytest.mark.parametrize("package", PACKAGES)
def test_an_import_opens_no_socket_starts_nothing_and_writes_nothing(
    package: str, audited: Audited, tmp_path: Path
) -> None:
    assert audited.code(package, tmp_path) == 0, audited.errors.read_text()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("planted", WRITERS.values(), ids=list(WRITERS))
def test_the_audit_sees_what_it_looks_for(planted: str, audited: Audited, tmp_path: Path) -> None:
    assert audited.code("accel_tracking", tmp_path, planted=planted) == 1
