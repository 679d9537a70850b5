"""The table of all cases; each module here has those of one subject."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

from bench.case import Case
from bench.cases import (
    big_models,
    gpu,
    judged_steps,
    loaders,
    matrices_and_averages,
    nested_data,
    ragged_data,
    saving,
    starting,
    training,
    whole_runs,
)

_SUBJECTS: Final = (
    *(big_models, saving, nested_data, starting, loaders, training, ragged_data, matrices_and_averages, judged_steps),
    *(whole_runs, gpu),
)


def cases() -> tuple[Case, ...]:
    """All rows, by group."""
    return tuple(sorted((case for subject in _SUBJECTS for case in subject.CASES), key=lambda case: case.group))


def groups() -> list[str]:
    """The names of all groups."""
    return list(dict.fromkeys(case.group for case in cases()))


def selected(patterns: Sequence[str]) -> list[Case]:
    """The rows that one of some patterns selects: a group, or a name with `*` and `?`; all rows without a pattern.

    Raises:
        LookupError: a pattern selects nothing.
    """
    table = cases()
    for pattern in patterns:
        if not any(_selects(pattern, case) for case in table):
            raise LookupError(
                f"No case is selected by {pattern!r}.\n"
                f"The groups are {', '.join(groups())}; names are in docs/reports/benchmarks.md.\n"
                "Give a group, or a pattern of a name in quotation marks, such as '*200 leaves'."
            )
    return [case for case in table if not patterns or any(_selects(pattern, case) for pattern in patterns)]


def _selects(pattern: str, case: Case) -> bool:
    return pattern == case.group or fnmatchcase(case.name, pattern)
