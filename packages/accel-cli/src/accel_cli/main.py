"""The console script `accel`: finds the command, runs it, and prints typed errors as messages.

This module imports neither torch nor commands that do not run, so that `accel --help` is fast.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from accel_cli.command import Command, described, find_command, installed_commands
from accel_cli.parser import Parser
from accel_state.errors import AccelError, LaunchError
from accel_state.plugins import output_protected

__all__ = ("console", "main")

_TRACEBACK_VARIABLE = "ACCELERATE_DEBUG_MODE"
_COMPLETION_VARIABLE = "_ARGCOMPLETE"


def main(argv: Sequence[str] | None = None, prog: str = "accel") -> int:
    """Run the command line and return its exit code: 2 if the command fails with an `AccelError`.

    Args:
        argv: the arguments after the program's name; by default those of this process.
        prog: name of the program in messages.

    Example:
        >>> main(["launch", "--num_processes", "2", "train.py"])  # doctest: +SKIP
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with output_protected():
            code = _run(arguments, prog)
        sys.stdout.flush()
        return code
    except AccelError as error:
        if os.environ.get(_TRACEBACK_VARIABLE, "").lower() in ("1", "true", "yes"):
            raise
        from accel_state.untrusted import printable

        # The message may quote a file or another machine, and must not contain control characters.
        print(printable(f"{prog}: {error}", keep="\n\t"), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of the output has closed it; the interpreter would fail again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        full = LaunchError(
            f"Cannot write {error.filename or 'the output'}.",
            f"The disk is full: {error}.",
            "Free disk space, or write to another folder; TMPDIR selects the folder for temporary files.",
        )
        from accel_state.untrusted import printable

        print(printable(f"{prog}: {full}", keep="\n\t"), file=sys.stderr)
        # Otherwise the interpreter would write the rest of the buffer at its end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except KeyboardInterrupt:
        return 130


def console() -> NoReturn:
    """Run `main`, and exit."""
    sys.exit(main())


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
    return _call(find_command(name), f"{prog} {name}", arguments[1:])


def _call(command: Command, prog: str, arguments: list[str]) -> int:
    from accel_state.untrusted import printable

    parser = Parser(prog, printable(command.help[:1].upper() + command.help[1:] + "."))
    command.add_arguments(parser)
    parser.add_examples(getattr(command, "examples", ()))
    try:
        parsed = parser.parse_args(arguments)
    except SystemExit as leaving:
        # argparse exits only after it has printed the help text.
        return int(leaving.code or 0)
    return command.run(parsed)


def _help(prog: str) -> str:
    from accel_state.untrusted import printable

    parser = Parser(prog, "Launch PyTorch training on many processes, and inspect settings, runs and checkpoints.")
    parser.usage = f"{prog} <command> [arguments]"
    parser.epilog = f"`{prog} <command> --help` shows the options of a command; `{prog} --version` shows the version."
    commands = parser.add_subparsers(title="commands", metavar="<command>")
    for name, command in installed_commands().items():
        commands.add_parser(printable(name), help=printable(described(command), keep="\n\t").replace("%", "%%"))
    return parser.format_help()


def _version() -> str:
    from accel_state.settings.installed import installed_version

    return f"accel-cli {installed_version('accel-cli')}"


if __name__ == "__main__":
    console()
