"""The table of benchmarks is well formed, its runner measures a real case, and the comparison knows noise."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.case import FIGURES, SCALES, Case, Scope, Work
from bench.cases import cases, groups, selected
from bench.comparison import compared, report
from bench.metering import METERS, Meter, measure, paused
from bench.results import Row, half_quartiles, line, merged, read_rows, write_rows
from bench.turns import Measured, sessions

ROOT = Path(__file__).resolve().parents[1]
ROW = Row("operations", "find", "CPU us", "ours/peer", 0.5, 4.0, 10.0, None, 0.4, 0.01, 5, "a machine")


def verdict(old: Row, new: Row) -> str:
    """What the comparison says of one row in two runs."""
    (found,) = compared([old], [new])
    return found.verdict


# ---------------------------------------------------------------- the table
@pytest.mark.parametrize("case", cases(), ids=lambda case: "-".join(case.key[:3]))
def test_a_case_is_well_formed(case: Case) -> None:
    assert case.meter in METERS
    assert [*case.unit.split(), ""][1] in SCALES
    assert case.figure in FIGURES
    assert all(side in case.work.sides for side in ("ours", "peer", "raw") if side in case.figure)
    assert case.limit is None or case.limit > 0
    assert case.method.endswith(".")
    assert "|" not in case.name


def test_no_two_cases_have_one_key() -> None:
    keys = [case.key for case in cases()]
    assert len(keys) == len(set(keys))


def test_the_table_is_read_without_torch_and_without_either_library() -> None:
    code = (
        "import sys; from bench.cases import cases; cases(); "
        "print([name for name in sys.modules if name == 'torch' or name.startswith('accel')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools", capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_every_case_is_measured_in_one_session() -> None:
    rows = cases()
    found = [case.key for works in sessions(rows) for measured in works for case in measured.rows]
    assert sorted(found) == sorted(case.key for case in rows)


def test_a_session_has_one_group_and_one_number_of_processes() -> None:
    for works in sessions(cases()):
        assert len({(measured.rows[0].group, measured.work.processes) for measured in works}) == 1
        assert len(works) == 1 or not any(measured.work.alone or measured.work.once for measured in works)


def test_a_group_and_a_pattern_of_a_name_select() -> None:
    assert {case.group for case in selected(["steps"])} == {"steps"}
    assert {case.name for case in selected(["gather 4*"])} == {"gather 4 x 1 MiB"}
    assert selected([]) == list(cases())
    assert len(selected(["steps", "gather 4*"])) == len(selected(["steps"])) + 1


def test_a_pattern_that_selects_nothing_is_refused_with_the_groups() -> None:
    with pytest.raises(LookupError, match=", ".join(groups())):
        selected(["steps", "nothing like it"])


# ---------------------------------------------------------------- measuring
@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that only moves when a test says so."""
    now = [0]
    monkeypatch.setitem(METERS, "ticks", Meter(lambda: now[0], lambda: now[0], min))
    return now


def ticking(now: list[int], before: int, measured: int) -> Callable[[], None]:
    """A call that moves the clock while it is paused, and while it is not."""

    def call() -> None:
        with paused():
            now[0] += before
        now[0] += measured

    return call


def test_what_is_done_while_meters_are_paused_does_not_count(ticks: list[int]) -> None:
    assert measure({"ours": ticking(ticks, 100, 3)}, ["ticks"], lambda number: number) == {"ours": {"ticks": 3}}


def test_the_sides_of_an_interpreter_are_measured_apart(ticks: list[int]) -> None:
    calls = {"ours": ticking(ticks, 0, 2), "raw": ticking(ticks, 0, 1)}
    found = measure(calls, ["ticks"], lambda number: number)
    assert found == {"ours": {"ticks": 2}, "raw": {"ticks": 1}}


def test_all_processes_make_as_many_calls_as_the_first_one() -> None:
    calls: list[None] = []
    measure({"ours": lambda: calls.append(None)}, ["wall"], lambda number: 1)
    first, warm, measured = 1, 1, 1
    assert len(calls) == first + warm + measured


def test_what_is_measured_once_is_called_once(ticks: list[int]) -> None:
    found = measure({"ours": ticking(ticks, 0, 2)}, ["ticks"], lambda number: number, once=True)
    assert (found, ticks) == ({"ours": {"ticks": 2}}, [2])


def test_the_added_part_of_the_original_is_taken_from_its_own_raw_rounds() -> None:
    def side(scope: Scope) -> Callable[[], None]:
        return lambda: None

    figure = "(ours - raw)/(peer - raw)"
    case = Case("steps", "a step", "CPU s", figure, 0.5, Work(side, side, side), "A method.")
    measured = Measured(case.work, [case])
    measured.turns.append({"ours": {"CPU": 11}, "raw": {"CPU": 10}, "peer": {"CPU": 24}, "peer's raw": {"CPU": 20}})
    row = measured.row(case, "a machine")
    assert (row.ours, row.peer, row.raw, row.value) == (11, 14, 10, 0.25)


