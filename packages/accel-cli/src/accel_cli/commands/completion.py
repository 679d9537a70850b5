"""`accel completion`: the lines that teach a shell to complete `accel` with the Tab key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "SHELLS", "Completion")

SHELLS: Final = ("bash", "zsh", "fish", "tcsh", "powershell")


class Completion:
    """The command; see `accel_cli.command.Command`."""

    help = "print what teaches a shell to complete this command"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Which shell."""
        parser.epilog = 'For bash, put this into ~/.bashrc: eval "$(accel completion bash)"'
        parser.add_argument("shell", choices=SHELLS, help="The shell.")

    def run(self, arguments: Namespace) -> int:
        """Print the lines."""
        from accel_cli.completion import REQUIREMENT

        REQUIREMENT.demand(f"Cannot complete commands in {arguments.shell}.")
        from argcomplete.shell_integration import shellcode

        print(shellcode(["accel"], shell=arguments.shell))
        return 0


COMMAND: Final = Completion()
