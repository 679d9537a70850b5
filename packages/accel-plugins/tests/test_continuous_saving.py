"""How often a run saves by itself: what a save costs, what that allows, and which checkpoints stay."""

from __future__ import annotations

import pytest

from accel_plugins import ContinuousSavePolicy, ProjectConfiguration
from accel_plugins.checkpoint.boundaries import SavePace
from accel_plugins.checkpoint.retention import beyond
from accel_state.errors import Conflict, SettingError


def simulate(share: float, step: float, slowed: float, save: float, seconds: float) -> tuple[int, float]:
    """Saves of a run, and the share of its time that they cost.

    Args:
        share: the most that saving may cost.
        step: seconds of an undisturbed step.
        slowed: seconds of a step during a save.
        save: seconds that a save takes.
        seconds: length of the run.
    """
    pace, now, until, saves, lost = SavePace(share), 0.0, -1.0, 0, 0.0
    while now < seconds:
        if pace.passed(now, now < until):
            pace.begin()
            saves, until = saves + 1, now + save
        took = slowed if now < until else step
        lost += took - step
        now += took
    return saves, lost / now


@pytest.mark.parametrize("share", [0.01, 0.02, 0.1])
@pytest.mark.parametrize("slowed", [0.011, 0.02, 0.05])
def test_saves_cost_the_share_that_is_allowed_and_use_most_of_it(share: float, slowed: float) -> None:
    saves, cost = simulate(share, 0.01, slowed, 2.0, 3000.0)
    assert cost <= share
    # As many as that allows, unless one always follows the other.
    lost_by_one = 2.0 / slowed * (slowed - 0.01)
    most = min(3000.0 * share / lost_by_one, 3000.0 / 2.0)
    assert saves >= 0.8 * most - 1


def test_a_save_that_costs_nothing_is_followed_by_the_next_at_once() -> None:
    saves, _ = simulate(0.01, 0.01, 0.01, 1.0, 100.0)
    assert saves >= 90


def test_nothing_is_saved_before_steps_are_known() -> None:
    pace = SavePace(0.5)
    assert [pace.passed(float(now), False) for now in range(10)] == [False] * 8 + [True] * 2


def test_the_first_checkpoint_of_each_period_stays() -> None:
    written = {f"checkpoint_{number}": 60.0 * number for number in range(10)}
    kept = written.keys() - set(beyond(written, 2, 180.0))
    assert sorted(kept) == ["checkpoint_0", "checkpoint_3", "checkpoint_6", "checkpoint_8", "checkpoint_9"]
    assert beyond(written, 2) == list(written)[:8]
    assert beyond(written, 20, 1.0) == []


def test_what_stays_does_not_depend_on_when_others_were_removed() -> None:
    written: dict[str, float] = {}
    for number in range(50):
        written[f"checkpoint_{number}"] = 37.0 * number
        for name in beyond(written, 3, 300.0):
            del written[name]
    assert set(written) == {f"checkpoint_{number}" for number in (0, 9, 17, 25, 33, 41, 47, 48, 49)}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_overhead": 0.0}, "max_overhead"),
        ({"max_overhead": 1.5}, "max_overhead"),
        ({"keep_last": 0}, "keep_last"),
        ({"keep_last": 1.5}, "keep_last"),
        ({"keep_every": "soon"}, "keep_every"),
        ({"keep_every": "1..h"}, "keep_every"),
        ({"keep_every": -1.0}, "keep_every"),
    ],
)
def test_a_policy_that_cannot_be_followed_is_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        ContinuousSavePolicy(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("period", "seconds"), [("90s", 90.0), ("1.5 min", 90.0), ("1h", 3600.0), ("2 d", 172800.0), (7, 7.0), (None, None)]
)
def test_periods_have_units(period: str | float | None, seconds: float | None) -> None:
    assert ContinuousSavePolicy(keep_every=period).period == seconds


def test_a_policy_and_a_limit_exclude_each_other() -> None:
    policy = ContinuousSavePolicy()
    with pytest.raises(Conflict, match="keep_last"):
        ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2, save_policy=policy)
    with pytest.raises(SettingError, match="automatic_checkpoint_naming"):
        ProjectConfiguration(save_policy=policy)
