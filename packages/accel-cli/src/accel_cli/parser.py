"""The argument parser of a command: its errors are typed and name the closest option."""

from __future__ import annotations

import sys
from argparse import OPTIONAL, Action, ArgumentParser, HelpFormatter
from collections.abc import Callable, Sequence
from typing import Any, Final

from accel_cli.terminal import width
from accel_state.errors import SettingError

__all__ = ("Parser",)


_OF_TORCHRUN: Final = ("__nproc_per_node",)
"""Options of torchrun that count the processes of one machine, with underscores."""


class Parser(ArgumentParser):
    """A parser that raises `SettingError` and does not accept abbreviations.

    Args:
        prog: name of the command.
        about: one sentence on what it does.
        manual: returns the help text, in place of argparse; it receives `prog`.
    """

    def __init__(
        self, prog: str, about: str = "", manual: Callable[[str], str] | None = None, **kwargs: object
    ) -> None:
        kwargs.setdefault("formatter_class", _formatter)
        kwargs.setdefault("description", about)
        super().__init__(prog, allow_abbrev=False, **kwargs)  # type: ignore[arg-type]
        self._manual = manual
        self._declared: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {}

    def declare(self, *names: str, **options: Any) -> None:
        """Declare an option, which is added only if the command line contains it: `add_argument` is slow."""
        self._declared.update(dict.fromkeys(names, (names, options)))

    def add_declared(self, words: Sequence[str] | None = None) -> None:
        """Add the declared options that a command line contains; by default all of them."""
        for word in list(self._declared) if words is None else words:
            flag = word.partition("=")[0] if word.startswith("--") else word[:2]
            if flag in self._declared:
                names, options = self._declared[flag]
                for name in names:
                    del self._declared[name]
                self.add_argument(*names, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, with the declared options."""
        words = sys.argv[1:] if args is None else list(args)
        self.add_declared(words)
        return super().parse_known_args(words, namespace)

    def format_help(self) -> str:
        """The help text."""
        return super().format_help() if self._manual is None else self._manual(self.prog)

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise instead of printing the usage and exiting.

        Raises:
            SettingError: always.
        """
        raise SettingError(f"Cannot run `{self.prog}`.", f"{_sentence(message)}.", self._remedy(message))

    def _get_values(self, action: Action, arg_strings: list[str]) -> Any:
        """The value of an option or argument; argparse drops `--` after an equals sign, which is a value here."""
        if action.option_strings and action.nargs in (None, OPTIONAL) and arg_strings == ["--"]:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)

    def _remedy(self, message: str) -> str:
        from accel_plugins.separate import install_remedy, package_of
        from accel_state.settings.schema import closest

        known = (*self._option_string_actions, *self._declared)
        command = f"`{self.prog} {'--help-all' if '--help-all' in known else '--help'}`"
        for word in message.split():
            flag = word.partition("=")[0]
            if flag.replace("-", "_") in _OF_TORCHRUN and "--num_processes" in known:
                return f"Use --num_processes, the number of processes over all machines. {command} lists all options."
            package = package_of(flag) if flag.startswith("--") and flag not in known else None
            if package is not None:
                return install_remedy(package)
            near = closest(flag, known) if flag.startswith("--") and "/" not in flag else None
            if near is not None and near != flag:
                return f"Did you mean {near}? {command} lists all options."
        return f"{command} lists all options."


def _formatter(prog: str) -> HelpFormatter:
    # Each declared option creates a formatter, which imports a library to get the width if it is not passed.
    return HelpFormatter(prog, width=width())


def _sentence(message: str) -> str:
    return message[:1].upper() + message[1:].rstrip(".")
