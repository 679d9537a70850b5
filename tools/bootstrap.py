"""Set up this repository on a machine that has only Python, then train or test.

    python3 tools/bootstrap.py train     set up, then train the example on two processes
    python3 tools/bootstrap.py test      set up, then run every test
    python3 tools/bootstrap.py setup     set up only

Everything goes into `.venv` beside `packages/`. A second run takes a second, and repairs what an interrupted run left.
Arguments after the command are passed to the nox session, so `test -k gather` runs the tests whose name has "gather".
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / "bootstrap-stamp"
CONSTRAINTS = ROOT / "tools" / "constraints.txt"

OLDEST_PYTHON = (3, 10)
SESSIONS = {"setup": None, "test": "tests", "train": "train"}

# Lower layers come before the layers that need them. The extras are those that the tests of all packages use.
PACKAGES = (
    "accel-state[console,memory]",
    "accel-ops",
    "accel-data[torchdata]",
    "accel-bigmodel",
    "accel-tracking[plots,tensorboard]",
    "accel-plugins",
    "accel-cli[completion,wizard]",
    "accel-torch",
    "accel-check",
    "accel-megatron",
    "accel-testing[backends,commands,launchers,stores,trackers]",
    "accelerate",
)

# Packages outside the metapackage, without the engine that each needs: a nox session of its own installs that.
WITHOUT_ENGINES = ("accel-ray", "accel-torchft")


class BootstrapError(Exception):
    """The request, the obstacle and the remedy."""

    def __init__(self, asked: str, obstacle: str, remedy: str) -> None:
        super().__init__(f"asked:  {asked}\nfailed: {obstacle}\nremedy: {remedy}")


def check_command(arguments: list[str]) -> str:
    """Returns the command that was given.

    Raises:
        BootstrapError: no command was given, or it does not exist.
    """
    given = arguments[0] if arguments else ""
    if given not in SESSIONS:
        near = difflib.get_close_matches(given, SESSIONS, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise BootstrapError(
            f"python3 tools/bootstrap.py {given}".rstrip(),
            f"{given!r} is not a command" if given else "no command was given",
            f"{meant}use one of: {', '.join(SESSIONS)}",
        )
    return given


def check_python(version: tuple[int, int], command: str) -> None:
    """Refuses a Python that cannot be used.

    Raises:
        BootstrapError: it is too old, or cannot create virtual environments.
    """
    here = ".".join(map(str, version))
    oldest = ".".join(map(str, OLDEST_PYTHON))
    asked = f"{command} with Python {here} ({sys.executable})"
    if version < OLDEST_PYTHON:
        raise BootstrapError(
            asked,
            f"accel needs Python {oldest} or newer",
            f"run it with a newer one, for example `python{oldest} tools/bootstrap.py {command}`",
        )
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        raise BootstrapError(
            asked,
            f"this Python has no module {' and no module '.join(missing)}, so it cannot make a virtual environment",
            "install it (Debian, Ubuntu: `apt-get install python3-venv`), or use a Python from python.org",
        )


def venv_python(venv: Path, windows: bool = os.name == "nt") -> Path:
    """The interpreter of a virtual environment."""
    return venv / ("Scripts/python.exe" if windows else "bin/python")


def fingerprint() -> str:
    """A text that changes whenever another set of packages has to be installed."""
    inputs = [ROOT / "pyproject.toml", CONSTRAINTS, *sorted(ROOT.glob("packages/*/pyproject.toml"))]
    digest = hashlib.sha256(sys.version.encode())
    for path in inputs:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_complete(python: Path) -> bool:
    """Whether an earlier run finished with the same inputs, and its environment still starts."""
    if not STAMP.is_file() or STAMP.read_text(encoding="utf-8") != fingerprint():
        return False
    return starts(python, "import nox, pytest")


def starts(python: Path, statement: str) -> bool:
    """Whether this interpreter exists and can run `statement`."""
    try:
        return subprocess.run([str(python), "-c", statement], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def make_venv(python: Path) -> None:
    """Creates `.venv`, or creates it again if its Python does not start or has another version.

    Raises:
        BootstrapError: Python could not create it.
    """
    if starts(python, f"import pip, sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"):
        return
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        raise BootstrapError(
            f"a virtual environment in {VENV}",
            last_lines(made.stdout + made.stderr),
            "see that the folder can be written and that the disk has room (about 2 GB); on Debian and Ubuntu also "
            "`apt-get install python3-venv`",
        )


def pip(python: Path, asked: str, *arguments: str) -> None:
    """Installs under the constraints.

    Raises:
        BootstrapError: pip failed; the message has the end of its output.
    """
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run([*command, "-c", str(CONSTRAINTS)], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise BootstrapError(
            asked,
            f"pip ended with exit code {done.returncode}:\n{last_lines(done.stderr)}",
            "see that this machine reaches a package index (`.venv/bin/pip config list` shows which) and that the disk "
            "has room, then run the same command again; what is already installed is kept",
        )


def last_lines(text: str, count: int = 12) -> str:
    """The end of a program's output, indented."""
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-count:])


def install(python: Path) -> None:
    """Installs pip itself, torch, the tools and the packages, in that order, and prints each step."""
    editables = [part for package in PACKAGES for part in ("-e", f"packages/{package}")]
    alone = [part for package in WITHOUT_ENGINES for part in ("-e", f"packages/{package}")]
    steps = (
        ("pip", ["pip"]),
        ("torch (the long one)", ["torch"]),
        ("the tools for tests and checks", ["--group", "dev"]),
        ("the packages of the metapackage, editable", ["--no-build-isolation", *editables]),
        ("the packages beside it, without their engines", ["--no-build-isolation", "--no-deps", *alone]),
    )
    for number, (what, arguments) in enumerate(steps, start=2):
        say(f"[{number}/{len(steps) + 1}] installing {what}")
        pip(python, f"installing {what} into {VENV}", *arguments)


def say(text: str) -> None:
    """Prints a line for the user who waits."""
    print(f"bootstrap: {text}", flush=True)


def set_up(python: Path) -> None:
    """Installs everything into `.venv`; returns at once if everything is installed."""
    if is_complete(python):
        return
    start = time.monotonic()
    say(f"[1/6] making {VENV} with Python {sys.version.split()[0]}")
    make_venv(python)
    STAMP.unlink(missing_ok=True)
    install(python)
    STAMP.write_text(fingerprint(), encoding="utf-8")
    say(f"ready after {time.monotonic() - start:.0f} s")


def main(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    python = venv_python(VENV)
    try:
        command = check_command(arguments)
        check_python((sys.version_info[0], sys.version_info[1]), command)
        set_up(python)
    except OSError as error:
        print(BootstrapError(" ".join(arguments), str(error), f"see that {ROOT} can be written"), file=sys.stderr)
        return 2
    except BootstrapError as error:
        print(error, file=sys.stderr)
        return 2
    session = SESSIONS[command]
    if session is None:
        return 0
    return subprocess.call([str(python), "-m", "nox", "-s", session, "--", *arguments[1:]], cwd=ROOT)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
