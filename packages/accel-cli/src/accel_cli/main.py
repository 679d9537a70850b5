"""ConfigEntry of the console script `accel`: finds the command, runs it, and turns typed errors into messages.

Nothing here imports torch or a command that was not asked for, so `accel --help` answers at once.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from accel_cli.command import Command, described, find_command, offers
from accel_state.errors import AccelError, LaunchError

__all__ = ("console", "main")

_TRACEBACK_VARIABLE = "ACCELERATE_DEBUG_MODE"
_COMPLETION_VARIABLE = "_ARGCOMPLETE"
_ALLOCATIONS = 100_000
"""New objects after which garbage is collected; a command with all settings makes fewer until it runs."""


def main(argv: Sequence[str] | None = None, prog: str = "accel") -> int:
    """Run the command line and return its exit code: 2 when the command fails with an error of these packages.

    Args:
        argv: the arguments after the program's name; those of this process by default.
        prog: the name under which the program shows itself.

    Example:
        >>> main(["launch", "--num_processes", "2", "train.py"])  # doctest: +SKIP
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    try:
        code = _run(arguments, prog)
        sys.stdout.flush()
        return code
    except AccelError as error:
        if os.environ.get(_TRACEBACK_VARIABLE, "").lower() in ("1", "true", "yes"):
            raise
        from accel_state.untrusted import printable

        # It may quote a file or another machine, and must not control the terminal.
        print(printable(f"{prog}: {error}", keep="\n\t"), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of our output has gone; the interpreter would complain again when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        full = LaunchError(
            f"Cannot write {error.filename or 'the output'}.",
            f"The disk is full: {error}.",
            "Make room, or write elsewhere; TMPDIR names the folder of temporary files.",
        )
        print(f"{prog}: {full}", file=sys.stderr)
        # What is left in the buffer would be written, and fail, again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except KeyboardInterrupt:
        return 130


def _open_closed_streams() -> None:
    """Open the standard streams that are closed, for nothing to read or write.

    The next file or socket would have the number of a closed one, and the processes of a run would write there.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - open as long as the process
            if stream.fileno() == number:
                os.set_inheritable(number, True)
            setattr(sys, name, stream)


def console() -> NoReturn:
    """What the console script runs: `main`, and then the shortest way out.

    Taking apart what was imported takes longer than many commands do, so the process leaves without it where nobody
    asked to be called at the end.
    """
    # Collections while a command is imported find nothing, and take a tenth of its time.
    gc.set_threshold(_ALLOCATIONS)
    code = main()
    sys.stderr.flush()
    if atexit._ncallbacks() == 0 and "threading" not in sys.modules:
        os._exit(code)
    sys.exit(code)


def _run(arguments: list[str], prog: str) -> int:
    if _COMPLETION_VARIABLE in os.environ:
        from accel_cli.commands.completion import answer

        answer(prog)
    name = arguments[0] if arguments else ""
    if name in ("", "-h", "--help"):
        print(_help(prog), end="")
        return 0 if name else 1
    if name == "--version":
        print(_version())
        return 0
    command = find_command(name)
    manual = getattr(command, "manual", None)
    if manual is not None and arguments[1:2] in (["-h"], ["--help"]):
        print(manual(f"{prog} {name}"), end="")
        return 0
    return _call(command, f"{prog} {name}", manual, arguments[1:])


def _call(command: Command, prog: str, manual: Callable[[str], str] | None, arguments: list[str]) -> int:
    from accel_cli.parser import Parser

    parser = Parser(prog, command.help[:1].upper() + command.help[1:] + ".", manual)
    command.add_arguments(parser)
    try:
        parsed = parser.parse_args(arguments)
    except SystemExit as leaving:
        # The only way that is left: --help has been printed.
        return int(leaving.code or 0)
    return command.run(parsed)


def _help(prog: str) -> str:
    from accel_cli.terminal import render

    rows = [(name, described(name)) for name in offers()]
    end = f"`{prog} <command> --help` shows the arguments of a command, `{prog} --version` the version."
    about = "Start and prepare PyTorch programs on many processes."
    return render(f"{prog} <command> [arguments]", about, {"commands": rows}, end)


def _version() -> str:
    from accel_state.settings.installed import installed_version

    return f"accel-cli {installed_version('accel-cli')}"


if __name__ == "__main__":
    console()
