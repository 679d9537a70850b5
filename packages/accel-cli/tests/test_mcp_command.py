"""`accel mcp`, called by the client of the protocol's own SDK over standard input and output."""

from __future__ import annotations

import json
import os
import runpy
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from accel_cli.commands import mcp as command
from accel_state.errors import Missing
from accel_state.settings.installed import Requirement

READING = {"status", "runs_list", "runs_diff", "report_data", "explain", "doctor", "checkpoint_list"}
STARTING = {"check_parity", "check_resume", "check_plan", "launch", "stop"}
stored_run = runpy.run_path(str(Path(__file__).with_name("test_runs_report.py")))["stored_run"]


def asked(folder: Path, *options: str, calls: tuple[tuple[str, dict[str, Any]], ...] = ()) -> tuple[Any, list[Any]]:
    """The tools of a server, and its answers to calls."""
    sdk = pytest.importorskip("mcp", reason="the extra accel-cli[mcp]")
    if not hasattr(sdk, "Client"):
        pytest.skip("needs mcp 2")
    import anyio

    words = ["-m", "accel_cli.main", "mcp", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parameters = sdk.StdioServerParameters(command=sys.executable, args=words, env=environment, cwd=str(folder))

    async def ask() -> tuple[Any, list[Any]]:
        with anyio.fail_after(250):
            async with sdk.Client(parameters) as client:
                tools = (await client.list_tools()).tools
                return tools, [await client.call_tool(name, arguments) for name, arguments in calls]

    return anyio.run(ask)


def test_the_tools_answer_the_client_of_the_sdk(tmp_path: Path) -> None:
    stored_run(tmp_path / "one")
    stored_run(tmp_path / "other", lr=0.2)
    calls = (
        ("report_data", {"run": "one", "points": 10}),
        ("runs_diff", {"one": "one", "other": "other"}),
        ("explain", {"launch_arguments": ["--num_processes", "3"]}),
        ("checkpoint_list", {"path": "one"}),
        ("status", {"run": "--help"}),
        ("report_data", {"run": "none"}),
    )
    tools, (data, difference, settings, checkpoints, status, nothing) = asked(tmp_path, calls=calls)
    assert {tool.name for tool in tools} == READING
    assert all(tool.annotations.read_only_hint and tool.output_schema for tool in tools)
    found = data.structured_content
    assert len(found["curves"]["curve 0"]) <= 10
    assert [event["kind"] for event in found["events"]] == ["guard", "failure", "restart"]
    assert "hunter2xyz" not in json.dumps(found)
    assert difference.structured_content["exit_code"] == 1
    assert difference.structured_content["output"]["differences"][0]["key"] == "hyperparameters.lr"
    (processes,) = [one for one in settings.structured_content["output"] if one["setting"] == "num_processes"]
    assert (processes["value"], processes["origin"]) == (3, "--num_processes")
    assert checkpoints.structured_content["exit_code"] == 0
    assert status.structured_content["exit_code"] == 1
    assert nothing.is_error


def test_only_with_allow_start_scripts_run(tmp_path: Path) -> None:
    calls = (("stop", {"pid": os.getpid()}),)
    tools, (stopped,) = asked(tmp_path, "--allow-start", calls=calls)
    assert {tool.name for tool in tools} == READING | STARTING
    assert {tool.name for tool in tools if not tool.annotations.read_only_hint} == STARTING
    assert not stopped.structured_content["stopped"]


def test_without_the_sdk_the_command_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MCP", Requirement("no_such_module", install="accel-cli[mcp]"))
    parser = ArgumentParser()
    command.COMMAND.add_arguments(parser)
    with pytest.raises(Missing, match=r'pip install "accel-cli\[mcp\]"'):
        command.COMMAND.run(parser.parse_args([]))
