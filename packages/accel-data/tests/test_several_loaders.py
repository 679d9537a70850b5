"""Loaders of different lengths that are in use at the same time, each with an end of its own."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import pytest
from torch.utils.data import DataLoader

from accel_data import drop_padding, prepare_data_loader
from accel_ops import gather
from accel_state import GradientState, PartialState
from accel_testing.processes import Processes
from accel_testing.streams import Stream


def loaders(workers: int) -> list[Any]:
    """A short one, a longer one that the main process reads for all, and a stream without length."""
    made = [
        (DataLoader(range(5), batch_size=2, num_workers=workers), False),  # type: ignore[arg-type]
        (DataLoader(range(100, 118), batch_size=2, num_workers=workers), True),  # type: ignore[arg-type]
        (DataLoader(Stream(range(200, 211)), batch_size=2, num_workers=workers), False),
    ]
    return [prepare_data_loader(plain, dispatch_batches=dispatch, put_on_device=True) for plain, dispatch in made]


def in_turn(workers: int) -> list[dict[str, Any]]:
    PartialState(cpu=True)
    found = [{"kept": [], "ends": [], "remainder": None} for _ in range(3)]
    mine = loaders(workers)
    for batches in zip_longest(*mine):
        for loader, batch, seen in zip(mine, batches, found, strict=True):
            if batch is not None:
                seen["kept"] += drop_padding(gather(batch), loader.progress.padding).tolist()
                seen["ends"].append(loader.end_of_dataloader)
                seen["remainder"] = loader.remainder
    assert not GradientState().in_dataloader
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_that_are_read_in_turn_have_ends_of_their_own(two: Processes, workers: int) -> None:
    for short, long, stream in two.run(in_turn, workers):
        assert sorted(short["kept"]) == list(range(5))
        assert sorted(long["kept"]) == list(range(100, 118))
        assert sorted(stream["kept"]) == list(range(200, 211))
        assert [len(seen["ends"]) for seen in (short, long, stream)] == [2, 5, 3]
        for seen, remainder in ((short, 1), (long, 2), (stream, 3)):
            assert seen["ends"] == [False] * (len(seen["ends"]) - 1) + [True]
            assert seen["remainder"] == remainder


def nested() -> tuple[list[bool], list[list[int]]]:
    PartialState(cpu=True)
    gradient = GradientState()
    short, long, stream = loaders(0)
    ends, kept = [], []
    for _ in long:
        for inner in (short, stream):
            samples: list[int] = []
            for batch in inner:
                assert gradient.active_dataloader is inner
                samples += drop_padding(gather(batch), inner.progress.padding).tolist()
            kept.append(samples)
        assert gradient.active_dataloader is long
        ends.append(gradient.end_of_dataloader)
    return ends, kept


def test_validation_inside_a_training_loop(two: Processes) -> None:
    for ends, kept in two.run(nested):
        assert ends == [False] * 4 + [True]
        assert kept == [list(range(5)), list(range(200, 211))] * 5


def abandoned() -> list[int]:
    PartialState(cpu=True)
    short, long, _ = loaders(0)
    unfinished = iter(long)
    next(unfinished)
    assert GradientState().active_dataloader is long
    for _ in short:
        assert GradientState().active_dataloader is short
    unfinished.close()
    assert not GradientState().in_dataloader
    return [len(batch) for batch in long]


def test_one_that_is_left_in_the_middle_does_not_stand_in_the_way(two: Processes) -> None:
    assert two.run(abandoned) == [[2] * 4 + [1]] * 2
