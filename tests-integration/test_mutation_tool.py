"""What mutation testing draws, which tests it tries on a change, and what it writes of them."""

from __future__ import annotations

import mutants
from mutants import Result

SURVIVOR = Result("plans", "accel_data/plan.py", "if a | b:", "if a & b:", False)
KILLED = SURVIVOR._replace(noticed=True)
JUDGED = {("`accel_data/plan.py`", "`if a | b:`", "becomes `if a & b:`"): "the same for bools"}


def test_survivors_are_listed_until_they_are_judged() -> None:
    results = [SURVIVOR, *[KILLED] * 9]
    text = mutants.document(results, 50, {})
    assert "| plans | 1 | 10 | 1 | 90.0 % |" in text
    assert mutants.problems(text) == [f"`accel_data/plan.py` becomes `if a & b:`: {mutants.UNJUDGED}"]

    text = mutants.document(results, 50, JUDGED)
    assert "`accel_data/plan.py`: `if a | b:`\n  becomes `if a & b:`\n  (the same for bools)\n" in text
    assert dict(mutants.judgements(text)) == JUDGED
    assert mutants.problems(text.replace("- `accel_data", "`accel_data")) == ["1 survived, 0 are listed"]
    assert mutants.problems(text) == []


def test_too_many_survivors_are_a_problem() -> None:
    text = mutants.document([SURVIVOR, *[KILLED] * 5], 50, JUDGED)
    assert mutants.problems(text) == ["only 83.3 % are noticed"]
    assert mutants.problems("") == ["there are no figures of mutants"]


def test_the_report_judges_every_survivor() -> None:
    assert mutants.problems(mutants.REPORT.read_text(encoding="utf-8")) == []


def test_every_area_has_its_modules_and_tests() -> None:
    root = mutants.ROOT
    assert [file for area in mutants.AREAS.values() for file in area["modules"] if not (root / file).is_file()] == []
    assert [name for area in mutants.AREAS.values() for name in area["tests"] if not list(root.glob(name))] == []
