"""`accel mcp`: the answers of other commands as tools for language models, over the Model Context Protocol.

Most tools run a command of `accel` with `--json` in a process of its own, so that what it prints cannot disturb the
protocol; the schemas of their answers are those of the command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from accel_cli.report.collect import collect_run, thinned
from accel_state.settings.installed import Requirement
from accel_state.watch.runs import running_runs

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from mcp.server.mcpserver import MCPServer

__all__ = (
    "COMMAND",
    "MCP",
    "ServeTools",
    "serve_tools",
    "server",
)

MCP: Final = Requirement("mcp", versions=">=2", install="accel-cli[mcp]")

_COMMAND_TIMEOUT_S: Final = 120
_CHECK_TIMEOUT_S: Final = 3600
_MAX_OUTPUT_CHARACTERS: Final = 4000


def _answer(words: Sequence[str], seconds: float = _COMMAND_TIMEOUT_S) -> dict[str, Any]:
    """The exit code of a command, the JSON that it printed (one value for each line if it prints lines), and errors."""
    command = [sys.executable, "-m", "accel_cli.main", *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"exit_code": 124, "output": None, "errors": f"It took longer than {seconds:g} s."}
    try:
        output = json.loads(done.stdout)
    except ValueError:
        output = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {"exit_code": done.returncode, "output": output, "errors": done.stderr[-_MAX_OUTPUT_CHARACTERS:]}


def _named(run: str) -> str:
    """The name of a run or path; an option is not meant."""
    return f"./{run}" if run.startswith("-") else run


def status(run: str = "") -> dict[str, Any]:
    """What each process of a run does now. Without a run: all runs of this user on this machine."""
    return _answer(["runs", "status", "--json", *([_named(run)] if run else [])])


def runs_list(folder: str = ".") -> dict[str, Any]:
    """The runs of this machine, and those that a folder stores."""
    return _answer(["runs", "list", "--json", _named(folder)])


def runs_diff(one: str, other: str) -> dict[str, Any]:
    """What differs between two runs, the most telling first. Exit code 1: something differs."""
    return _answer(["runs", "diff", "--json", _named(one), _named(other)])


def report_data(run: str, points: int = 200) -> dict[str, Any]:
    """Curves, time by category, events, checkpoints, settings and the record of a run, without secrets."""
    report = collect_run(run)
    most = min(max(points, 2), 5000)
    report["curves"] = {name: thinned(line, most) for name, line in report["curves"].items()}
    report["progress"] = thinned(report.get("progress") or [], most)
    if report["goodput"]:
        report["goodput"]["over_time"] = thinned(report["goodput"]["over_time"], most)
        report["goodput"]["memory"] = {name: thinned(line, most) for name, line in report["goodput"]["memory"].items()}
    return report


def explain(launch_arguments: list[str]) -> dict[str, Any]:
    """The settings of a launch with these arguments of `accel launch`, and the source of each."""
    return _answer(["explain", "--json", "--", *launch_arguments])


def doctor(launch_arguments: list[str]) -> dict[str, Any]:
    """Problems of a launch with these arguments of `accel launch`, before it starts. Exit code 1: it would not work."""
    return _answer(["doctor", "--json", "--", *launch_arguments])


def checkpoint_list(path: str) -> dict[str, Any]:
    """The checkpoints of a folder, a project or a URL: size, time and whether they are complete."""
    return _answer(["checkpoint", "list", "--json", _named(path)])


def check_parity(arguments: list[str]) -> dict[str, Any]:
    """Run a script on several processes and on one, and compare each step (the arguments of `accel check-parity`)."""
    return _answer(["check-parity", "--json", *arguments], _CHECK_TIMEOUT_S)


def check_resume(arguments: list[str]) -> dict[str, Any]:
    """Run a script, save, resume and compare (the arguments of `accel check-resume`)."""
    return _answer(["check-resume", "--json", *arguments], _CHECK_TIMEOUT_S)


def check_plan(arguments: list[str]) -> dict[str, Any]:
    """Try a script for many ranks without devices (the arguments of `accel check-plan`)."""
    return _answer(["check-plan", "--json", *arguments], _CHECK_TIMEOUT_S)


def launch(arguments: list[str], output: str = "launch.log") -> dict[str, Any]:
    """Start a run by `accel launch` with these arguments; it goes on without this server. Returns its process id."""
    with open(output, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "accel_cli.main", "launch", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    return {"pid": process.pid, "output": os.path.abspath(output)}


def stop(pid: int) -> dict[str, Any]:
    """End a run by the process id of its launcher, as SIGTERM does; only runs of this user on this machine."""
    if pid not in {run.pid for run in running_runs()}:
        return {"stopped": False, "reason": f"Process {pid} is not the launcher of a run of this user here."}
    os.kill(pid, signal.SIGTERM)
    return {"stopped": True, "reason": ""}


_READING_TOOLS: Final[tuple[Callable[..., dict[str, Any]], ...]] = (
    status,
    runs_list,
    runs_diff,
    report_data,
    explain,
    doctor,
    checkpoint_list,
)
_STARTING_TOOLS: Final[tuple[Callable[..., dict[str, Any]], ...]] = (
    check_parity,
    check_resume,
    check_plan,
    launch,
    stop,
)


def server(allow_start: bool) -> MCPServer:
    """A server of the tools.

    Args:
        allow_start: also offer the tools that run scripts, and that start and stop runs.
    """
    from mcp.server.mcpserver import MCPServer
    from mcp.types import ToolAnnotations

    mcp_server = MCPServer(
        "accel", instructions="Training runs of accel: what they do, what they did, and what differs."
    )
    for tool in _READING_TOOLS:
        mcp_server.add_tool(tool, annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))
    for tool in _STARTING_TOOLS if allow_start else ():
        mcp_server.add_tool(tool, annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True))
    return mcp_server


def serve_tools(allow_start: bool) -> None:
    """Serve the tools on the standard input and output until the client leaves."""
    server(allow_start).run("stdio")


class ServeTools:
    """Serves tools until the client leaves, if the SDK of the protocol is installed."""

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
        serve_tools(arguments.allow_start)
        return 0


COMMAND: Final = ServeTools()
