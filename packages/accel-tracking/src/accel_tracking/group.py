"""A `TrackerGroup` passes each call to every tracker of a run; a tracker that fails does not stop the training."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from accel_state.errors import AccelError, SettingError
from accel_tracking.base import GeneralTracker, is_main_process
from accel_tracking.registry import LoggerType, LogWith, filter_trackers, tracker_class, tracker_names

__all__ = ("TrackerGroup",)

_log = logging.getLogger(__name__)


class TrackerGroup:
    """The trackers of a run.

    The first error of a tracker becomes a warning. Later errors are counted, and `finish` reports the count. With
    `strict=True` every error propagates at once.

    Args:
        trackers: instances, in the order of the calls.
        strict: let errors of trackers propagate.
    """

    def __init__(self, trackers: Iterable[GeneralTracker] = (), strict: bool = False) -> None:
        self.trackers = list(trackers)
        self.strict = strict
        self.failures: dict[str, int] = {}
        self._first_failure: dict[str, str] = {}

    @classmethod
    def of(
        cls,
        log_with: LogWith,
        project_name: str,
        logging_dir: str | os.PathLike[str] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        strict: bool = False,
    ) -> TrackerGroup:
        """Construct the trackers that `log_with=` names on the main process, and none on other processes.

        If it names none and `logging_dir` is set, the tracker "jsonl" stores the run there, so that every run can be
        read later.

        Args:
            log_with: see `filter_trackers`.
            project_name: each tracker receives it as the name of the run.
            logging_dir: folder for trackers that need one.
            init_kwargs: further arguments for the constructors, by tracker name; those of other trackers are ignored.
            strict: let errors of trackers propagate.

        Raises:
            SettingError: an unknown tracker, or a tracker without its folder.
            Missing: no library of the named trackers is installed.
        """
        chosen = filter_trackers(log_with, logging_dir)
        if not chosen and logging_dir is not None:
            chosen = [LoggerType.JSONL.value]
        options = dict(init_kwargs or {})
        names = [choice if isinstance(choice, str) else choice.name for choice in chosen]
        # Scripts pass arguments for every tracker that they support; only a name that none has is a mistake.
        if not is_main_process():
            return cls(strict=strict)
        for name in sorted(set(options).difference(names, tracker_names())):
            _log.warning("init_kwargs names the tracker %r, which does not exist. Its arguments are ignored.", name)
        return cls((_construct(choice, project_name, logging_dir, options) for choice in chosen), strict)

    def __iter__(self) -> Iterator[GeneralTracker]:
        return iter(self.trackers)

    def __len__(self) -> int:
        return len(self.trackers)

    def start(self, config: Mapping[str, Any] | None = None) -> None:
        """Start every tracker and pass it the hyperparameters; the run continues without a tracker that fails to start.

        Raises:
            AccelError: an error of the accel packages, such as a library that is not installed, even if `strict` is
                false.
        """
        started = []
        for tracker in self.trackers:
            try:
                tracker.start()
            except AccelError:
                raise
            except Exception as error:
                self._handle(tracker, "start", error)
            else:
                started.append(tracker)
        self.trackers = started
        if config is not None:
            self._call_each("store_init_configuration", lambda tracker: tracker.store_init_configuration(config))

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log metrics with every tracker.

        Args:
            values: name to number, text, or a mapping of these; numbers may be tensors.
            step: step of the metrics; if None, each tracker uses its own counter.
            log_kwargs: further arguments for each tracker, by its name.
        """
        options = log_kwargs or {}
        # Not through `_call_each`, because `log` runs at every step and a closure costs time.
        for tracker in self.trackers:
            try:
                tracker.log(values, step=step, **(options.get(tracker.name) or {}))
            except Exception as error:
                self._handle(tracker, "log", error)

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log images with every tracker.

        Args:
            values: name to a batch of images; see `GeneralTracker.log_images`.
            step: step of the images; if None, each tracker uses its own counter.
            log_kwargs: further arguments for each tracker, by its name.
        """
        options = log_kwargs or {}
        self._call_each(
            "log_images", lambda tracker: tracker.log_images(values, step=step, **(options.get(tracker.name) or {}))
        )

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log a table with every tracker, given as `columns` and rows of `data`, or as a `dataframe`.

        Args:
            table_name: name of the table.
            columns: names of the columns, with `data`.
            data: rows, each with one value per column.
            dataframe: a pandas DataFrame instead of `columns` and `data`.
            step: step of the table; if None, each tracker uses its own counter.
            log_kwargs: further arguments for each tracker, by its name.
        """
        options = log_kwargs or {}

        def send(tracker: GeneralTracker) -> None:
            tracker.log_table(table_name, columns, data, dataframe, step=step, **(options.get(tracker.name) or {}))

        self._call_each("log_table", send)

    def get(self, name: str, unwrap: bool = False) -> Any:
        """The tracker with this name, or the library's own object with `unwrap=True`.

        Processes other than the main one receive a tracker that stores nothing, so that the same calls work there.

        Raises:
            SettingError: the run has no tracker with this name.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]
        if not is_main_process():
            return GeneralTracker(_blank=True)
        raise SettingError(
            f"Cannot get the tracker {name!r}.",
            f"The trackers of this run are: {', '.join(tracker.name for tracker in self.trackers) or 'none'}.",
            "Name it in log_with= and call init_trackers first.",
        )

    def finish(self) -> None:
        """Finish every tracker, and report how often each of them failed."""
        self._call_each("finish", lambda tracker: tracker.finish())
        for name, count in self.failures.items():
            _log.warning(
                "The tracker %r failed %d times in this run. First error: %s", name, count, self._first_failure[name]
            )

    def _call_each(self, action: str, call: Callable[[GeneralTracker], None]) -> None:
        for tracker in self.trackers:
            try:
                call(tracker)
            except Exception as error:
                self._handle(tracker, action, error)

    def _handle(self, tracker: GeneralTracker, action: str, error: Exception) -> None:
        if self.strict:
            raise error
        name = tracker.name
        self.failures[name] = self.failures.get(name, 0) + 1
        if name not in self._first_failure:
            self._first_failure[name] = f"{action}: {type(error).__name__}: {error}"
            _log.warning(
                "The tracker %r failed in %s. Training continues, and later failures are counted.",
                name, action, exc_info=error,
            )  # fmt: skip


def _construct(
    choice: str | GeneralTracker,
    project_name: str,
    logging_dir: str | os.PathLike[str] | None,
    options: Mapping[str, Mapping[str, Any]],
) -> GeneralTracker:
    if isinstance(choice, GeneralTracker):
        return choice
    cls: Any = tracker_class(choice)
    arguments = (project_name, logging_dir) if cls.requires_logging_directory else (project_name,)
    return cls(*arguments, **(options.get(choice) or {}))  # type: ignore[no-any-return]
