"""What differs between two runs: their records, hyperparameters and metrics, the most telling difference first.

    difference = differences_of("runs/a", "runs/b")
    difference.rows[0].key, difference.rows[0].values     # "settings.mixed_precision", ("no", "bf16")

Times, process ids and the folders in which the runs wrote and were started do not count.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from accel_state.errors import NotFound, SettingError
from accel_tracking.record import folder_pattern, leaves_by_key, own_folders, read_run_record
from accel_tracking.trackers.jsonl import read_run

__all__ = ("DifferingValue", "RunDifference", "differences_of")

_PARTS_IN_ORDER: Final = (
    *("code", "command", "settings", "hyperparameters", "seeds", "packages", "data", "world", "devices"),
    *("environment", "attempts", "metrics"),
)
"""Parts, from the most telling to the least; metrics are what the others explain."""

_IGNORED_KEYS: Final = re.compile(
    r"code\.(repository|script|difference|difference_bytes|untracked_files|unknown)|command\.(folder|python)"
    r"|packages\.python_executable"
)
_TIME_METRIC: Final = re.compile(
    r"(?:^|[^a-z])(?:time|times|seconds|secs?|duration|elapsed|runtime|eta|ms)(?:$|[^a-z])|per_?(?:second|sec)(?:$|[^a-z])",
    re.IGNORECASE,
)


class DifferingValue(NamedTuple):
    """One difference.

    Args:
        key: its key in the record, such as "packages.numpy"; "metrics.loss" for a metric.
        values: the value of each run; None if a run has none.
        step: for a metric, the first step at which it differs.
    """

    key: str
    values: tuple[Any, Any]
    step: float | None = None


class RunDifference(NamedTuple):
    """The differences of two runs.

    Args:
        runs: their folders.
        rows: the differences, the most telling first.
        not_compared: metrics that count time.
        steps: number of steps whose metrics were compared.
    """

    runs: tuple[str, str]
    rows: tuple[DifferingValue, ...]
    not_compared: tuple[str, ...] = ()
    steps: int = 0

    @property
    def first_step(self) -> float | None:
        """The first step at which a metric differs; None if none does."""
        return min((row.step for row in self.rows if row.step is not None), default=None)

    def to_json(self) -> dict[str, Any]:
        """The differences as plain data."""
        rows = [
            {"key": row.key, "values": list(row.values), **({} if row.step is None else {"step": row.step})}
            for row in self.rows
        ]
        return {
            "runs": list(self.runs),
            "equal": not rows,
            "first_step": self.first_step,
            "differences": rows,
            "not_compared": list(self.not_compared),
        }


def differences_of(one: str, other: str, only_common_steps: bool = False) -> RunDifference:
    """Compare two runs.

    Args:
        one: folder of the first run.
        other: folder of the second run.
        only_common_steps: compare metrics at the steps that both runs logged.

    Raises:
        NotFound: a folder has no record.
        SettingError: a record cannot be read.
    """
    records = read_run_record(one), read_run_record(other)
    facts = [dict(_facts(record)) for record in records]
    keys = list(dict.fromkeys((*facts[0], *facts[1])))
    rows = [
        DifferingValue(key, (facts[0].get(key), facts[1].get(key)))
        for key in keys
        if facts[0].get(key) != facts[1].get(key)
    ]
    rows = [row for row in rows if not _follows(row, rows)]
    metrics, timed, steps = _metrics([record["folder"] for record in records], only_common_steps)
    rank = {part: position for position, part in enumerate(_PARTS_IN_ORDER)}
    rows = sorted((*rows, *metrics), key=lambda row: (rank[row.key.partition(".")[0]], row.key.endswith(".source")))
    return RunDifference((records[0]["folder"], records[1]["folder"]), tuple(rows), timed, steps)


def _follows(row: DifferingValue, rows: list[DifferingValue]) -> bool:
    """Whether a row says nothing beside another one: the source of a setting whose value differs."""
    setting = row.key.removesuffix(".source")
    return setting != row.key and any(one.key == setting for one in rows)


def _facts(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is compared of one run, by key."""
    own, started = own_folders(record), folder_pattern(str(record["command"].get("folder") or ""))
    settings = {name: entry.get("value") for name, entry in record["settings"].items()}
    sources = {f"{name}.source": entry.get("source") for name, entry in record["settings"].items()}
    parts = {name: record[name] for name in _PARTS_IN_ORDER if name in record and name not in ("settings", "attempts")}
    hyperparameters: Mapping[str, Any] = {}
    with suppress(SettingError, NotFound):
        hyperparameters = read_run(record["folder"]).config
    for part, content in {**parts, "hyperparameters": hyperparameters}.items():
        for key, value in leaves_by_key(content, part).items():
            # A list of words is compared as one value.
            if not _IGNORED_KEYS.fullmatch(key) and not key.startswith("command.words."):
                yield key, _without_folders(value, own, started)
    yield "command.words", [_without_folders(word, own, started) for word in record["command"].get("words", [])][1:]
    for name, value in {**settings, **sources}.items():
        yield f"settings.{name}", _without_folders(value, own, started)
    yield "attempts", len(record["attempts"])


def _without_folders(value: Any, own: Sequence[re.Pattern[str]], started: re.Pattern[str] | None) -> Any:
    if isinstance(value, list):
        return [_without_folders(one, own, started) for one in value]
    if isinstance(value, str):
        for pattern in own:
            value = pattern.sub("<run>", value)
        return value if started is None else started.sub("<folder>", value)
    return value


def _metrics(folders: Sequence[str], common: bool) -> tuple[list[DifferingValue], tuple[str, ...], int]:
    """The first difference of each metric, the metrics that are not compared, and the number of compared steps."""
    curves: list[dict[str, dict[float, float]]] = []
    for folder in folders:
        points: dict[str, list[tuple[float, float]]] = {}
        with suppress(SettingError):
            points = read_run(folder).curves()
        curves.append({name: dict(values) for name, values in points.items()})
    names = sorted({*curves[0], *curves[1]})
    timed = tuple(name for name in names if _TIME_METRIC.search(name))
    rows, compared = [], set()
    for name in names:
        first, second = curves[0].get(name, {}), curves[1].get(name, {})
        if name not in timed:
            steps = sorted(first.keys() & second.keys() if common else first.keys() | second.keys())
            compared.update(steps)
            step = next((at for at in steps if not _equal(first.get(at), second.get(at))), None)
            if step is not None:
                values = _readable(first.get(step)), _readable(second.get(step))
                rows.append(DifferingValue(f"metrics.{name}", values, step))
    return sorted(rows, key=lambda row: row.step or 0), timed, len(compared)


def _equal(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


def _readable(value: float | None) -> Any:
    """A number as JSON has it: texts for those that are not finite."""
    return value if value is None or math.isfinite(value) else json.loads(f'"{value}"')
