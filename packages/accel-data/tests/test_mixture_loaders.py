"""Prepared loaders over mixtures: one order on any number of processes, resumed, and with weights that change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

from accel_data import MixtureDataset, audit, prepare_data_loader
from accel_state import PartialState
from accel_state.errors import CheckpointError, Conflict, SettingError
from accel_testing.processes import Processes

pytestmark = pytest.mark.usefixtures("fresh_state")

SOURCES = {"code": range(60), "text": range(100, 130), "web": range(200, 220)}
WEIGHTS = {"code": 5, "text": 3, "web": 2}
SCHEDULE = [(15, {"code": 1, "web": 2}), (31, WEIGHTS)]


def mixture_of(**options: Any) -> MixtureDataset:
    return MixtureDataset(SOURCES, **{"weights": WEIGHTS, "schedule": SCHEDULE, **options})


def prepared(batch_size: int = 2, workers: int = 0, options: Any = None, **how: Any) -> Any:
    PartialState(cpu=True)
    plain = DataLoader(mixture_of(**(options or {})), batch_size=batch_size, num_workers=workers)
    return prepare_data_loader(plain, restore_position=True, **how)


def given(batches: int | None, state: Any, workers: int, how: dict[str, Any]) -> tuple[list[list[int]], Any]:
    """The batches of this process, up to a number of them, and the state of the loader after them."""
    loader = prepared(workers=workers, **how)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == batches:
            break
    return found, copy.deepcopy(loader.state_dict())


def in_order(answers: list[tuple[list[list[int]], Any]]) -> list[int]:
    """The samples of all processes in the global order."""
    by_process = [found for found, _ in answers]
    steps = range(max(map(len, by_process)))
    return [sample for step in steps for found in by_process if step < len(found) for sample in found[step]]


EXACT = {"even_batches": False}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", [EXACT, {**EXACT, "seed_samples": True}], ids=["plain", "seeded"])
def test_the_order_is_that_of_the_mixture_on_two_processes(two: Processes, workers: int, how: Any) -> None:
    assert in_order(two.run(given, None, None, workers, how)) == list(mixture_of())


def test_the_main_process_can_read_for_all(two: Processes) -> None:
    whole = list(mixture_of())
    run = in_order(two.run(given, None, None, 0, {"dispatch_batches": True, "put_on_device": True}))
    # Samples from the beginning complete the last step.
    assert run[: len(whole)] == whole
    assert len(run) < len(whole) + 4


def test_an_epoch_goes_on_with_other_numbers_of_processes_and_workers(processes: Callable[[int], Processes]) -> None:
    whole, run, state = list(mixture_of()), [], None
    for count, workers, batches in ((2, 2, 3), (3, 0, 4), (1, 0, 5), (2, 0, None)):
        answers = processes(count).run(given, batches, state, workers, EXACT)
        run += in_order(answers)
        state = answers[0][1]
    assert run == whole
    assert len(set(run)) == len(run)


def changing(workers: int, at: int) -> tuple[list[list[int]], int, Any]:
    """An epoch in which rank 0 gives other weights after some batches, and what the last state holds."""
    rank = PartialState(cpu=True).process_index
    loader = prepared(workers=workers, options={"stop": "repeat", "num_samples": 96}, even_batches=False)
    found, start = [], -1
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == at:
            start = loader.dataset.set_weights({"web": 1} if rank == 0 else None)
    return found, start, loader.state_dict()["mixture"]["schedule"]


@pytest.mark.parametrize("workers", [0, 2])
def test_changed_weights_hold_from_the_same_sample_on_every_process(two: Processes, workers: int) -> None:
    answers = two.run(changing, workers, 10)
    run = in_order([(found, None) for found, _, _ in answers])
    (start,) = {start for _, start, _ in answers}
    # A whole step of 2 processes and 2 samples, after what was given out and read ahead.
    assert start % 4 == 0
    assert 40 < start < 80
    unchanged = mixture_of(stop="repeat", num_samples=96)
    assert run[:start] == [unchanged[n] for n in range(start)]
    web = [sample for sample in run[start:] if sample >= 200]
    assert len(web) >= len(run[start:]) - 2
    assert answers[0][2] == answers[1][2]
    assert [begin for begin, _ in answers[0][2]] == [0, 15, 31, start]
    again = mixture_of(stop="repeat", num_samples=96)
    again.load_mixture_state({**again.mixture_state(), "schedule": answers[0][2]})
    assert run == list(again)


def test_weights_changed_before_a_checkpoint_hold_after_it() -> None:
    options = {"stop": "repeat", "num_samples": 40}
    loader = prepared(options=options)
    batches = iter(loader)
    first = [sample for _ in range(5) for sample in next(batches).tolist()]
    start = loader.dataset.set_weights({"text": 1})
    state = copy.deepcopy(loader.state_dict())
    rest = [sample for batch in batches for sample in batch.tolist()]
    again = prepared(options=options)
    again.load_state_dict(state)
    assert [sample for batch in again for sample in batch.tolist()] == rest
    assert len(first) == 10 < start < 20
    assert again.dataset.schedule == loader.dataset.schedule


def test_weights_changed_after_a_load_do_not_reach_back() -> None:
    options = {"stop": "repeat", "num_samples": 40}
    loader = prepared(options=options)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    again = prepared(options=options)
    again.load_state_dict(loader.state_dict())
    assert again.dataset.set_weights({"text": 1}) == 10


def wrong_weights() -> str:
    rank = PartialState(cpu=True).process_index
    mixture = mixture_of()
    try:
        mixture.set_weights({"tekst": 1} if rank == 0 else {"text": 1})
    except SettingError as error:
        return error.obstacle
    return ""


def test_wrong_weights_are_refused_on_every_process(two: Processes) -> None:
    assert two.run(wrong_weights) == ["There is no source 'tekst'.", "Process 0 failed: There is no source 'tekst'."]


def test_a_state_of_other_data_is_refused() -> None:
    loader = prepared()
    next(iter(loader))
    state = loader.state_dict()
    other = prepare_data_loader(DataLoader(MixtureDataset({"code": range(60)}, {"code": 1}), batch_size=2))
    with pytest.raises(CheckpointError, match=r"(?s)'text'.*had 30 samples.*has none"):
        other.load_state_dict(state)  # type: ignore[attr-defined]
    plain = prepare_data_loader(DataLoader(range(60), batch_size=2), restore_position=True)  # type: ignore[arg-type]
    next(iter(plain))
    with pytest.raises(CheckpointError, match="was not a mixture; this one has code, text, web"):
        prepared().load_state_dict(plain.state_dict())  # type: ignore[attr-defined]


def test_a_mixture_cannot_be_shuffled() -> None:
    PartialState(cpu=True)
    with pytest.raises(Conflict, match="Cannot shuffle a mixture"):
        prepare_data_loader(DataLoader(mixture_of(), batch_size=2, shuffle=True))


def test_single_samples_and_further_epochs_come_in_order() -> None:
    loader = prepared(batch_size=None)
    mixture = mixture_of()
    for epoch in range(3):
        mixture.set_epoch(epoch)
        assert [int(sample) for sample in loader] == list(mixture)


def test_an_audit_sees_the_positions_of_a_mixture() -> None:
    loader = prepared()
    assert audit(loader).exact
