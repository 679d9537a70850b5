"""The file in which a run is kept as JSON lines: written so that a crash costs at most the line being written.

The first line holds the name, the start and the configuration; each further line what was logged at once:

    {"run": "digits", "format": 1, "time": 1767225600.0, "config": {"lr": 0.1}}
    {"step": 10, "time": 1767225601.5, "values": {"loss": 0.7, "eval": {"accuracy": 0.9}}}
    {"step": 10, "time": 1767225601.6, "table": {"name": "worst", "columns": ["image"], "rows": [[3]]}}
    {"end": true, "time": 1767225660.0}

Numbers that JSON does not have stand as the texts "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from accel_state.errors import SettingError
from accel_state.untrusted import open_regular
from accel_tracking.values import flat, is_number, plain

__all__ = ("FORMAT", "Record", "RunFile", "RunRecord", "encode", "read_run")

FORMAT = 1
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_strict = json.JSONEncoder(allow_nan=False, default=plain).encode


def encode(value: Any) -> str:
    """JSON text of whatever was logged."""
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
    """A new file that lines are added to; each addition is whole or, when the disk refuses it, leaves no trace.

    Args:
        path: must not exist.
        flush_every: how many lines are collected before they are handed to the operating system. With 1 a process that
            is killed loses nothing.
    """

    def __init__(self, path: Path, flush_every: int = 1) -> None:
        self.path = path
        self._flush_every = flush_every
        self._waiting: list[str] = []
        self._size = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)

    def add(self, line: str, at_once: bool = False) -> None:
        """Add a line, given without its end; `at_once` hands it over now.

        Raises:
            OSError: the disk refused it; the lines that were waiting are lost, the file is as before.
        """
        self._waiting.append(line)
        if at_once or len(self._waiting) >= self._flush_every:
            self.flush()

    def flush(self) -> None:
        """Hand the waiting lines to the operating system."""
        lines, self._waiting = self._waiting, []
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
        """Hand over what waits and close the file; a second call does nothing."""
        if self._descriptor >= 0:
            try:
                self.flush()
            finally:
                os.close(self._descriptor)
                self._descriptor = -1


@dataclass(frozen=True)
class Record:
    """What was logged at once: `values` of metrics, or a `table` with name, columns and rows."""

    step: float | None
    time: float
    values: Mapping[str, Any] = field(default_factory=dict)
    table: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RunRecord:
    """A run read back.

    Args:
        name: of the run.
        path: the file it was read from.
        started: when, in seconds since 1970.
        config: the hyperparameters.
        records: what was logged, in order.
        finished: whether the run came to its end.
        damaged: number of lines that could not be read, such as a last one cut off by a crash.
    """

    name: str
    path: Path
    started: float
    config: Mapping[str, Any]
    records: tuple[Record, ...]
    finished: bool
    damaged: int

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Each metric that was a number as points (step, value); a record without a step counts from the one before."""
        curves: dict[str, list[tuple[float, float]]] = {}
        position = -1.0
        for record in self.records:
            position = position + 1 if record.step is None else record.step
            for name, value in flat(record.values).items():
                number = _SPECIAL.get(value, value) if isinstance(value, str) else value
                if is_number(number):
                    curves.setdefault(name, []).append((position, number))
        return curves


def read_run(path: str | os.PathLike[str]) -> RunRecord:
    """Read a run back; of a folder, the newest run in or below it.

    Raises:
        SettingError: there is no run there, or it was written in a later format.
    """
    file = _newest(Path(path))
    try:
        with open_regular(file) as opened:
            lines = opened.readall().decode(errors="replace").splitlines()
    except OSError as error:
        raise SettingError(
            f"Read the run {str(file)!r}.", f"It cannot be read: {error}.", "Name a .jsonl file, or a folder with some."
        ) from error
    parsed = [_parse(line) for line in lines if line.strip()]
    heads = [line for line in parsed if line is not None and "run" in line]
    if not heads or heads[0].get("format") != FORMAT:
        raise SettingError(
            f"Read the run {str(file)!r}.",
            f"Its first line does not say that it is a run in format {FORMAT}.",
            "Name a file that the tracker 'jsonl' wrote; a newer accel-tracking may know more formats.",
        )
    records = tuple(_record(line) for line in parsed if line is not None and ("values" in line or "table" in line))
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
    )


def _newest(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = sorted(path.rglob("*.jsonl"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    if not files:
        raise SettingError(
            f"Read the newest run in {str(path)!r}.", "It holds no .jsonl file.", "Name the folder a run logged into."
        )
    return files[-1]


def _parse(line: str) -> dict[str, Any] | None:
    """The line as an object of the expected shape, or None when it is damaged."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not _is_finite(value.get("time")):
        return None
    mappings = [value[name] for name in ("values", "table", "config") if value.get(name) is not None]
    return value if all(isinstance(inner, dict) for inner in mappings) else None


def _is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that a float can hold, which not every integer of a file is."""
    return is_number(value) and abs(value) <= sys.float_info.max


def _record(line: Mapping[str, Any]) -> Record:
    step = line.get("step")
    return Record(step if _is_finite(step) else None, float(line["time"]), line.get("values") or {}, line.get("table"))
