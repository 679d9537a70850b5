"""`accel config`: write a config file, with or without questions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from accel_cli.command import spelled
from accel_cli.config.file import default_path
from accel_state.errors import SettingError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

__all__ = ("COMMAND", "Config")


class Config:
    """Writes a config file from answers to questions or with usual values, or prints one."""

    help = "write a config file, with or without questions, or show one"
    examples = ("", "show --config_file cluster.yaml")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the path of the file, and the actions without questions."""
        from argparse import SUPPRESS

        from accel_state.settings.run import RunSettings
        from accel_state.settings.schema import settings_of

        def add_place(to: ArgumentParser, default: str | None) -> None:
            where = "Config file; by default accelerate/default_config.yaml in $HF_HOME (~/.cache/huggingface)."
            to.add_argument(*spelled("--config_file"), default=default, metavar="PATH", help=where)

        add_place(parser, None)
        parser.set_defaults(action=_ask)
        ways = parser.add_subparsers(title="actions without questions", metavar="{default,update,show}")

        def add_action(name: str, about: str, action: Callable[[str, Namespace], str]) -> ArgumentParser:
            added = ways.add_parser(name, help=about, description=f"{about[:1].upper()}{about[1:]}.")
            add_place(added, SUPPRESS)
            added.set_defaults(action=action)
            return added

        precision = settings_of(RunSettings)["mixed_precision"]
        add_action("default", "write a default file for this machine", _write_default).add_argument(
            *spelled("--mixed_precision"),
            default=precision.default,
            metavar=f"{{{','.join(precision.type.choices)}}}",
            help=f"{precision.help.removesuffix('.')} (default: {precision.default}).",
        )
        add_action("update", "rewrite a file in the current format", _update)
        add_action("show", "show the entries of a file, and whether an installed package reads each", _show)

    def run(self, arguments: Namespace) -> int:
        """Write or show the file."""
        path = arguments.config_file or default_path(os.environ)
        written: str = arguments.action(path, arguments)
        print(written)
        return 0


def _ask(path: str, arguments: Namespace) -> str:
    from accel_cli.config.wizard import prompter, questions
    from accel_cli.config.write import differing, meanings, write_config
    from accel_cli.launch.backends import backends
    from accel_cli.launch.launchers import launch_classes
    from accel_cli.launch.settings import ASKED

    del arguments
    offered = {backend.name: backend.settings for backend in backends() if backend.value is not None}
    answers = questions(prompter(), ASKED, offered)
    classes = launch_classes()
    write_config(path, differing(answers, classes), meanings(classes))
    return f"Config file written to {path}."


def _write_default(path: str, arguments: Namespace) -> str:
    from accel_cli.config.write import differing, meanings, usual_config, write_config
    from accel_cli.launch.devices import best_devices
    from accel_cli.launch.launchers import launch_classes
    from accel_state.settings.run import RunSettings
    from accel_state.settings.schema import settings_of

    precision = settings_of(RunSettings)["mixed_precision"].parse(arguments.mixed_precision, "--mixed_precision")
    if os.path.exists(path):
        failure = f"Cannot write the default config file {path}."
        raise SettingError(
            failure, "The file already exists.", "Remove it, give another --config_file, or run `accel config update`."
        )
    classes = launch_classes()
    write_config(path, differing(usual_config(best_devices(), precision), classes), meanings(classes))
    return f"Config file written to {path}."


def _update(path: str, arguments: Namespace) -> str:
    from accel_cli.config.write import modernised, write_config
    from accel_cli.launch.launchers import launch_classes

    del arguments
    write_config(path, modernised(path, launch_classes()))
    return f"Config file {path} updated."


def _show(path: str, arguments: Namespace) -> str:
    """Each entry of a file with its line, and whether an installed package reads it."""
    from accel_cli.config.file import modern, read_config, read_document
    from accel_cli.launch.launchers import launch_classes
    from accel_cli.terminal import columns

    del arguments
    unread = {entry.line for entry in read_config(path, launch_classes()).unread}
    rows = [
        (entry.key, "-" if entry.value is None else entry.value, entry.line, "no" if entry.line in unread else "yes")
        for entry in map(modern, read_document(path))
    ]
    return "\n".join((f"{path}:", *columns(("key", "value", "line", "read"), rows)))


COMMAND: Final = Config()
