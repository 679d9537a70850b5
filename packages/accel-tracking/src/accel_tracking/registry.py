"""Finds trackers by name: classes that a script registers, and entry points `accel.trackers` of installed packages.

The trackers of this package are entry points as well.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from accel_state.errors import Missing, PluginError, SettingError
from accel_state.labels import BaseEnum
from accel_state.library import stack_level
from accel_state.plugins import Interface, PluginGroup
from accel_tracking.base import GeneralTracker, is_main_process

__all__ = (
    "TRACKERS",
    "LogWith",
    "LoggerType",
    "filter_trackers",
    "get_available_trackers",
    "register_tracker_class",
    "tracker_class",
    "tracker_names",
    "unregister_tracker_class",
)


class LoggerType(str, BaseEnum):
    """Names of the trackers of this project, and ALL for every tracker whose library is installed."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    JSONL = "jsonl"


LogWith: TypeAlias = "str | LoggerType | GeneralTracker | Iterable[str | LoggerType | GeneralTracker] | None"
"""Type of `log_with=`."""

TRACKERS: Final[PluginGroup[type[GeneralTracker]]] = PluginGroup(
    "accel.trackers", "tracker", interface=Interface(subclass_of=GeneralTracker, named=True)
)
"""The trackers of installed packages; a class that a script registers replaces one of these."""

_registered: dict[str, type[GeneralTracker]] = {}
_unregistered: set[str] = set()


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Register a tracker class under its `name`; it replaces another class with that name. Works as a decorator.

    Raises:
        SettingError: the class is not a `GeneralTracker`, or lacks `name` or `requires_logging_directory`.
    """
    name = getattr(tracker_class, "name", None)
    is_tracker = isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)
    if not (is_tracker and isinstance(name, str) and hasattr(tracker_class, "requires_logging_directory")):
        raise SettingError(
            f"Cannot register {tracker_class!r} as a tracker.",
            "It is not a subclass of GeneralTracker with the attributes `name` and `requires_logging_directory`.",
            "Subclass accel_tracking.GeneralTracker and define both in the class.",
        )
    if name in tracker_names():
        warnings.warn(
            f"{tracker_class.__name__} replaces the registered tracker {name!r}.", UserWarning, stacklevel=stack_level()
        )
    _registered[name] = tracker_class
    _unregistered.discard(name)
    return tracker_class


def unregister_tracker_class(name: str) -> None:
    """Remove a tracker by its name, until a class is registered under it again.

    Raises:
        SettingError: the name is unknown.
    """
    tracker_class(name)
    _registered.pop(name, None)
    _unregistered.add(name)


def tracker_names() -> tuple[str, ...]:
    """Names of all trackers, whether or not their library is installed."""
    names = dict.fromkeys([*_registered, *TRACKERS.names()])
    return tuple(name for name in names if name not in _unregistered)


def tracker_class(name: str | LoggerType) -> type[GeneralTracker]:
    """The class of a tracker; this does not import its library.

    Raises:
        SettingError: the name is unknown.
        PluginError: several packages provide the tracker, it cannot be loaded, or it is not a tracker class.
    """
    text = str(name)
    if text in _registered:
        return _registered[text]
    failure = f"Cannot use the tracker {text!r}."
    if text not in tracker_names():
        raise TRACKERS.unknown(text, failure, tracker_names())
    return TRACKERS.find(text, failure).get(failure)


def get_available_trackers() -> list[str]:
    """Names of the trackers whose library is installed, with a warning for each tracker that cannot be loaded."""
    names = []
    for name in tracker_names():
        try:
            requirement = tracker_class(name).requirement
        except PluginError as error:
            warnings.warn(str(error), UserWarning, stacklevel=stack_level())
            continue
        if requirement is None or requirement.obstacle() is None:
            names.append(name)
    return names


def filter_trackers(log_with: LogWith, logging_dir: str | os.PathLike[str] | None = None) -> list[str | GeneralTracker]:
    """Resolve `log_with=` to instances and checked names, each once; "all" becomes the available trackers.

    Args:
        log_with: name, `LoggerType`, instance, or a list of these. Of several, those without their library are omitted
            with a warning.
        logging_dir: folder for trackers that need one; without it, "all" skips them.

    Raises:
        SettingError: an unknown name, or a tracker that needs `logging_dir`.
        Missing: no library of the named trackers is installed.
    """
    choices: list[Any] = [log_with] if isinstance(log_with, (str, LoggerType, GeneralTracker)) else list(log_with or ())
    chosen: list[str | GeneralTracker] = []
    missing: list[Missing] = []
    for choice in choices:
        if isinstance(choice, GeneralTracker):
            chosen.append(choice)
        elif str(choice) == LoggerType.ALL.value:
            chosen += [name for name in get_available_trackers() if logging_dir or not _needs_folder(name)]
        elif (error := _missing(str(choice))) is not None:
            missing.append(error)
        else:
            _check_folder(str(choice), logging_dir)
            chosen.append(str(choice))
    if missing and not chosen:
        raise missing[0]
    for error in missing if is_main_process() else ():
        warnings.warn(
            f"{error.failure} {error.obstacle} The run uses its other trackers. {error.remedy}",
            UserWarning,
            stacklevel=stack_level(),
        )
    return list(dict.fromkeys(chosen))


def _needs_folder(name: str) -> bool:
    return bool(getattr(tracker_class(name), "requires_logging_directory", False))


def _missing(name: str) -> Missing | None:
    """The error of a tracker whose library is not installed."""
    requirement = tracker_class(name).requirement
    return None if requirement is None else requirement.error(f"Cannot use the tracker {name!r}.")


def _check_folder(name: str, logging_dir: str | os.PathLike[str] | None) -> None:
    if logging_dir is None and _needs_folder(name):
        raise SettingError(
            f"Cannot use the tracker {name!r}.",
            "It writes into a folder, and none is configured.",
            "Set project_dir=..., or logging_dir in the project configuration.",
        )
