"""Trackers by name: registered at run time, or offered by installed packages through the entry points `accel.trackers`.

The trackers of this package are offered the same way as a stranger's.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any, TypeAlias

from accel_state.errors import Missing, PluginError, SettingError
from accel_state.labels import BaseEnum
from accel_state.settings.extension import extensions
from accel_state.settings.schema import closest
from accel_tracking.base import GeneralTracker

__all__ = (
    "LogWith",
    "LoggerType",
    "filter_trackers",
    "get_available_trackers",
    "register_tracker_class",
    "tracker_class",
    "tracker_names",
    "withdraw_tracker_class",
)


class LoggerType(str, BaseEnum):
    """Names of the trackers that come with this project, and ALL for every one that can be used here."""

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
"""What `log_with=` takes."""

_registered: dict[str, type[GeneralTracker]] = {}
_withdrawn: set[str] = set()


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Offer a tracker class under its `name`, in place of one that has it already; usable as a decorator.

    Raises:
        SettingError: the class is not a tracker, or does not say what it is called or whether it needs a folder.
    """
    name = getattr(tracker_class, "name", None)
    is_tracker = isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)
    if not (is_tracker and isinstance(name, str) and hasattr(tracker_class, "requires_logging_directory")):
        raise SettingError(
            f"Register {tracker_class!r} as a tracker.",
            "It is not a subclass of GeneralTracker that has the attributes `name` and `requires_logging_directory`.",
            "Subclass accel_tracking.GeneralTracker and define both in the class.",
        )
    if name in tracker_names():
        warnings.warn(f"{tracker_class.__name__} takes the place of the tracker {name!r}.", UserWarning, stacklevel=2)
    _registered[name] = tracker_class
    _withdrawn.discard(name)
    return tracker_class


def withdraw_tracker_class(name: str) -> None:
    """Offer no tracker under a name, until a class is registered under it.

    Raises:
        SettingError: no tracker of that name is known.
    """
    tracker_class(name)
    _registered.pop(name, None)
    _withdrawn.add(name)


def tracker_names() -> tuple[str, ...]:
    """Names of all trackers that are known, whether or not their library is installed."""
    known = dict.fromkeys([*_registered, *(found.name for found in extensions("accel.trackers"))])
    return tuple(name for name in known if name not in _withdrawn)


def tracker_class(name: str | LoggerType) -> type[GeneralTracker]:
    """The class of a tracker; its library is not imported.

    Raises:
        SettingError: no tracker of that name is known.
        PluginError: the package that offers it could not be imported.
    """
    text = str(name)
    if text in _registered:
        return _registered[text]
    for found in extensions("accel.trackers"):
        if found.name == text and text not in _withdrawn:
            try:
                return found.load()  # type: ignore[no-any-return]
            except Exception as error:
                raise PluginError(
                    f"The tracker {text!r} was asked for.",
                    f"{found.target} of {found.origin} could not be loaded: {error!r}.",
                    "Repair or remove that package.",
                ) from error
    known = tracker_names()
    suggestion = closest(text, known)
    raise SettingError(
        f"The tracker {text!r} was asked for.",
        f"Known trackers: {', '.join(sorted(known))}.",
        f"Did you mean {suggestion!r}?" if suggestion else "Use one of these, or register a class of your own.",
    )


def get_available_trackers() -> list[str]:
    """Names of the trackers whose library is installed; a package whose tracker cannot be loaded is warned about."""
    names = []
    for name in tracker_names():
        try:
            requirement = tracker_class(name).requirement
        except PluginError as error:
            warnings.warn(str(error), UserWarning, stacklevel=2)
            continue
        if requirement is None or requirement.obstacle() is None:
            names.append(name)
    return names


def filter_trackers(log_with: LogWith, logging_dir: str | os.PathLike[str] | None = None) -> list[str | GeneralTracker]:
    """What `log_with=` means here: instances as they are, names checked, "all" spelled out, each name once.

    Args:
        log_with: name, `LoggerType`, instance, or a list of these.
        logging_dir: the folder for trackers that need one; with "all" those that need one are left out when it is None.

    Raises:
        SettingError: an unknown name, or a tracker that needs `logging_dir`.
        Missing: the library of a named tracker is not installed.
    """
    given: list[Any] = [log_with] if isinstance(log_with, (str, LoggerType, GeneralTracker)) else list(log_with or ())
    chosen: list[str | GeneralTracker] = []
    for one in given:
        if isinstance(one, GeneralTracker):
            chosen.append(one)
        elif str(one) == LoggerType.ALL.value:
            chosen += [name for name in get_available_trackers() if logging_dir or not _needs_folder(name)]
        else:
            _check(str(one), logging_dir)
            chosen.append(str(one))
    seen: set[Any] = set()
    return [one for one in chosen if not (one in seen or seen.add(one))]  # type: ignore[func-returns-value]


def _needs_folder(name: str) -> bool:
    return bool(getattr(tracker_class(name), "requires_logging_directory", False))


def _check(name: str, logging_dir: str | os.PathLike[str] | None) -> None:
    requirement = tracker_class(name).requirement
    obstacle = requirement.obstacle() if requirement is not None else None
    if requirement is not None and obstacle is not None:
        raise Missing(f"The tracker {name!r} was asked for.", obstacle, requirement.remedy())
    if logging_dir is None and _needs_folder(name):
        raise SettingError(
            f"The tracker {name!r} was asked for.",
            "It writes into a folder and none was named.",
            "Name one: project_dir=..., or logging_dir in the project configuration.",
        )
