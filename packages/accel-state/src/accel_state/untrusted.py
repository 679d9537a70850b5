"""Reads untrusted files: bounded JSON, regular files, paths that stay in their folder, text for terminals.

A checkpoint, an index or a message may be damaged, or written by an attacker. Nothing here trusts its size, depth,
numbers, names or file type. The functions raise OSError if a file cannot be read and ValueError if its content is
invalid; the reader of each format turns both into its own typed error.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from io import FileIO
from typing import Any, Final

__all__ = (
    "Shape",
    "anything",
    "dict_of",
    "integer",
    "list_of",
    "number",
    "open_regular",
    "parse_json",
    "path_inside",
    "printable",
    "quoted",
    "read_json",
    "read_limited",
    "record",
    "text",
)

Shape = Callable[[Any], str]
"""Returns what is wrong with a value, as text that follows the value's position (" is ..."); empty if it is valid."""

LIMIT: Final = 64 * 2**20
DEPTH: Final = 64
_SHELL_STREAM_PREFIXES: Final = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_BRACES_AS_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_NON_BRACKET_BYTES: Final = bytes(set(range(256)) - set(b"[]{}"))


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a file for reading, unbuffered, without ever waiting for it.

    Raises:
        OSError: there is no such file, or it is a folder, a device, a pipe or a socket.
    """
    flags = os.O_RDONLY
    # A pipe without a writer keeps `open` waiting; a terminal would become that of this process.
    for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY", "O_NOINHERIT"):
        flags |= getattr(os, name, 0)
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"not a path ({error})", repr(path)) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_limited(path: str | os.PathLike[str], limit: int = LIMIT, *, from_shell: bool = False) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Args:
        from_shell: also read a shell's process substitution, `<(command)`, for a path that the user types.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger.
    """
    allowed_stream = from_shell and os.fspath(path).startswith(_SHELL_STREAM_PREFIXES)
    with FileIO(os.fspath(path)) if allowed_stream else open_regular(path) as file:
        content = bytearray()
        while chunk := file.read(min(limit + 1 - len(content), 2**20)):
            content += chunk
            if len(content) > limit:
                raise OSError(errno.EFBIG, f"larger than the limit of {limit} bytes", os.fspath(path))
    return bytes(content)


def read_json(path: str | os.PathLike[str], shape: Shape | None = None, *, limit: int = LIMIT) -> Any:
    """The value in a JSON file; `read_limited` and `parse_json` in one.

    Raises:
        OSError: see `read_limited`.
        ValueError: see `parse_json`.
    """
    return parse_json(read_limited(path, limit), shape)


def parse_json(data: bytes | str, shape: Shape | None = None, *, depth: int = DEPTH) -> Any:
    """The value of a JSON text in UTF-8.

    Args:
        shape: the shape that the value must have.
        depth: how deep arrays and objects may nest.

    Raises:
        ValueError: it is not JSON, nests deeper, contains a key twice or an integer of thousands of digits, or does not
            have the `shape`.

    Example:
        >>> parse_json(b'{"size": 3}', record({"size": integer()}))
        {'size': 3}
        >>> parse_json(b'{"size": -3}', record({"size": integer()}))
        Traceback (most recent call last):
        ValueError: It['size'] is -3, not an integer from 0 to 9223372036854775807.
    """
    # Imported here, because readers of plain text need no parser.
    import json

    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    try:
        decoded = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"It is not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}.") from None
    if _nests_deeper(raw, depth):
        raise ValueError(f"It nests deeper than {depth} levels.")
    try:
        value = json.loads(decoded, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"It is not JSON: {error.msg} at {where}.") from None
    fault = "" if shape is None else shape(value)
    if fault:
        raise ValueError(f"It{fault}.")
    return value


def _nests_deeper(raw: bytes, depth: int) -> bool:
    """Whether brackets outside strings nest deeper; found without recursion, in one pass over the text per level."""
    outside = b"".join(raw.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    brackets = outside.translate(_BRACES_AS_BRACKETS, _NON_BRACKET_BYTES)
    for _ in range(depth):
        outer = brackets.replace(b"[]", b"")
        if len(outer) == len(brackets):
            break
        brackets = outer
    return b"[]" in brackets or brackets.count(b"[") > depth


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in values if names.count(name) > 1)
        raise ValueError(f"It contains the key {quoted(twice)} twice in one object.")
    return values


