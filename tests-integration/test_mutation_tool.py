"""The changes that mutation testing makes to the code, and what it writes of them."""

from __future__ import annotations

from pathlib import Path

import mutants
import mutants_operators as operators
import mutants_report as report
import mutants_running as running

SOURCE = '''"""Text with 1 number."""
LIMIT: int = 3
__all__ = ("f",)


def f(a: int = 0, *, b: "1 | 2" = True) -> int:
    """Adds 1."""
    if a < 2 and b:
        raise ValueError(f"{a + 1} is below {2}")
    total = max(a[1:], key=abs)
    return total + 1
'''


def made(source: str) -> set[str]:
    """The lines that changes make of others."""
    found = set()
    for change in operators.changes(source.encode()):
        after = change.apply(source.encode()).decode()
        found |= set(after.splitlines()) - set(source.splitlines())
    return found


def test_each_kind_of_change_is_made_where_the_code_has_it() -> None:
    assert made(SOURCE) == {
        "LIMIT: int = 4",
        "LIMIT: int = 2",
        'def f(a: int = 1, *, b: "1 | 2" = True) -> int:',
        'def f(a: int = -1, *, b: "1 | 2" = True) -> int:',
        'def f(a: int = 0, *, b: "1 | 2" = False) -> int:',
        "    if a <= 2 and b:",
        "    if a < 3 and b:",
        "    if a < 1 and b:",
        "    if a < 2 or b:",
        "    if (not (a < 2 and b)):",
        "        pass",
        "    total = min(a[1:], key=abs)",
        "    total = max(a[2:], key=abs)",
        "    total = max(a[0:], key=abs)",
        "    total = max(a[(1) + 1:], key=abs)",
        "    total = max(a[1:])",
        "    pass",
        "    return total - 1",
        "    return total + 2",
        "    return total + 0",
        "    return None",
    }


def test_a_change_replaces_exact_bytes_behind_letters_of_several() -> None:
    source = 'x = ["é×", 1 if y is  not None else (a\n    // b)]\n'
    assert made(source) == {
        'x = ["é×", 2 if y is  not None else (a',
        'x = ["é×", 0 if y is  not None else (a',
        'x = ["é×", 1 if y is None else (a',
        'x = ["é×", 1 if (not (y is  not None)) else (a',
        "    * b)]",
    }


def test_a_changed_file_is_as_before_after_the_block(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_bytes(b"x = 1\n")
    with running.changed(module, b"x = 2\n"):
        assert module.read_bytes() == b"x = 2\n"
    assert module.read_bytes() == b"x = 1\n"


def result(verdict: str, text: str = "if a | b:", area: str = "plans") -> report.Result:
    file = "packages/accel-data/src/accel_data/plan.py"
    return report.Result("plans-1", area, file, 7, text, "arithmetic", "|", "&", verdict, "", 3, 3, 1.0)


def test_survivors_are_listed_until_they_are_judged() -> None:
    results = [result("survived"), *[result("killed")] * 8, result("hung")]
    text = report.document(results, 50, {})
    assert "| plans | 1 | 10 | 8 | 1 | 1 | 90.0 % |" in text
    assert report.problems(text) == [f"`accel_data/plan.py` `|` becomes `&`: {report.UNJUDGED}"]

    judged = {("`accel_data/plan.py`", "`if a | b:`", "`|` becomes `&`"): "the same for bools"}
    text = report.document(results, 50, judged)
    assert "`accel_data/plan.py`: `if a | b:`\n  `|` becomes `&`\n  (the same for bools)\n" in text
    assert report.problems(text.replace("- `accel_data", "`accel_data")) == ["1 survived, 0 are listed"]
    assert report.problems(text) == []


def test_too_many_survivors_are_a_problem() -> None:
    judged = {("`accel_data/plan.py`", "`if a | b:`", "`|` becomes `&`"): "the same for bools"}
    text = report.document([result("survived"), *[result("killed")] * 5], 50, judged)
    assert report.problems(text) == ["only 83.3 % are noticed"]
    assert report.problems("") == ["there are no figures of mutants"]


def test_the_document_judges_every_survivor() -> None:
    assert report.problems(report.DOCUMENT.read_text(encoding="utf-8")) == []


def test_every_area_has_its_modules_and_tests() -> None:
    root = mutants.ROOT
    assert [file for files in mutants.AREAS.values() for file in files if not (root / file).is_file()] == []
    assert [name for names in mutants.TESTS.values() for name in names if not list(root.glob(name))] == []
