"""All trackers of a run as one: what is logged goes to each, and none of them can stop the training."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from accel_state.errors import AccelError, SettingError
from accel_tracking.base import GeneralTracker, is_main_process
from accel_tracking.registry import LoggerType, LogWith, filter_trackers, tracker_class

__all__ = ("TrackerGroup",)

_log = logging.getLogger(__name__)


class TrackerGroup:
    """The trackers of a run.

    A tracker that raises is warned about once, counted, and told about again when the run ends; with `strict=True` its
    error comes through at once.

    Args:
        trackers: instances, in the order in which they are asked.
        strict: let errors of trackers through.
    """

    def __init__(self, trackers: Iterable[GeneralTracker] = (), strict: bool = False) -> None:
        self.trackers = list(trackers)
        self.strict = strict
        self.failures: dict[str, int] = {}
        self._first: dict[str, str] = {}

    @classmethod
    def of(
        cls,
        log_with: LogWith,
        project_name: str,
        logging_dir: str | os.PathLike[str] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        strict: bool = False,
    ) -> TrackerGroup:
        """Make the trackers that `log_with=` names; on other processes than the main one, none.

        Where it names none and there is a folder, the run is kept there as JSON lines, so that it leaves something to
        read.

        Args:
            log_with: what `filter_trackers` takes.
            project_name: handed to each tracker as the name of the run.
            logging_dir: handed to trackers that need a folder.
            init_kwargs: further arguments of the constructors, by tracker name.

        Raises:
            SettingError: an unknown tracker, a tracker without its folder, or `init_kwargs` for one that is not there.
            Missing: the library of a named tracker is not installed.
        """
        chosen = filter_trackers(log_with, logging_dir)
        if not chosen and logging_dir is not None:
            chosen = [LoggerType.JSONL.value]
        options = dict(init_kwargs or {})
        names = [one if isinstance(one, str) else one.name for one in chosen]
        unused = sorted(set(options).difference(names))
        if unused:
            raise SettingError(
                f"Arguments for the trackers {', '.join(unused)} were given.",
                f"The trackers of this run are: {', '.join(names) or 'none'}.",
                "Name these trackers in log_with=, or leave their arguments out.",
            )
        if not is_main_process():
            return cls(strict=strict)
        return cls((_made(one, project_name, logging_dir, options) for one in chosen), strict)

    def __iter__(self) -> Iterator[GeneralTracker]:
        return iter(self.trackers)

    def __len__(self) -> int:
        return len(self.trackers)

    def start(self, config: Mapping[str, Any] | None = None) -> None:
        """Start every tracker and hand it the hyperparameters; one that cannot start is left out of the run.

        Raises:
            AccelError: a tracker was asked for something it cannot do, strict or not.
        """
        started = []
        for tracker in self.trackers:
            try:
                tracker.start()
            except AccelError:
                raise
            except Exception as error:
                self._failed(tracker, "start", error)
            else:
                started.append(tracker)
        self.trackers = started
        if config is not None:
            self._each("store_init_configuration", lambda tracker: tracker.store_init_configuration(config))

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log metrics to every tracker; `log_kwargs` holds further arguments by tracker name."""
        more = log_kwargs or {}
        for tracker in self.trackers:
            try:
                tracker.log(values, step=step, **more.get(tracker.name, {}))
            except Exception as error:
                self._failed(tracker, "log", error)

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log images to every tracker."""
        more = log_kwargs or {}
        self._each("log_images", lambda tracker: tracker.log_images(values, step=step, **more.get(tracker.name, {})))

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log a table to every tracker."""
        more = log_kwargs or {}

        def send(tracker: GeneralTracker) -> None:
            tracker.log_table(table_name, columns, data, dataframe, step=step, **more.get(tracker.name, {}))

        self._each("log_table", send)

    def get(self, name: str, unwrap: bool = False) -> Any:
        """The tracker with a name, or the library's own object with `unwrap=True`.

        On other processes than the main one: a tracker that keeps nothing, so that calls on it do no harm.

        Raises:
            SettingError: the run has no tracker of that name.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]
        if not is_main_process():
            return GeneralTracker(_blank=True)
        raise SettingError(
            f"The tracker {name!r} was asked for.",
            f"The trackers of this run are: {', '.join(tracker.name for tracker in self.trackers) or 'none'}.",
            "Name it in log_with= and call init_trackers first.",
        )

    def finish(self) -> None:
        """Finish every tracker, and say which of them failed meanwhile and how often."""
        self._each("finish", lambda tracker: tracker.finish())
        for name, count in self.failures.items():
            _log.warning("The tracker %r failed %d times in this run; first: %s", name, count, self._first[name])

    def _each(self, action: str, call: Callable[[GeneralTracker], None]) -> None:
        for tracker in self.trackers:
            try:
                call(tracker)
            except Exception as error:
                self._failed(tracker, action, error)

    def _failed(self, tracker: GeneralTracker, action: str, error: Exception) -> None:
        if self.strict:
            raise error
        name = tracker.name
        self.failures[name] = self.failures.get(name, 0) + 1
        if name not in self._first:
            self._first[name] = f"{action}: {type(error).__name__}: {error}"
            _log.warning(
                "The tracker %r failed in %s; training goes on, later failures are only counted.",
                name, action, exc_info=error,
            )  # fmt: skip


def _made(
    one: str | GeneralTracker,
    project_name: str,
    logging_dir: str | os.PathLike[str] | None,
    options: Mapping[str, Mapping[str, Any]],
) -> GeneralTracker:
    if isinstance(one, GeneralTracker):
        return one
    kind: Any = tracker_class(one)
    arguments = (project_name, logging_dir) if kind.requires_logging_directory else (project_name,)
    return kind(*arguments, **options.get(one, {}))  # type: ignore[no-any-return]
