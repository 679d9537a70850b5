"""`accel config`: write a config file, with or without questions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from accel_cli.command import spelled
from accel_cli.config.file import default_path
from accel_state.errors import SettingError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "Config")


class Config:
    """The command; see `accel_cli.command.Command`."""

    help = "write a config file, with or without questions, or show one"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """The path of the file, and the two ways without questions."""
        from argparse import SUPPRESS

        from accel_state.settings.run import RunSettings
        from accel_state.settings.schema import settings_of

        def add_place(to: ArgumentParser, default: str | None) -> None:
            where = "Config file; by default the user's own."
            to.add_argument(*spelled("--config_file"), default=default, metavar="PATH", help=where)

        add_place(parser, None)
        parser.set_defaults(action=_ask)
        ways = parser.add_subparsers(title="without questions", metavar="{default,update,show}")
        default = ways.add_parser("default", help="write a default file for this machine")
        add_place(default, SUPPRESS)
        precision = settings_of(RunSettings)["mixed_precision"]
        default.add_argument(*spelled("--mixed_precision"), default=precision.default, help=precision.help)
        default.set_defaults(action=_write_default)
        update = ways.add_parser("update", help="rewrite a file in the current format")
        add_place(update, SUPPRESS)
        update.set_defaults(action=_update)
        show = ways.add_parser("show", help="show the settings of a file and their readers")
        add_place(show, SUPPRESS)
        show.set_defaults(action=_show)

    def run(self, arguments: Namespace) -> int:
        """Write or show the file."""
        path = arguments.config_file or default_path(os.environ)
        written: str = arguments.action(path, arguments)
        print(written)
        return 0


def _ask(path: str, arguments: Namespace) -> str:
    from accel_cli.config.wizard import prompter, reviewed
    from accel_cli.config.write import write_config
    from accel_cli.launch.backends import backends
    from accel_cli.launch.settings import ASKED

    del arguments
    offered = {backend.name: backend.settings for backend in backends() if backend.manifest is not None}
    answers = reviewed(prompter(), ASKED, offered)
    write_config(path, answers)
    return f"Written to {path}."


def _write_default(path: str, arguments: Namespace) -> str:
    from accel_cli.config.write import usual_config, write_config
    from accel_cli.launch.devices import best_devices
    from accel_state.settings.run import RunSettings
    from accel_state.settings.schema import settings_of

    precision = settings_of(RunSettings)["mixed_precision"].parse(arguments.mixed_precision, "--mixed_precision")
    if os.path.exists(path):
        asked = f"Cannot write the default config file {path}."
        raise SettingError(
            asked, "The file exists already.", "Remove it, give another --config_file, or run `accel config update`."
        )
    write_config(path, usual_config(best_devices(), precision))
    return f"Written to {path}."


def _update(path: str, arguments: Namespace) -> str:
    from accel_cli.config.write import modernised, write_config
    from accel_cli.launch.options import launch_classes

    del arguments
    write_config(path, modernised(path, launch_classes()))
    return f"Updated {path}."


def _show(path: str, arguments: Namespace) -> str:
    """Each entry of a file with its line, and whether anything that is installed reads it."""
    from accel_cli.config.file import modern, read_config, read_document
    from accel_cli.launch.options import launch_classes
    from accel_cli.terminal import columns

    del arguments
    unread = {entry.line for entry in read_config(path, launch_classes()).unread}
    rows = [
        (entry.key, "-" if entry.value is None else entry.value, entry.line, "no" if entry.line in unread else "yes")
        for entry in map(modern, read_document(path))
    ]
    return "\n".join((f"{path}:", *columns(("key", "value", "line", "read"), rows)))


COMMAND: Final = Config()