def quoted(value: Any) -> str:
    """A value for an error message: its `repr`, escaped and shortened."""
    return printable(f"{value!r:.200}")


def anything(value: Any) -> str:
    """Shape of every value."""
    return ""


def text(pattern: str | None = None) -> Shape:
    """Shape of a string without halves of surrogate pairs; the regular expression must match all of it."""
    compiled = None if pattern is None else re.compile(pattern)

    def fault(value: Any) -> str:
        if not isinstance(value, str):
            return f" is {quoted(value)}, not a text"
        if not value.isascii() and _SURROGATE.search(value):
            return f" is {quoted(value)}, with half of a surrogate pair"
        if compiled is not None and compiled.fullmatch(value) is None:
            return f" is {quoted(value)}, which does not match {pattern}"
        return ""

    return fault


def integer(least: int = 0, most: int = 2**63 - 1) -> Shape:
    """Shape of an integer in a range; a bool does not have it."""

    def fault(value: Any) -> str:
        fits = type(value) is int and least <= value <= most
        return "" if fits else f" is {quoted(value)}, not an integer from {least} to {most}"

    return fault


def number(least: float = -math.inf, most: float = math.inf) -> Shape:
    """Shape of an integer or a finite float in a range."""

    def fault(value: Any) -> str:
        fits = type(value) in (int, float) and math.isfinite(value) and least <= value <= most
        return "" if fits else f" is {quoted(value)}, not a number from {least} to {most}"

    return fault


def list_of(item: Shape, most: int | None = None) -> Shape:
    """Shape of an array of at most `most` items, each of the shape `item`."""

    def fault(value: Any) -> str:
        if not isinstance(value, list):
            return f" is {quoted(value)}, not a list"
        if most is not None and len(value) > most:
            return f" has {len(value)} items; at most {most} are allowed"
        return next((f"[{index}]{wrong}" for index, one in enumerate(value) if (wrong := item(one))), "")

    return fault


def dict_of(item: Shape, keys: Shape = anything) -> Shape:
    """Shape of an object with values of the shape `item` and keys of the shape `keys`."""

    def fault(value: Any) -> str:
        if not isinstance(value, dict):
            return f" is {quoted(value)}, not an object"
        for key, one in value.items():
            if wrong := keys(key):
                return f" has a key that{wrong}"
            if wrong := item(one):
                return f"[{quoted(key)}]{wrong}"
        return ""

    return fault


def record(needed: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None) -> Shape:
    """Shape of an object with known keys; keys that are in neither table are not checked."""
    shapes = {**needed, **(optional or {})}

    def fault(value: Any) -> str:
        if not isinstance(value, dict):
            return f" is {quoted(value)}, not an object"
        for key in needed:
            if key not in value:
                return f" has no {key!r}"
        return next((f"[{key!r}]{bad}" for key, of in shapes.items() if key in value and (bad := of(value[key]))), "")

    return fault


def path_inside(folder: str | os.PathLike[str], name: str, *, links_out: bool = False) -> str:
    """The path of a file below a folder; its name comes from another file of that folder.

    The name must be valid on POSIX and on Windows, whichever system runs.

    Args:
        links_out: whether a link may point outside the folder, as in the Hub's download cache.

    Raises:
        ValueError: the name is empty or absolute, leads out of the folder, or is not a possible name of a file.
    """
    if not _is_relative(name):
        raise ValueError(f"{quoted(name)} is not the name of a file in or below the folder")
    path = os.path.join(folder, name)
    parts = name.split("/")
    below = (os.path.join(folder, *parts[:count]) for count in range(1, len(parts) + 1))
    if not links_out and any(map(os.path.islink, below)):
        # ".." and absolute names are excluded, so only a link can lead outside.
        root = os.path.realpath(folder)
        if os.path.commonpath([root, os.path.realpath(path)]) != root:
            raise ValueError(f"{quoted(name)} is a link that leads out of the folder")
    return path


def _is_relative(name: Any) -> bool:
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    if name.startswith("/") or name[1:2] == ":":
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return ".." not in name.split("/")


def printable(value: object, keep: str = "") -> str:
    r"""Text that a terminal can print: characters that control it, or that reorder the line, are escaped.

    Args:
        keep: characters that are not escaped, such as a newline.

    Example:
        >>> printable("a\x1b[2Jb")
        'a\\x1b[2Jb'
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)
