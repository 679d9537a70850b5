"""Every option of the original's commands is an option here, taken in the same way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_cli.command import find_command
from accel_cli.launch.launchers import launch_classes
from accel_cli.launch.options import flag_values
from accel_cli.parser import Parser
from accelerate.commands.launch import launch_command_parser

FACTS = Path(__file__).parent / "reference" / "cli.json"
COMMANDS = json.loads(FACTS.read_text(encoding="utf-8"))["accelerate"]["subcommands"]
TAKEN = ("store", "store_true", "append")
ALONE = ("store_true", "store_const", "help")


def parser_of(command: str) -> Parser:
    parser = Parser(f"accel {command}")
    find_command(command).add_arguments(parser)
    return parser


def cases(command: str) -> list[Any]:
    return [pytest.param(option, id=option["flags"][0]) for option in COMMANDS[command]["options"]]


@pytest.mark.parametrize("option", cases("launch"))
def test_options_of_launch(option: dict[str, Any]) -> None:
    known = parser_of("launch")._option_string_actions
    for flag in option["flags"]:
        assert flag in known
        assert (known[flag].nargs == 0) == (option["action"] in ALONE), flag


@pytest.mark.parametrize("option", [case for case in cases("launch") if case.values[0]["action"] in TAKEN])
def test_namespace_of_launch_holds_the_default_of_the_original(option: dict[str, Any]) -> None:
    parsed = vars(launch_command_parser().parse_args(["job.py"]))
    default = 1 if option["type"] == "str_to_bool" else option["default"]
    assert parsed[option["dest"]] == (tuple(default) if isinstance(default, list) else default)
    assert option["dest"] not in parsed["nondefault"]


@pytest.mark.parametrize("command", ["config", "env"])
def test_options_of_other_commands(command: str) -> None:
    known = parser_of(command)._option_string_actions
    flags = [flag for option in COMMANDS[command]["options"] for flag in option["flags"]]
    assert [flag for flag in flags if flag not in known] == []


@pytest.mark.parametrize("option", [case for case in cases("launch") if case.values[0].get("type") == "bool"])
def test_truth_values_that_the_original_takes_for_true_whatever_they_say(option: dict[str, Any]) -> None:
    for flag in option["flags"]:
        for text, meant in (("false", False), ("False", False), ("0", False), ("true", True)):
            parsed = parser_of("launch").parse_args([flag, text, "job.py"])
            (given,) = flag_values(parsed, launch_classes()).values()
            assert given.value is meant, flag
            assert parsed.script == ["job.py"]
