"""The original's terminal menus, as adapters over the library that draws this project's menus."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final, TypeVar

from accel_cli.config.wizard import prompter

__all__ = (
    "ARROW_KEY_FLAG",
    "CURSOR_TO_CHAR",
    "KEYMAP",
    "TERMINAL_WIDTH",
    "BulletMenu",
    "Direction",
    "KeyHandler",
    "clear_line",
    "forceWrite",
    "get_character",
    "get_raw_chars",
    "hide",
    "hide_cursor",
    "in_colab",
    "linebreak",
    "mark",
    "mark_multiple",
    "move_cursor",
    "register",
    "reset_cursor",
    "show_cursor",
    "writeColor",
)

T = TypeVar("T")

ARROW_KEY_FLAG: Final = 1 << 8
"""Added to the code of an arrow key, to distinguish it from a letter."""

KEYMAP: Final = {
    "tab": 9,
    "newline": 13,
    "esc": 27,
    "up": 65 + ARROW_KEY_FLAG,
    "down": 66 + ARROW_KEY_FLAG,
    "right": 67 + ARROW_KEY_FLAG,
    "left": 68 + ARROW_KEY_FLAG,
    "mod_int": 91,
    "undefined": sys.maxsize,
    "interrupt": 3,
    "insert": 50,
    "delete": 51,
    "pg_up": 53,
    "pg_down": 54,
    "arrow_begin": 65 + ARROW_KEY_FLAG,
    "arrow_end": 68 + ARROW_KEY_FLAG,
    **{str(digit): ord(str(digit)) for digit in range(10)},
}

TERMINAL_WIDTH: Final = shutil.get_terminal_size().columns

CURSOR_TO_CHAR: Final = {"UP": "A", "DOWN": "B", "RIGHT": "C", "LEFT": "D"}

in_colab: Final = "google.colab" in sys.modules


class Direction(Enum):
    """Up or down in a menu."""

    UP = 0
    DOWN = 1


def forceWrite(content: object, end: str = "") -> None:  # noqa: N802 - the old name
    """Write text and flush."""
    sys.stdout.write(f"{content}{end}")
    sys.stdout.flush()


def writeColor(content: object, color: object, end: str = "") -> None:  # noqa: N802 - the old name
    """Write text in a colour, given by its ANSI number."""
    forceWrite(f"\x1b[{color}m{content}\x1b[0m", end)


def reset_cursor() -> None:
    """Move the cursor to the beginning of the line."""
    forceWrite("\r")


def move_cursor(num_lines: int, direction: str) -> None:
    """Move the cursor by some lines in a direction of `CURSOR_TO_CHAR`."""
    forceWrite(f"\x1b[{num_lines}{CURSOR_TO_CHAR[direction.upper()]}")


def clear_line() -> None:
    """Clear the line and move the cursor to its beginning."""
    forceWrite(" " * TERMINAL_WIDTH)
    reset_cursor()


def linebreak() -> None:
    """Print a line over the width of the terminal."""
    reset_cursor()
    forceWrite("-" * TERMINAL_WIDTH)


def hide_cursor() -> None:
    """Hide the cursor of the terminal."""
    forceWrite("\x1b[?25l")


def show_cursor() -> None:
    """Show the cursor of the terminal."""
    forceWrite("\x1b[?25h")


@contextmanager
def hide() -> Iterator[None]:
    """A block in which the cursor is hidden."""
    hide_cursor()
    try:
        yield
    finally:
        show_cursor()


def get_raw_chars() -> str:
    """Read one character from the terminal."""
    try:
        import termios
        import tty
    except ImportError:
        import msvcrt

        return str(msvcrt.getwch())  # type: ignore[attr-defined, unused-ignore]
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor)
        return sys.stdin.read(1)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def get_character() -> str | int:
    """Read a key: its character, an arrow key's code with the flag added, or the code for an unknown key."""
    first = get_raw_chars()
    if ord(first) != KEYMAP["esc"]:
        known = ord(first) in (KEYMAP["interrupt"], KEYMAP["newline"]) or first.isprintable()
        return first if known else KEYMAP["undefined"]
    if get_raw_chars() != "[":
        return KEYMAP["undefined"]
    code = ord(get_raw_chars()) + ARROW_KEY_FLAG
    known = KEYMAP["arrow_begin"] <= code <= KEYMAP["arrow_end"]
    return chr(code) if known else KEYMAP["undefined"]


