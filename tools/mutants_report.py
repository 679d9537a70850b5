"""The part of docs/reliability.md that lists which mutants survive: figures by area, and a judged list."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

__all__ = ("DOCUMENT", "PART_OF_MUTANTS", "Result", "document", "problems", "write")

DOCUMENT: Final = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"
PART_OF_MUTANTS: Final = "\n<!-- From here on written by tools/mutants.py. -->\n"
"""Where the part begins."""
LEAST: Final = 85
"""Percent of the mutants that tests have to notice."""
UNJUDGED: Final = "not judged yet"

HEAD: Final = """
## Which changes of the code tests notice

Written by `python tools/mutants.py write`. A *mutant* is the code with one small change: another comparison, `and`
for `or`, a negated condition, a number one higher or lower, another arithmetic operator, `min` for `max`, `any` for
`all`, a changed bool or slice bound, or a removed argument, statement or return value.
{drawn} of {possible}.
Texts of messages, docstrings, annotations and log calls are not changed.

Tests that execute the changed line and pass on the unchanged code run against each mutant until one fails. A mutant is
*killed* when a test fails, and *hung* when a test takes more than ten times its usual time and at least 20 seconds;
both count as noticed. Tests marked `slow`, tests that need a GPU or another library, and code that tests run in new
interpreters are left out. Only the cheapest tests ran against each survivor, for some seconds up to a minute; "not
tested" means that these do not notice it.

"""

_COLUMNS: Final = ("Area", "Modules", "Mutants", "Killed", "Hung", "Survived", "Noticed")
_FIGURES: Final = re.compile(r"^\| \*\*all\*\* \|(?: [^|]+ \|){4} (\d+) \| \*\*([\d.]+) %\*\* \|$", re.MULTILINE)
_SURVIVOR: Final = re.compile(r"^- (`[^`]+\.py`): (`.+?`)\n  (.+?)\n  \((.+?)\)$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """The outcome of one mutant.

    Args:
        id: its name.
        area: the area of its module.
        file: the module.
        line: where the change begins.
        text: that line before.
        operator: the kind of the change.
        old: what was replaced.
        new: what took its place.
        verdict: killed, hung, survived or not executed.
        test: the test that noticed.
        tried: number of tests that were run at most.
        executing: number of tests that execute the line.
        seconds: how long it took.
    """

    id: str
    area: str
    file: str
    line: int
    text: str
    operator: str
    old: str
    new: str
    verdict: str
    test: str
    tried: int
    executing: int
    seconds: float

    @property
    def noticed(self) -> bool:
        """Whether a test noticed the change."""
        return self.verdict in ("killed", "hung")

    @property
    def place(self) -> str:
        """The module, as it is imported."""
        return f"`{self.file.partition('/src/')[2]}`"

    @property
    def change(self) -> str:
        """The change in a few words."""
        new = _code(self.new) if self.new else "nothing"
        if self.operator in ("removed statement", "removed argument"):
            return f"without {_code(self.old)}"
        return f"{_code(self.old)} becomes {new}"


def _code(text: str) -> str:
    return f"`{' '.join(text.split())}`"


def document(results: Sequence[Result], possible: int, judged: Mapping[tuple[str, str, str], str]) -> str:
    """The text of the part.

    Args:
        results: the results of all mutants.
        possible: number of mutants that they were drawn from.
        judged: what survivors mean, by module, line and change.
    """
    areas = list(dict.fromkeys(result.area for result in results))
    drawn = f"{len(results)} mutants are drawn at random, equally many from each area, out"
    rows = [_figures(area, [result for result in results if result.area == area]) for area in areas]
    rows.append(_figures("**all**", results).replace(" % |", " %** |"))
    rows[-1] = re.sub(r"([\d.]+ %\*\* \|)$", r"**\1", rows[-1])
    survivors = [result for result in results if not result.noticed]
    survivors.sort(key=lambda result: (result.file, result.line))
    return "\n".join(
        [
            PART_OF_MUTANTS + HEAD.format(drawn=drawn, possible=f"{possible} possible ones") + _row(_COLUMNS),
            _row(["---", "---", *["---:"] * 5]),
            *rows,
            f"\nMeasured on {time.strftime('%Y-%m-%d')} with Python {platform.python_version()}, torch "
            f"{torch.__version__}, {platform.system()} {platform.machine()}. These are all that survived, each "
            "with the line as it was then, the change, and what it means:\n",
            *(_survivor(result, judged) for result in survivors),
            "",
        ]
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figures(area: str, results: Sequence[Result]) -> str:
    verdicts = [result.verdict for result in results]
    counts = [len(verdicts), verdicts.count("killed"), verdicts.count("hung")]
    noticed = 100 * (counts[1] + counts[2]) / counts[0]
    modules = len({result.file for result in results})
    return _row([area, *map(str, [modules, *counts, counts[0] - counts[1] - counts[2]]), f"{noticed:.1f} %"])


def _survivor(result: Result, judged: Mapping[tuple[str, str, str], str]) -> str:
    key = (result.place, _code(result.text), result.change)
    place, line, change = key
    return f"- {place}: {line}\n  {change}\n  ({judged.get(key, UNJUDGED)})"


def _survivors(text: str) -> Iterator[tuple[tuple[str, str, str], str]]:
    for place, line, change, judgement in _SURVIVOR.findall(text):
        yield (place, line, change), judgement


def problems(text: str) -> list[str]:
    """What is wrong with the document: no figures, too many survivors, or some not listed or without a judgement."""
    figures = _FIGURES.search(text)
    if figures is None:
        return ["there are no figures of mutants"]
    survivors = list(_survivors(text))
    wrong = [f"{place} {change}: {UNJUDGED}" for (place, _, change), told in survivors if told == UNJUDGED]
    if len(survivors) != int(figures[1]):
        wrong.append(f"{figures[1]} survived, {len(survivors)} are listed")
    return [*wrong, *([f"only {figures[2]} % are noticed"] if float(figures[2]) < LEAST else [])]


def write(results: Sequence[Result], possible: int) -> None:
    """Writes the part into the document, and keeps the judgements that are there."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before = text.partition(PART_OF_MUTANTS)[0]
    DOCUMENT.write_text(before + document(results, possible, dict(_survivors(text))), encoding="utf-8")
