"""`LOGGER_TYPE_TO_CLASS`: the registry of trackers, as a dict that scripts can read and extend."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Final

from accel_state.errors import PluginError, SettingError
from accel_tracking.base import GeneralTracker
from accel_tracking.registry import register_tracker_class, tracker_class, tracker_names, unregister_tracker_class


class TrackerClasses(MutableMapping[str, type[GeneralTracker]]):
    """Tracker classes by name. An assignment registers a class, and a deletion removes it from the registry."""

    def __getitem__(self, name: str) -> type[GeneralTracker]:
        try:
            return tracker_class(name)
        except (PluginError, SettingError):
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: type[GeneralTracker]) -> None:
        if value.name != name:
            raise SettingError(
                f"Cannot set LOGGER_TYPE_TO_CLASS[{name!r}] = {value.__name__}.",
                f"The name of the class is {value.name!r}, and trackers are found by their name.",
                "Give the class that name, or use its own as the key.",
            )
        register_tracker_class(value)

    def __delitem__(self, name: str) -> None:
        try:
            unregister_tracker_class(name)
        except SettingError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(tracker_names())

    def __len__(self) -> int:
        return len(tracker_names())


LOGGER_TYPE_TO_CLASS: Final = TrackerClasses()
