"""Runs that save continuously and are killed take up at the newest checkpoint, with the losses that they had."""

from __future__ import annotations

from pathlib import Path

import pytest

import reliability_continuous as continuous


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_runs_killed_at_random_moments_go_on_where_they_were_saved(tmp_path: Path, kills: int) -> None:
    tally = continuous.random_kills(tmp_path, continuous.KILLS // kills)
    assert tally.injected == kills + 1
    # How long a save takes is measured by the tool, and no matter of a test.
    assert [lost for lost in tally.lost if not lost.startswith("work that was lost")] == []


def life(taken: dict[int, float], losses: dict[int, str] | None = None) -> continuous._Life:
    return continuous._Life(begun=10.0, resumed=5, losses=losses or {}, taken=taken)


def test_a_save_that_begins_before_the_last_is_complete_is_found() -> None:
    kept = {5: 9.0, 8: 11.0, 12: 14.0}
    assert continuous._fault_of(life({8: 10.5, 12: 13.0, 15: 15.0}), 5, {}, kept) is None
    found = continuous._fault_of(life({8: 10.5, 10: 12.0, 12: 13.0}), 5, {}, kept)
    assert found == "the save of step 10 was not complete when the next one began"


def test_a_run_that_went_on_elsewhere_is_found() -> None:
    assert continuous._fault_of(life({}), 8, {}, {}) == "it took up after step 5, and step 8 was saved"
    found = continuous._fault_of(life({}, {6: "0x1", 7: "0x2"}), 5, {7: "0x3"}, {})
    assert found == "the loss of step 7 is another one than before"


def test_times_that_the_kill_cut_count_as_longer() -> None:
    def lasted(*ended: float, cut: tuple[float, ...] = ()) -> list[continuous._Lasted]:
        return [*(continuous._Lasted(one, True) for one in ended), *(continuous._Lasted(one, False) for one in cut)]

    assert continuous._percentile(lasted(1.0, 2.0, 3.0, 4.0), 50) == 2.0
    # Of the three that lasted longer than the cut one, the second brings the share below a half.
    assert continuous._percentile(lasted(1.0, 3.0, 4.0, cut=(2.0,)), 50) == 3.0
    assert continuous._percentile(lasted(1.0, cut=(2.0, 2.0)), 50) == float("inf")


def test_what_a_kill_costs_is_counted_from_the_newest_complete_checkpoint() -> None:
    kills = continuous._Kills()
    kills.add(life({8: 11.0, 12: 13.0}), 13.5, {5: 9.0, 8: 11.4})
    assert kills.lost == [continuous._Lasted(2.5, True)]
    assert [(one.seconds, one.ended) for one in kills.intervals] == [(1.0, True), (2.0, True), (0.5, False)]
    assert [(round(one.seconds, 3), one.ended) for one in kills.commits] == [(0.4, True), (0.5, False)]
