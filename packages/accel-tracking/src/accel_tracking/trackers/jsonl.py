"""Runs as files of JSON lines: the tracker "jsonl" writes them, and `read_run` reads them back.

A run is one file. The first line holds its name, start time and configuration; each further line holds one call of
`log` or `log_table`, and the last line marks the end:

    {"run": "digits", "format": 1, "time": 1767225600.0, "config": {"lr": 0.1}}
    {"step": 10, "time": 1767225601.5, "values": {"loss": 0.7, "eval": {"accuracy": 0.9}}}
    {"step": 10, "time": 1767225601.6, "table": {"name": "worst", "columns": ["image"], "rows": [[3]]}}
    {"end": true, "time": 1767225660.0}

A run that `accel launch` started has the name of its launch in the first line too ("launch"). If the launcher restarted
it, each attempt is a file, and the files of one launch are read as one run.

A crash damages at most the line that the process is writing. JSON has no NaN and no infinity: the texts "NaN",
"Infinity" and "-Infinity" represent them.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from accel_state.errors import NotReady, SettingError
from accel_state.untrusted import open_regular
from accel_state.watch.record import STATUS_FOLDER, STATUS_RECORD
from accel_tracking.base import GeneralTracker, on_main_process
from accel_tracking.values import as_number, flatten_keys, is_number, plain

__all__ = ("FORMAT", "JSONLinesTracker", "LogEntry", "RunFile", "RunRecord", "encode", "read_run", "read_runs")

FORMAT = 1
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_strict = json.JSONEncoder(allow_nan=False, default=plain).encode


def encode(value: Any) -> str:
    """JSON text of any logged value."""
    try:
        return _strict(value)
    except (ValueError, TypeError):
        return json.dumps(_without_special(plain(value)))


def _without_special(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_special(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_special(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


class RunFile:
    """A new file of lines; a write that fails does not change the file.

    Args:
        path: path of the file, which must not exist yet.
        flush_every: number of lines to collect before each write. With 1, a killed process loses no line.
    """

    def __init__(self, path: Path, flush_every: int = 1) -> None:
        self.path = path
        self._flush_every = flush_every
        self._pending: list[str] = []
        self._size = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)

    def add(self, line: str, flush: bool = False) -> None:
        """Add a line without its newline; `flush` writes all collected lines now.

        Raises:
            OSError: the write failed. The collected lines are lost, and the file is unchanged.
        """
        self._pending.append(line)
        if flush or len(self._pending) >= self._flush_every:
            self.flush()

    def flush(self) -> None:
        """Write the collected lines."""
        lines, self._pending = self._pending, []
        if not lines:
            return
        content = ("\n".join(lines) + "\n").encode()
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            raise
        self._size += len(content)

    def close(self) -> None:
        """Write the collected lines and close the file; a second call does nothing."""
        if self._descriptor >= 0:
            try:
                self.flush()
            finally:
                os.close(self._descriptor)
                self._descriptor = -1


class JSONLinesTracker(GeneralTracker):
    """Stores a run in `<logging_dir>/<run_name>/<date>-<time>.jsonl`; `accel_tracking.read_run` reads it.

    Args:
        run_name: name of the run, and of its folder (`_` replaces characters that a path cannot contain).
        logging_dir: parent of that folder.
        flush_every: number of lines to collect before each write. With 1, a crash loses no line; larger values suit
            slow network file systems.

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
                f"Cannot construct the tracker 'jsonl' with flush_every={flush_every}.",
                "It is the number of lines per write, which must be at least 1.",
                "Set flush_every to 1 or more.",
            )
        self.run_name = run_name
        self.logging_dir = Path(logging_dir)
        self.flush_every = flush_every
        STATUS_RECORD.writes_to(logging_dir)
        self._file: RunFile | None = None
        self._head: dict[str, Any] | None = None

    @property
    def tracker(self) -> RunFile:
        """The open file.

        Raises:
            NotReady: before `start`, and after `finish`.
        """
        if self._file is None:
            raise NotReady(
                "Cannot log with the tracker 'jsonl'.", "It has not started, or it has finished.", "Call start() first."
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
        if STATUS_FOLDER in os.environ:
            # The launcher's own folder, which all attempts share and no other launch has.
            self._head["launch"] = Path(os.environ[STATUS_FOLDER]).parent.name

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the hyperparameters in the first line, and the hyperparameters of a later call in another line."""
        head = self._head or {"run": self.run_name, "format": FORMAT, "time": round(time.time(), 3)}
        self.tracker.add(encode({**head, "config": plain(values)}), flush=True)
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
            file.add(encode(self._head), flush=True)
            self._head = None
        file.add(line)


@dataclass(frozen=True)
class LogEntry:
    """One call of `log` or `log_table`: metrics as `values`, or a `table` with name, columns and rows."""

    step: float | None
    time: float
    values: Mapping[str, Any] = field(default_factory=dict)
    table: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RunRecord:
    """A run that `read_run` read.

    Args:
        name: name of the run.
        path: its file.
        started: start time in seconds since 1970.
        config: the hyperparameters.
        records: the calls of `log` and `log_table`, in order.
        finished: whether the tracker called `finish`.
        damaged: number of lines that are not valid, such as a last line that a crash cut off.
        launch: name of the launch that started it; empty if `accel launch` did not.
    """

    name: str
    path: Path
    started: float
    config: Mapping[str, Any]
    records: tuple[LogEntry, ...]
    finished: bool
    damaged: int
    launch: str = ""

    def after(self, earlier: RunRecord) -> RunRecord:
        """This attempt of a restarted run behind an earlier one, whose steps from here on were made again."""
        first = next((record.step for record in self.records if record.step is not None), math.inf)
        kept = tuple(record for record in earlier.records if record.step is None or record.step < first)
        return replace(
            self,
            started=earlier.started,
            config={**earlier.config, **self.config},
            records=kept + self.records,
            damaged=earlier.damaged + self.damaged,
        )

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """The points (step, value) of each numeric metric; an entry without a step follows the previous one."""
        curves: dict[str, list[tuple[float, float]]] = {}
        position = -1.0
        for record in self.records:
            position = position + 1 if record.step is None else record.step
            for name, value in flatten_keys(record.values).items():
                number = as_number(_NOT_FINITE.get(value, value) if isinstance(value, str) else value)
                if number is not None:
                    curves.setdefault(name, []).append((position, number))
        return curves


def read_run(path: str | os.PathLike[str]) -> RunRecord:
    """Read a run from its file, or the newest run in or below a folder with all its attempts.

    Raises:
        SettingError: there is no run at the path, or it has another format.
    """
    place = Path(path)
    if not place.is_dir():
        return _read_file(place)
    for file in sorted(place.rglob("*.jsonl"), key=_written, reverse=True):
        with suppress(SettingError):
            run = _read_file(file)
            return next(one for one in read_runs(file.parent) if one.path == file) if run.launch else run
    raise SettingError(
        f"Cannot find a run in {str(path)!r}.",
        f"The folder contains no .jsonl file of a run in format {FORMAT}.",
        "Name the logging folder of a run; a newer accel-tracking may read other formats.",
    )


def read_runs(folder: Path) -> list[RunRecord]:
    """The runs in and below a folder, the one that was written last at the end; other files are left out."""
    runs: dict[tuple[str, ...], RunRecord] = {}
    for file in sorted(folder.rglob("*.jsonl"), key=_written):
        # Another program's file, or one of ours that is not the tracker's.
        with suppress(SettingError):
            run = _read_file(file)
            key = (run.launch, run.name, str(file.parent)) if run.launch else (str(file),)
            earlier = runs.pop(key, None)
            runs[key] = run if earlier is None else run.after(earlier)
    return list(runs.values())


def _written(file: Path) -> tuple[int, str]:
    try:
        return file.stat().st_mtime_ns, file.name
    except OSError:
        # It was removed meanwhile.
        return 0, file.name


def _read_file(file: Path) -> RunRecord:
    try:
        with open_regular(file) as opened:
            lines = opened.readall().decode(errors="replace").splitlines()
    except OSError as error:
        raise SettingError(
            f"Cannot read the run {str(file)!r}.",
            f"The system cannot read it: {error}.",
            "Name a .jsonl file, or a folder that contains some.",
        ) from error
    parsed = [_parse(line) for line in lines if line.strip()]
    heads = [line for line in parsed if line is not None and "run" in line]
    if not heads or heads[0].get("format") != FORMAT:
        raise SettingError(
            f"Cannot read the run {str(file)!r}.",
            f"Its first line does not declare a run in format {FORMAT}.",
            "Name a file that the tracker 'jsonl' wrote; a newer accel-tracking may read other formats.",
        )
    records = tuple(_entry(line) for line in parsed if line is not None and ("values" in line or "table" in line))
    config: dict[str, Any] = {}
    for head in heads:
        config.update(head.get("config") or {})
    return RunRecord(
        name=str(heads[0]["run"]),
        path=file,
        started=float(heads[0].get("time", 0)),
        config=config,
        records=records,
        finished=any(line is not None and "end" in line for line in parsed),
        damaged=sum(line is None for line in parsed),
        launch=str(heads[0].get("launch", "")),
    )


def _parse(line: str) -> dict[str, Any] | None:
    """The line as a JSON object with a time, or None when it is damaged."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not _is_finite(value.get("time")):
        return None
    mappings = [value[name] for name in ("values", "table", "config") if value.get(name) is not None]
    return value if all(isinstance(inner, dict) for inner in mappings) else None


def _is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a number in the range of a float; the integers of a file may exceed it."""
    return is_number(value) and abs(value) <= sys.float_info.max


def _entry(line: Mapping[str, Any]) -> LogEntry:
    step = line.get("step")
    return LogEntry(
        step if _is_finite(step) else None, float(line["time"]), line.get("values") or {}, line.get("table")
    )
