"""`accel mcp`: the answers of other commands as tools for language models, over the Model Context Protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_state.settings.installed import Requirement

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "MCP", "ServeTools")

MCP: Final = Requirement("mcp", versions=">=2", install="accel-cli[mcp]")


class ServeTools:
    """The command; see `accel_cli.command.Command`."""

    help = "serve run status, reports, settings and checks to a language model (MCP over stdio)"
    examples = ("", "--allow-start")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare what the tools may do."""
        parser.epilog = "It answers: what do my runs do, and why?"
        parser.add_argument(
            "--allow-start",
            action="store_true",
            help="Also offer tools that start and stop runs, and checks, which run scripts.",
        )

    def run(self, arguments: Namespace) -> int:
        """Serve on the standard input and output until the client leaves.

        Raises:
            Missing: the SDK of the protocol is not installed.
        """
        MCP.demand("Cannot serve tools by `accel mcp`.")
        from accel_cli.tools_of_models import serve_tools

        serve_tools(arguments.allow_start)
        return 0


COMMAND: Final = ServeTools()
