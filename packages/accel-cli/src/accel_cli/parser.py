"""The argument parser of a command: its errors are typed and name the closest option."""

from __future__ import annotations

import os
from argparse import OPTIONAL, REMAINDER, Action, ArgumentParser, HelpFormatter
from collections.abc import Iterable
from typing import Any, Final

from accel_state.errors import SettingError

__all__ = ("Parser",)

_TORCHRUN_FLAGS: Final = ("__nproc_per_node",)
"""Options of torchrun that count the processes of one machine, with underscores."""

_MIN_COLUMNS: Final = 50
_MAX_COLUMNS: Final = 120


class Parser(ArgumentParser):
    """A parser that raises `SettingError` and does not accept abbreviations.

    Args:
        prog: name of the command.
        about: one sentence on what it does.
    """

    def __init__(self, prog: str, about: str = "", **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        kwargs.setdefault("description", about)
        super().__init__(prog, allow_abbrev=False, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise instead of printing the usage and exiting.

        Raises:
            SettingError: always.
        """
        raise SettingError(f"Cannot run `{self.prog}`.", f"{_sentence(message)}.", self._remedy(message))

    def add_examples(self, examples: Iterable[str]) -> None:
        """Ends the help text with lines of arguments that work."""
        lines = [f"  {self.prog} {example}".rstrip() for example in examples]
        if lines:
            before = [self.epilog, ""] if self.epilog else []
            self.epilog = "\n".join([*before, "examples:", *lines])

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

        options = self._option_string_actions
        command = f"`{self.prog} {'--help-all' if '--help-all' in options else '--help'}`"
        for word in message.split():
            flag = word.partition("=")[0]
            if flag.replace("-", "_") in _TORCHRUN_FLAGS and "--num_processes" in options:
                return f"Use --num_processes, the number of processes over all machines. {command} lists all options."
            package = package_of(flag) if flag.startswith("--") and flag not in options else None
            if package is not None:
                return install_remedy(package)
            if flag.startswith("--") and "/" not in flag and flag not in options:
                # Without dashes, which make short names look alike.
                names = [option[2:] for option in options if option.startswith("--")]
                near = closest(flag[2:], names)
                hints = [f"Did you mean --{near}?"] if near else []
                if any(action.nargs == REMAINDER for action in self._actions):
                    hints.append(f"Options of the script follow its name: `{self.prog} script.py {flag}`.")
                return " ".join([*hints, f"{command} lists all options."])
        return f"{command} lists all options."


class _Formatter(HelpFormatter):
    """Shows an option without its spellings with dashes."""

    def __init__(self, prog: str, **options: Any) -> None:
        # Otherwise argparse imports a library to get the width, for each option.
        super().__init__(prog, **{"width": _columns(), "max_help_position": 30, **options})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # A text of several lines is not a paragraph: examples have one line each.
        if "\n" in text:
            return "\n".join(f"{indent}{line}" for line in text.splitlines())
        return super()._fill_text(text, width, indent)

    def _format_action_invocation(self, action: Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        dashed = {name.replace("_", "-") for name in action.option_strings if "_" in name}
        names = ", ".join(name for name in action.option_strings if name not in dashed)
        value = "" if action.nargs == 0 else self._format_args(action, action.dest.upper())
        return f"{names} {value}".rstrip()


def _columns() -> int:
    """Number of columns for a help text in this terminal."""
    try:
        columns = int(os.environ.get("COLUMNS", "")) or os.get_terminal_size().columns
    except (OSError, ValueError):
        try:
            columns = os.get_terminal_size().columns
        except OSError:
            columns = 80
    return min(max(columns - 2, _MIN_COLUMNS), _MAX_COLUMNS)


def _sentence(message: str) -> str:
    return message[:1].upper() + message[1:].rstrip(".")
