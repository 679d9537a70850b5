"""Importing a package only defines names: it opens no socket, starts no process and no thread, and writes no file.

Each package is imported with all of its modules in a new interpreter, under an audit hook of Python and beside the
system's own lists of threads and open sockets, which also show what extensions written in C do. torch and numpy are
imported first: what they do themselves (numpy starts the threads of its OpenBLAS) is not of this project.
"""

from __future__ import annotations

import subprocess
import sys
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

for name in filter(None, sys.argv[2].split(",")):
    import_module(name)
before = threads(), dict(os.environ)
sys.addaudithook(audit)
package = import_module(sys.argv[1])
exec(sys.argv[3])
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
print(imported)
"""

FIRST = {"accel_check": "torch,numpy,torch.distributed._tools.mem_tracker"}
"""What is imported before a package, if it is more than torch and numpy: this module of torch makes a folder."""

WRITERS = {
    "a file": "open('left-behind', 'w')",
    "a folder": "os.mkdir('left-behind')",
    "a process": "__import__('subprocess').run(['true'])",
    "a thread": "t = __import__('threading'); t.Thread(target=t.Event().wait, daemon=True).start()",
    "a socket": "__import__('socket').socket()",
    "a variable": "os.environ['LEFT_BEHIND'] = '1'",
}


def import_under_audit(package: str, folder: Path, planted: str = "") -> subprocess.CompletedProcess[str]:
    """Imports all modules of a package in a new interpreter that keeps no bytecode, in an empty folder."""
    first = FIRST.get(package, "torch,numpy")
    command = [sys.executable, "-B", "-c", AUDITED, package, first, planted]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads and sockets are read from /proc")
@pytest.mark.parametrize("package", PACKAGES)
def test_an_import_opens_no_socket_starts_nothing_and_writes_nothing(package: str, tmp_path: Path) -> None:
    done = import_under_audit(package, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads and sockets are read from /proc")
@pytest.mark.parametrize("planted", WRITERS.values(), ids=list(WRITERS))
def test_the_audit_sees_what_it_looks_for(planted: str, tmp_path: Path) -> None:
    assert import_under_audit("accel_tracking", tmp_path, planted=planted).returncode == 1
