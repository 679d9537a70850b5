"""How many requests a save makes to the store of the run, with up to 1,024 simulated ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from counting_store import on_all_ranks, simulated_ranks

from accel_ops import agreement
from accel_ops.agreement import StoreBarrier
from accel_plugins.checkpoint.commit import staging
from accel_plugins.checkpoint.finalize import CheckpointFinalizer, Committed
from accel_plugins.checkpoint.manifest import verify
from accel_state.errors import CheckpointError

WORLDS = (2, 64, 1024)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand threads on a busy machine answer late; requests are counted here, and no time is measured."""
    monkeypatch.setattr(agreement, "_REPLY_TIMEOUT_S", 600.0)
    monkeypatch.setattr(agreement, "_MAX_FAREWELL_S", 600.0)


def save(rank: Any, target: Path, begun: bool) -> Committed | None:
    barrier = StoreBarrier(rank, "save", "Cannot save.", 600.0, CheckpointError) if begun else None
    finalizer = CheckpointFinalizer(fsync=False)
    if barrier is not None:
        barrier.wait("ready", str(target))
    with staging(target, rank, fsync=False, deadline=600.0, finalizer=finalizer, barrier=barrier) as folder:
        if rank.topology.is_local_main:
            (folder / f"shard_{rank.rank}").write_text("weights", encoding="utf-8")
    return finalizer.committed


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("size", WORLDS)
def test_a_save_takes_a_rank_12_requests_and_rank_0_three_for_each_rank(tmp_path: Path, size: int, begun: bool) -> None:
    ranks = simulated_ranks(size, ranks_per_node=min(size, 8))
    outcomes = on_all_ranks(ranks, lambda rank: save(rank, tmp_path / "a", begun))

    assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []
    assert {(tuple(outcome.owners), outcome.save) for outcome in outcomes} == {((0,), outcomes[0].save)}
    assert max(rank.count for rank in ranks[1:]) <= 12
    assert ranks[0].count <= 3 * size + 20
    assert ranks[0].memory.values == {}
    verdict = verify(tmp_path / "a", hashes=True)
    assert verdict.manifest is not None
    assert (verdict.good, len(verdict.manifest.files)) == (True, -(-size // 8))


def test_a_hundred_saves_leave_no_key_and_take_the_same_requests_each(tmp_path: Path) -> None:
    ranks = simulated_ranks(4)
    counts = []
    for _ in range(100):
        before = [rank.count for rank in ranks]
        outcomes = on_all_ranks(ranks, lambda rank: save(rank, tmp_path / "a", True))
        assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []
        assert ranks[0].memory.values == {}
        counts.append(sorted(rank.count - start for rank, start in zip(ranks, before, strict=True)))
    assert [max(count) for count in counts] == [counts[0][-1]] * 100
