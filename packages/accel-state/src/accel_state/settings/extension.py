"""Extensions: the entry points of installed distributions in our groups, found without importing them.

`importlib.metadata` reads and parses the metadata of every distribution. This module looks only at the
`entry_points.txt` files on `sys.path` that mention one of our groups, which is about fifty times faster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, NamedTuple

from accel_state.settings.installed import folder_names

__all__ = ("OWN_PACKAGES", "Extension", "add_library", "contained", "extensions", "forget", "is_library", "stack_level")

_PREFIX = "[accel."

OWN_PACKAGES: Final = frozenset(
    {
        "accel_bigmodel",
        "accel_cli",
        "accel_data",
        "accel_megatron",
        "accel_ops",
        "accel_plugins",
        "accel_ray",
        "accel_state",
        "accel_testing",
        "accel_torch",
        "accel_torchft",
        "accel_tracking",
    }
)
"""The import names of this project; other packages, also the user's, may begin with "accel_" too."""

_libraries = {"accelerate", "contextlib", "functools", "logging", "threading", "torch", "typing_extensions"}
_libraries |= OWN_PACKAGES


def is_library(module: str) -> bool:
    """Whether a module is part of torch, of these packages or of a loaded extension, and not the user's.

    Example:
        >>> is_library("accel_ops.collectives"), is_library("train")
        (True, False)
    """
    return module.partition(".")[0] in _libraries


def stack_level() -> int:
    """The `stacklevel` with which the caller's warning or log record names the innermost line of the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def add_library(package: str) -> None:
    """Count a top-level package as a library in `is_library`; `Extension.load` does so for its own package."""
    _libraries.add(package)


class Extension(NamedTuple):
    """One entry point: `name = target` in a group of a distribution.

    Args:
        group: for example "accel.backends".
        name: the name with which users select it.
        target: "module:attribute".
        origin: name and version of the distribution, such as "accel-plugins 0.1.0".
    """

    group: str
    name: str
    target: str
    origin: str

    @property
    def is_own(self) -> bool:
        """Whether a package of this project provides it."""
        return self.target.partition(":")[0].partition(".")[0] in OWN_PACKAGES

    def load(self) -> Any:
        """Import the module and return the attribute; import errors propagate. See `contained`."""
        import importlib

        module, _, attribute = self.target.partition(":")
        add_library(module.partition(".")[0])
        with contained():
            found: Any = importlib.import_module(module)
            for part in attribute.split(".") if attribute else ():
                found = getattr(found, part)
        return found


@contextmanager
def contained() -> Iterator[None]:
    """Run code of an extension, so that it can neither end this process nor write into the output of a command.

    What it prints is written to standard error. An interrupt by the user ends the process as always.

    Raises:
        ImportError: the code called `sys.exit`, or raised another exception that is not an error.
    """
    from contextlib import redirect_stdout

    with _interrupts() as interrupts, redirect_stdout(sys.stderr):
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            if interrupts:
                raise
            shown = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raise {error!r}"
            raise ImportError(f"Its code tried to end this process with: {shown}") from error


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The interrupts that this process receives in the block; an exception alone does not tell who raised it."""
    import signal

    received: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def interrupted(number: int, frame: Any) -> None:
        received.append(number)
        if callable(before):
            before(number, frame)

    try:
        if callable(before):
            signal.signal(signal.SIGINT, interrupted)
    except ValueError:
        # Only the main thread handles signals.
        yield received
        return
    try:
        yield received
    finally:
        if signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, before)


def extensions(group: str) -> tuple[Extension, ...]:
    """Extensions of a group in the order of `sys.path`; duplicates with the same name and target are left out."""
    return tuple(found for found in _scan(tuple(sys.path)) if found.group == group)


def forget() -> None:
    """Search again at the next call, because the running process has installed a package."""
    _scan.cache_clear()


@lru_cache(maxsize=4)
def _scan(path: tuple[str, ...]) -> tuple[Extension, ...]:
    found: dict[tuple[str, str, str], Extension] = {}
    for folder in dict.fromkeys(path):
        for origin, text in _metadata(folder or os.curdir):
            for extension in _parse(text, origin):
                found.setdefault((extension.group, extension.name, extension.target), extension)
    return tuple(found.values())


def _metadata(folder: str) -> Iterator[tuple[str, str]]:
    """Origin and text of each entry-point file in a folder that mentions one of our groups."""
    for name in sorted(name for name in folder_names(folder) or () if name.endswith((".dist-info", ".egg-info"))):
        try:
            # Without file objects and decoding: most of the hundreds of files do not mention our groups.
            file = os.open(f"{folder}/{name}/entry_points.txt", os.O_RDONLY)
        except OSError:
            continue
        try:
            content = os.read(file, os.fstat(file).st_size)
            text = content.decode() if _PREFIX.encode() in content else ""
        except (OSError, UnicodeDecodeError):
            continue
        finally:
            os.close(file)
        if text:
            distribution, _, version = name.rsplit(".", 1)[0].rpartition("-")
            yield f"{distribution.replace('_', '-')} {version}", text


def _parse(text: str, origin: str) -> Iterator[Extension]:
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif group.startswith(_PREFIX[1:]) and "=" in line and not line.startswith(("#", ";")):
            name, _, target = line.partition("=")
            texts = (group, name.strip(), target.split("[")[0].strip(), origin)
            yield Extension(*texts if all(map(str.isprintable, texts)) else map(_escaped, texts))


def _escaped(text: str) -> str:
    from accel_state.untrusted import printable

    return printable(text)
