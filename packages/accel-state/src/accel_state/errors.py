"""Every error this project raises, in one tree.

Each class is also a child of the builtin that fits it, so `except ValueError` keeps working, and each message has three
parts: what was asked, what stands in the way, and what to do.
"""

from __future__ import annotations

__all__ = (
    "AccelError",
    "AlreadyExists",
    "CheckpointError",
    "CollectiveError",
    "Conflict",
    "DataError",
    "LaunchError",
    "Missing",
    "NoAccess",
    "NoState",
    "NotFound",
    "NotOffered",
    "NotReady",
    "OutOfMemory",
    "PluginError",
    "SettingError",
    "ShapeMismatch",
    "StoreUnreachable",
    "UnknownKind",
)


class AccelError(Exception):
    """Base of every error that this project raises on purpose.

    Args:
        asked: what the caller wanted, with the value given.
        obstacle: what stands in the way.
        remedy: what the caller can do about it.
    """

    def __init__(self, asked: str, obstacle: str = "", remedy: str = "") -> None:
        super().__init__(asked, obstacle, remedy)
        self.asked = asked
        self.obstacle = obstacle
        self.remedy = remedy

    def __str__(self) -> str:
        return "\n  ".join(part for part in (self.asked, self.obstacle, self.remedy) if part)


class SettingError(AccelError, ValueError):
    """Met when an argument, a variable, a flag or a key of a config file holds a value that cannot be used."""


class Conflict(SettingError):
    """Met when two settings, each fine by itself, contradict each other; the message names both."""


class NotFound(SettingError, FileNotFoundError):
    """Met when a setting names a file, a repository or a program that does not exist."""


class AlreadyExists(SettingError, FileExistsError):
    """Met when a file is there that the request would write over, and nobody said that it may."""


class NoAccess(SettingError, PermissionError):
    """Met when a setting names what exists and this user may not read."""


class UnknownKind(AccelError, TypeError):
    """Met when an object is handed over that is of no kind the called function handles."""


class Missing(AccelError, ImportError):
    """Met when a package that the request needs is absent or too old; the message has the install line."""


class NotReady(AccelError, RuntimeError):
    """Met when a call comes too early or too late in the life of the object it is made on."""


class NoState(NotReady, AttributeError):
    """Met when a state is read before it was made or after it was reset; `hasattr` says False then."""


class NotOffered(AccelError, NotImplementedError):
    """Met when the chosen backend, device or engine cannot do what was asked."""


class OutOfMemory(AccelError, RuntimeError):
    """Met when even the smallest piece of the work does not fit into the memory of the device."""


class PluginError(AccelError, RuntimeError):
    """Met when a plugin that was asked for by name could not be loaded; the cause is chained."""


class ShapeMismatch(AccelError, ValueError):
    """Met on every process when they hand different structures, shapes, dtypes or operations to a collective."""


class CollectiveError(AccelError, RuntimeError):
    """Met when a collective could not be completed: a process died, hangs, or the network failed."""


class StoreUnreachable(CollectiveError):
    """Met when the store that the processes of a run share is gone, or did not answer before the deadline of a call."""


class DataError(AccelError, RuntimeError):
    """Met when a data set, sampler or loader does not keep what it promised, such as its length."""


class CheckpointError(AccelError, RuntimeError):
    """Met when a checkpoint cannot be written or what lies on the disk cannot be trusted."""


class LaunchError(AccelError, RuntimeError):
    """Met by the launcher when the processes of a run could not be started or did not end well."""