def test_the_spread_is_half_the_distance_between_the_quartiles() -> None:
    assert half_quartiles([1, 2, 3, 4, 100]) == 1
    assert half_quartiles([7]) == 0


# ---------------------------------------------------------------- rows
def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.json", [ROW, replace(ROW, case="other", peer=None, limit=None)])
    first, second = read_rows(tmp_path / "rows.json")
    assert first == ROW
    assert (second.peer, second.limit) == (None, None)
    assert read_rows(tmp_path / "no.json") == []


def test_a_row_tells_whether_it_meets_its_limit() -> None:
    assert line(ROW).endswith("| accel / original = 0.4 ± 0.01 | 0.5 | yes |")
    assert line(replace(ROW, value=0.6)).endswith("| 0.5 | **no** |")
    assert line(replace(ROW, limit=None)).endswith("|  |  |")
    assert "| 1,234 | 10 |" in line(replace(ROW, ours=1234.5))


def test_rows_that_were_not_measured_are_kept_and_those_without_a_case_dropped() -> None:
    first, second, *_ = table = cases()
    rows = [replace(ROW, group=case.group, case=case.name, unit=case.unit, figure=case.figure) for case in table[:2]]
    found = merged(table, [replace(rows[1], value=1.0), rows[0], ROW], [replace(rows[1], value=2.0)])
    assert [(row.key, row.value) for row in found] == [(first.key, 0.4), (second.key, 2.0)]


# ---------------------------------------------------------------- comparing
def test_a_row_that_moved_beyond_its_spreads_is_slower_or_faster() -> None:
    assert verdict(ROW, replace(ROW, value=0.45)) == "slower"
    assert verdict(ROW, replace(ROW, value=0.35)) == "faster"


def test_a_row_that_moved_within_twice_both_spreads_is_the_same() -> None:
    wide = replace(ROW, spread=0.015)
    assert verdict(wide, replace(wide, value=0.45)) == "same"
    assert verdict(ROW, replace(wide, value=0.44)) == "same"


def test_a_row_without_spread_may_still_move_by_five_percent() -> None:
    steady = replace(ROW, spread=0.0)
    assert verdict(steady, replace(steady, value=0.419)) == "same"
    assert verdict(steady, replace(steady, value=0.421)) == "slower"


def test_verdict_of_too_few_turns() -> None:
    assert verdict(ROW, replace(ROW, value=4.0, turns=2)) == "too few turns"


def test_only_ratios_are_compared_between_machines() -> None:
    elsewhere = {"machine": "another machine", "value": 4.0}
    added = replace(ROW, figure="ours - raw")
    assert verdict(ROW, replace(ROW, **elsewhere)) == "slower"  # type: ignore[arg-type]
    assert verdict(added, replace(added, **elsewhere)) == "other machine"  # type: ignore[arg-type]


def test_rows_of_one_run_alone_are_new_or_missing() -> None:
    old, new = replace(ROW, case="gone"), replace(ROW, case="added")
    assert [(change.verdict, change.before, change.now) for change in compared([old], [new])] == [
        ("new", None, 0.4),
        ("missing", 0.4, None),
    ]


def test_a_report_names_what_changed_and_counts_the_rest() -> None:
    slow = replace(ROW, case="slow")
    told = report(compared([ROW, slow], [ROW, replace(slow, value=0.8)]))
    assert "slower: operations: slow (CPU us, ours/peer): 0.4 -> 0.8, noise 0.04" in told
    assert "1 rows are the same." in told


# ---------------------------------------------------------------- end to end
def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The tool, with the drop-in instead of the original."""
    command = [sys.executable, str(ROOT / "tools/measure.py"), "--seconds", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_case_is_measured_and_compared(tmp_path: Path) -> None:
    out, old = tmp_path / "out.json", tmp_path / "old.json"
    first = run("--peer", sys.executable, "--turns", "3", "--json", str(out), "accel --help")
    assert first.returncode == 0, first.stdout + first.stderr
    rows = read_rows(out)
    assert [(row.case, row.figure, row.turns) for row in rows] == [
        ("accel --help", "ours/peer", 3),
        ("accel --help", "ours/raw", 3),
    ]
    assert all(row.ours and row.raw for row in rows)
    assert "| accel --help | CPU s |" in first.stdout

    write_rows(old, [replace(row, value=row.value / 1000) for row in rows])
    again = run("--peer", sys.executable, "--turns", "3", "--json", str(out), "--compare", str(old), "accel --help")
    assert again.returncode == 1
    assert again.stdout.count("slower: commands: accel --help") == 2


def test_a_run_without_cases_or_without_an_old_run_is_refused_before_anything_is_measured() -> None:
    for given, words in ((["nothing like it"], "No case is selected"), (["--compare", "no.json"], "no file no.json")):
        done = run("--peer", "/bin/false", *given)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr


def test_a_case_that_cannot_be_measured_is_told_and_fails_the_run(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run("--peer", "/bin/false", "--turns", "1", "--json", str(out), "accel --help")
    assert done.returncode == 1
    assert "/bin/false could not measure 'accel --help'" in done.stdout
    assert json.loads(out.read_text(encoding="utf-8")) == {"rows": []}
