"""`accel runs diff A B`: what differs between two runs, as a table or as JSON."""

from __future__ import annotations

import json
from typing import Any, Final

from accel_cli.terminal import columns
from accel_state.untrusted import printable
from accel_tracking.difference import RunDifference, differences_of

__all__ = ("difference_lines", "show_difference")

_LONGEST: Final = 60


def show_difference(one: str, other: str, as_json: bool) -> int:
    """Print what differs, and return 1 if anything does, else 0.

    Raises:
        NotFound: a run has no record.
        SettingError: a record cannot be read.
    """
    difference = differences_of(one, other)
    if as_json:
        print(json.dumps(difference.to_json()))
    else:
        print("\n".join(difference_lines(difference)))
    return int(bool(difference.rows))


def difference_lines(difference: RunDifference) -> list[str]:
    """The differences as lines of a table, and the first step at which metrics differ."""
    rows = [(printable(row.key), *map(_shown, row.values)) for row in difference.rows]
    lines = columns(("key", *map(printable, difference.runs)), rows) if rows else ["Nothing differs."]
    if difference.first_step is not None:
        lines += ["", f"The metrics differ from step {difference.first_step:g} on."]
    if difference.not_compared:
        lines.append(f"Not compared, because they count time: {printable(', '.join(difference.not_compared))}.")
    return lines


def _shown(value: Any) -> str:
    text = "-" if value is None else printable(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
