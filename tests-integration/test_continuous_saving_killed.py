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
