"""The exceptions of this project, in one class hierarchy.

Each class is also a subclass of the builtin that fits it, so `except ValueError` works. Each message has three parts:
what failed, why, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = (
    "AccelError",
    "AlreadyExists",
    "BadStep",
    "CheckpointError",
    "CheckpointNameError",
    "CollectiveError",
    "Conflict",
    "DataError",
    "LaunchError",
    "Missing",
    "NoAccess",
    "NoState",
    "NonFiniteStep",
    "NotFound",
    "NotOffered",
    "NotReady",
    "OutOfMemory",
    "PluginError",
    "ReplicasDiffer",
    "SettingError",
    "ShapeMismatch",
    "SpikeStep",
    "StoreUnreachable",
    "UnknownKind",
)


class AccelError(Exception):
    """Base class of the errors that this project raises.

    Args:
        failure: what failed, with the caller's value: "Cannot use num_processes='two'."
        obstacle: why it failed.
        remedy: what the caller can do.
    """

    def __init__(self, failure: str, obstacle: str = "", remedy: str = "") -> None:
        super().__init__(failure, obstacle, remedy)
        self.failure = failure
        self.obstacle = obstacle
        self.remedy = remedy

    def __str__(self) -> str:
        return "\n  ".join(part for part in (self.failure, self.obstacle, self.remedy) if part)


class SettingError(AccelError, ValueError):
    """Raised when an argument, a variable, a flag or a key of a config file has an invalid value."""


class Conflict(SettingError):
    """Raised when two settings, each valid by itself, contradict each other; the message names both."""


class NotFound(SettingError, FileNotFoundError):
    """Raised when a setting names a file, a repository or a program that does not exist."""


class AlreadyExists(SettingError, FileExistsError):
    """Raised when a call would overwrite a file and overwriting is not allowed."""


class NoAccess(SettingError, PermissionError):
    """Raised when a setting names a file or repository that this user may not read."""


class UnknownKind(AccelError, TypeError):
    """Raised when an argument is of a type that the called function does not handle."""


class Missing(AccelError, ImportError):
    """Raised when a required package is not installed or too old; the message contains the install command."""


class NotReady(AccelError, RuntimeError):
    """Raised when a method is called too early or too late in the life of its object."""


class NoState(NotReady, AttributeError):
    """Raised when a state is read before it exists or after a reset; `hasattr` returns False then."""


class NotOffered(AccelError, NotImplementedError):
    """Raised when the backend, device or engine in use does not support a call or an option."""


class OutOfMemory(AccelError, RuntimeError):
    """Raised when even the smallest amount of work does not fit into the device's memory."""


class PluginError(AccelError, RuntimeError):
    """Raised when a plugin that was selected by name cannot be loaded; the cause is chained."""


class ReplicasDiffer(AccelError, RuntimeError):
    """Raised on every process when processes that should have equal weights and equal positions differ."""


class BadStep(AccelError, ArithmeticError):
    """Base class of the errors that a guard of training steps raises on every process, before weights change.

    Args:
        failure, obstacle, remedy: see `AccelError`.
        kind: what caused it: "data", "numerics" or "hardware". The restart policy of a launch reads it.
        samples: ids of the samples of the step, on the processes where it was bad.
    """

    def __init__(
        self, failure: str, obstacle: str = "", remedy: str = "", kind: str = "numerics", samples: Sequence[str] = ()
    ) -> None:
        super().__init__(failure, obstacle, remedy)
        self.kind = kind
        self.samples = tuple(samples)


class NonFiniteStep(BadStep):
    """Raised when the loss or the gradients of an optimizer step are NaN or infinite."""


class SpikeStep(BadStep):
    """Raised when the loss or the gradient norm of an optimizer step is far above those of the steps before it."""


class ShapeMismatch(AccelError, ValueError):
    """Raised on every process when they call a collective with different structures, shapes, dtypes or operations."""


class CollectiveError(AccelError, RuntimeError):
    """Raised when a collective cannot complete: a process died or hangs, or the network failed."""


class StoreUnreachable(CollectiveError):
    """Raised when the store of the run is gone, or did not answer before the deadline of a call."""


class DataError(AccelError, RuntimeError):
    """Raised when a data set, sampler or loader contradicts itself, for example about its length."""


class CheckpointError(AccelError, RuntimeError):
    """Raised when a checkpoint cannot be written, or when one on the disk is damaged or incomplete."""


class CheckpointNameError(SettingError, CheckpointError):
    """Raised when a call names a folder without a checkpoint, or a name that another checkpoint already uses."""


class LaunchError(AccelError, RuntimeError):
    """Raised by the launcher when the processes of a run cannot be started, or fail."""
