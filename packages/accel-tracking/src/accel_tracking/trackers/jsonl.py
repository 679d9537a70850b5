"""Tracker that needs nothing installed: a folder per run name, a file of JSON lines per run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_state.errors import NotReady, SettingError
from accel_state.hang_report.progress import PROGRESS
from accel_tracking.base import GeneralTracker, on_main_process
from accel_tracking.run_file import FORMAT, RunFile, encode
from accel_tracking.values import plain

__all__ = ("JSONLinesTracker",)


class JSONLinesTracker(GeneralTracker):
    """Keeps a run in `<logging_dir>/<run_name>/<date>-<time>.jsonl`, readable with `accel_tracking.read_run`.

    Args:
        run_name: name of the run, and of its folder (characters that paths cannot hold become `_`).
        logging_dir: where that folder lies.
        flush_every: lines collected before they are handed to the operating system; 1 loses nothing in a crash, more
            is for slow network file systems.

    Example:
        tracker = JSONLinesTracker("digits", "logs")
        tracker.start()
        tracker.store_init_configuration({"lr": 0.1})
        tracker.log({"loss": loss}, step=10)
        tracker.finish()
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], flush_every: int = 1) -> None:
        super().__init__()
        if flush_every < 1:
            raise SettingError(
                f"flush_every={flush_every} was given to the tracker 'jsonl'.",
                "It is the number of lines that are written together.",
                "Give 1 or more.",
            )
        self.run_name = run_name
        self.logging_dir = Path(logging_dir)
        self.flush_every = flush_every
        PROGRESS.writes_to(logging_dir)
        self._file: RunFile | None = None
        self._head: dict[str, Any] | None = None

    @property
    def tracker(self) -> RunFile:
        """The open file.

        Raises:
            NotReady: the run was not started, or is finished.
        """
        if self._file is None:
            raise NotReady(
                "Log to the tracker 'jsonl'.", "It was not started, or it is finished.", "Call start() first."
            )
        return self._file

    @on_main_process
    def start(self) -> None:
        """Create the file."""
        started = time.time()
        folder = self.logging_dir / (re.sub(r"[^\w.\- ]", "_", self.run_name).strip(". ") or "run")
        folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started))
        number = 0
        while self._file is None:
            try:
                self._file = RunFile(folder / f"{stamp}{f'-{number}' if number else ''}.jsonl", self.flush_every)
            except FileExistsError:
                number += 1
        self._head = {"run": self.run_name, "format": FORMAT, "time": round(started, 3)}

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the hyperparameters in the first line; given again later, in a line of their own."""
        head = self._head or {"run": self.run_name, "format": FORMAT, "time": round(time.time(), 3)}
        self.tracker.add(encode({**head, "config": plain(values)}), at_once=True)
        self._head = None

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add a line with the metrics."""
        self._add(step, f'"values": {encode(values)}')

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Add a line with a table."""
        if dataframe is not None:
            columns, data = list(dataframe.columns), dataframe.values.tolist()
        self._add(step, f'"table": {encode({"name": table_name, "columns": columns, "rows": data})}')

    @on_main_process
    def finish(self) -> None:
        """Mark the end and close the file; a second call does nothing."""
        if self._file is None:
            return
        try:
            self._add_line(f'{{"end": true, "time": {time.time():.3f}}}')
        finally:
            file, self._file = self._file, None
            file.close()

    def _add(self, step: int | None, content: str) -> None:
        position = "null" if step is None else step if type(step) is int else encode(step)
        self._add_line(f'{{"step": {position}, "time": {time.time():.3f}, {content}}}')

    def _add_line(self, line: str) -> None:
        file = self.tracker
        if self._head is not None:
            file.add(encode(self._head), at_once=True)
            self._head = None
        file.add(line)