def mark(key: int) -> Callable[[T], T]:
    """Mark a method as the handler of a key."""
    return mark_multiple(key)


def mark_multiple(*keys: int) -> Callable[[T], T]:
    """Mark a method as the handler of several keys."""

    def marked(function: T) -> T:
        function.handle_key = [*getattr(function, "handle_key", []), *keys]  # type: ignore[attr-defined]
        return function

    return marked


class KeyHandler(type):
    """Metaclass of classes with methods that handle keys."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> KeyHandler:
        """Create the class, with its handlers by key in `key_handler`."""
        made: Any = super().__new__(cls, name, bases, {**namespace, "handle_input": KeyHandler.handle_input})
        inherited = dict(getattr(made, "key_handler", {}))
        own = {key: value for value in namespace.values() for key in getattr(value, "handle_key", ())}
        made.key_handler = {**inherited, **own}
        result: KeyHandler = made
        return result

    @staticmethod
    def handle_input(cls: Any) -> Any:
        """Wait for a key and call its handler; None if it has no handler."""
        pressed = get_character()
        code = pressed if isinstance(pressed, int) else ord(pressed)
        handler = cls.key_handler.get(code)
        if handler is None:
            return None
        cls.current_selection = pressed
        return handler(cls)


def register(cls: type) -> KeyHandler:
    """Recreate a class with `KeyHandler`, so that its marked methods handle keys."""
    namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return KeyHandler(cls.__name__, cls.__bases__, namespace)


@register
class BulletMenu:
    """A menu in the terminal.

    Args:
        prompt: the question.
        choices: the possible answers.
    """

    def __init__(self, prompt: str | None = None, choices: list[str] = []) -> None:  # noqa: B006 - the old default
        self.position = 0
        self.choices = choices
        self.prompt = prompt
        self.arrow_char = "➔ "

    def run(self, default_choice: int = 0) -> int:
        """Show the menu and return the number of the user's choice."""
        names = [str(choice) for choice in self.choices]
        return names.index(prompter().choose(self.prompt or "", names, names[default_choice]))

    def write_choice(self, index: int, end: str = "") -> None:
        """Write a choice."""
        forceWrite(self.choices[index], end)

    def print_choice(self, index: int) -> None:
        """Write a choice, with an arrow if it is the current one."""
        forceWrite(self.arrow_char if index == self.position else " " * len(self.arrow_char))
        self.write_choice(index)
        reset_cursor()

    def move_direction(self, direction: Direction, num_spaces: int = 1) -> None:
        """Move to another choice."""
        before, last = self.position, len(self.choices) - 1
        step = num_spaces if direction == Direction.DOWN else -num_spaces
        self.position = min(max(before + step, 0), last)
        clear_line()
        self.print_choice(before)
        if self.position != before:
            move_cursor(abs(self.position - before), direction.name)
        self.print_choice(self.position)

    @mark(KEYMAP["up"])
    def move_up(self) -> None:
        """One up."""
        self.move_direction(Direction.UP)

    @mark(KEYMAP["down"])
    def move_down(self) -> None:
        """One down."""
        self.move_direction(Direction.DOWN)

    @mark(KEYMAP["newline"])
    def select(self) -> int:
        """Select the current choice."""
        move_cursor(len(self.choices) - self.position, "DOWN")
        return self.position

    @mark(KEYMAP["interrupt"])
    def interrupt(self) -> None:
        """Cancel the menu.

        Raises:
            KeyboardInterrupt: always.
        """
        raise KeyboardInterrupt

    @mark_multiple(*(KEYMAP[str(digit)] for digit in range(10)))
    def select_row(self) -> int | None:
        """Select the choice by the number key that was pressed."""
        index = int(str(getattr(self, "current_selection", 0)))
        if index >= len(self.choices):
            return None
        self.position = index
        return self.position
