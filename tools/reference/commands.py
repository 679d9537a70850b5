"""The page of commands: every command of `accel` with its arguments, from the parsers themselves."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from accel_cli.command import find_command, installed_commands
from accel_cli.launch.options import add_launch_arguments
from accel_cli.parser import Parser
from reference.markdown import code, fence, page, prose, table

__all__ = ("commands_page",)

_COLUMNS = "110"
_ABOUT = """Every command of `accel`, those of installed packages included. An option that is written with underscores
may also be written with dashes. `accel <command> --help` shows the same in a terminal."""


def commands_page() -> str:
    """The page."""
    os.environ["COLUMNS"] = _COLUMNS
    commands = installed_commands()
    rows = [(f"[{code(f'accel {name}')}](#accel-{name})", prose(find_command(name).help)) for name in commands]
    lines = ["# Commands", "", prose(_ABOUT), "", *table(("command", "does"), rows), ""]
    for name, command in commands.items():
        lines += [*_command(name, command.origin), ""]
    return page(lines)


def _command(name: str, origin: str) -> Iterator[str]:
    command = find_command(name)
    parser = Parser(f"accel {name}", f"{command.help[:1].upper()}{command.help[1:]}.")
    command.add_arguments(parser)
    yield from (f"## accel {name}", "", prose(str(parser.description)), "")
    if not origin.startswith("accel-cli"):
        yield from (f"Comes with {code(origin.split()[0])}.", "")
    yield from _launch() if name == "launch" else _arguments(parser)


def _launch() -> Iterator[str]:
    """Flags grown from settings, under the headings of the help text."""
    yield from fence("accel launch [options] script [options of the script]")
    parser = Parser("accel launch")
    add_launch_arguments(parser, everything=True)
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help not in (None, argparse.SUPPRESS)]
        if shown:
            cells = [(code(_names(action)), prose(str(action.help).replace("%%", "%"))) for action in shown]
            yield from ("", f"### {group.title}", "", *table(("option", "meaning"), cells))


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from fence(parser.format_usage().removeprefix("usage: "))
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    parts = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    rows = [(code(_names(action)), _meaning(action)) for action in actions if action not in parts]
    if rows:
        yield from ("", *table(("argument", "meaning"), rows))
    for part in parts:
        helps = {action.dest: action.help for action in part._choices_actions}
        for name, below in part.choices.items():
            yield from ("", f"### {parser.prog} {name}", "", prose(f"{_sentence(helps.get(name) or '')}"), "")
            yield from _arguments(below)


def _names(action: argparse.Action) -> str:
    flags = [flag for flag in action.option_strings if flag.replace("-", "_") not in _underscored(action, flag)]
    value = "" if action.nargs == 0 else _value(action)
    return ", ".join(flags) + (f" {value}" if flags and value else "" if flags else value)


def _underscored(action: argparse.Action, flag: str) -> set[str]:
    """The other spellings of a flag, with all dashes as underscores, when this is the one with dashes."""
    others = {other.replace("-", "_") for other in action.option_strings if other != flag}
    return others if "-" in flag.lstrip("-") else set()


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or (action.dest.upper() if action.option_strings else action.dest))


def _meaning(action: argparse.Action) -> str:
    default: Any = action.default
    named = "(default: " in (action.help or "")
    if named or default in (None, False, argparse.SUPPRESS) or action.nargs in (0, argparse.REMAINDER):
        return prose(_sentence(action.help or ""))
    shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
    return prose(f"{_sentence(action.help or '')} Default: `{shown}`.".strip())


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
