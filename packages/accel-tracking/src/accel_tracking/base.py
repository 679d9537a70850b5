"""The interface of a tracker: what keeps the metrics of a run somewhere.

A tracker is made when the run is planned (no vendor library is touched), started when it begins, given the
configuration and the metrics, and finished. To add one, subclass `GeneralTracker` and hand an instance to `log_with=`,
or register the class by name: `register_tracker_class`, or the entry-point group `accel.trackers` of your package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from accel_state import current
from accel_state.errors import NotOffered
from accel_state.settings.installed import Requirement
from accel_state.topology import read_topology

__all__ = ("GeneralTracker", "Tracker", "is_main_process", "on_main_process")

F = TypeVar("F", bound=Callable[..., Any])


def is_main_process() -> bool:
    """Whether this process is the first of the run: by its state if there is one, else by its launcher's variables."""
    process = current.process_or_none()
    return (read_topology() if process is None else process).rank == 0


def on_main_process(function: F) -> F:
    """Decorator of a tracker's method: does nothing on other processes than the main one.

    A tracker with `main_process_only = False` runs it everywhere. Which process this is, is asked at each call.
    """

    @functools.wraps(function)
    def where_it_counts(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", True) and not is_main_process():
            return None
        return function(self, *args, **kwargs)

    return where_it_counts  # type: ignore[return-value]


class GeneralTracker:
    """Base of every tracker; by itself, with `_blank=True`, one that takes everything and keeps nothing.

    A subclass defines `name`, `requires_logging_directory` and `tracker`, and overrides what it offers of `start`,
    `store_init_configuration`, `log`, `log_images`, `log_table` and `finish`. Its constructor takes the run's name
    first, and `logging_dir` second when it requires one.

    Raises:
        NotOffered: a subclass lacks one of the three.

    Example:
        class PrintTracker(GeneralTracker):
            name = "print"
            requires_logging_directory = False

            @property
            def tracker(self):
                return None

            @on_main_process
            def log(self, values, step=None, **kwargs):
                print(step, values)
    """

    name: str
    """What users choose it by in `log_with=`."""

    requires_logging_directory: bool
    """Whether it needs a folder to write into."""

    main_process_only: bool = True
    """Whether methods decorated with `on_main_process` run on the main process alone."""

    requirement: ClassVar[Requirement | None] = None
    """The package it needs, or None."""

    def __init__(self, _blank: bool = False) -> None:
        self._blank = _blank
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if not hasattr(type(self), name)]
        # `tracker` may also be set on the instance before this constructor is called.
        missing = [name for name in missing if name not in vars(self)]
        if missing and not _blank:
            raise NotOffered(
                f"A tracker of the class {type(self).__qualname__} was made.",
                f"The class lacks the required attributes: {', '.join(f'`{name}`' for name in missing)}.",
                "Define them in the class; `tracker` is a property that returns the library's own object.",
            )

    def start(self) -> None:
        """Begin the run: import the library and open what it writes to."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the hyperparameters of the run."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep metrics at a step.

        Args:
            values: name to number, text, or a mapping of these; numbers may be tensors.
            step: the step they belong to; None leaves it to the tracker.
            kwargs: for the library's own function.
        """

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images: name to a batch of arrays or of image objects."""
        self._refuse("images")

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep a table, given as `columns` and rows of `data`, or as a `dataframe`."""
        self._refuse("tables")

    def finish(self) -> None:
        """End the run; everything logged is then kept for good."""

    def _refuse(self, what: str) -> None:
        if not self._blank:
            raise NotOffered(
                f"The tracker {self.name!r} was given {what} to log.",
                f"It cannot keep {what}.",
                "Log them to another tracker with get_tracker(name), or as numbers and text.",
            )


Tracker = GeneralTracker
