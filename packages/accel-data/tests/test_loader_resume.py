"""Continuing in the middle of an epoch: the rest of the run is the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from accel_data import prepare_data_loader, skip_first_batches
from accel_state.errors import CheckpointError, Conflict, SettingError, UnknownKind

pytestmark = pytest.mark.usefixtures("fresh_state")


class Stream(IterableDataset[int]):
    """The same samples in every epoch, but others than in the one before."""

    epoch = 0

    def __init__(self, length: int) -> None:
        self.length = length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + self.length))


class ShuffledStream(Stream):
    """A stream that goes on drawing from its own generator."""

    set_epoch = property()  # type: ignore[assignment]

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length, generator=self.generator).tolist())


class Unseeded(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(11).tolist())

    def __len__(self) -> int:
        return 11


class Seeded(Unseeded):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(11, generator=self.generator).tolist())


class Grouped(BatchSampler):
    """A batch sampler that is not torch's: batches of 1 and 3 in turn."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        while order:
            yield order[:1]
            if order[1:4]:
                yield order[1:4]
            del order[:4]

    def __len__(self) -> int:
        return len(list(iter(range(0, len(self.sampler), 2))))  # type: ignore[arg-type]


PLAIN = {
    "sequential": lambda workers: DataLoader(range(11), batch_size=2, num_workers=workers),
    "shuffled": lambda workers: DataLoader(range(11), batch_size=2, shuffle=True, num_workers=workers),
    "persistent": lambda workers: DataLoader(
        range(11), batch_size=2, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    ),
    "own generator": lambda workers: DataLoader(
        range(11), batch_size=2, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(4)
    ),
    "drop_last": lambda workers: DataLoader(range(11), batch_size=2, shuffle=True, drop_last=True, num_workers=workers),
    "replacement": lambda workers: DataLoader(
        range(11), batch_size=2, sampler=RandomSampler(range(11), replacement=True), num_workers=workers
    ),
    "custom sampler": lambda workers: DataLoader(range(11), batch_size=2, sampler=Seeded(), num_workers=workers),
    "custom batches": lambda workers: DataLoader(
        range(11), batch_sampler=Grouped(RandomSampler(range(11))), num_workers=workers
    ),
    "single": lambda workers: DataLoader(range(11), batch_size=None, num_workers=workers),
    "a list": lambda workers: DataLoader(
        range(11), batch_size=2, sampler=[3, 1, 10, 2, 7, 5, 4, 9, 0, 6, 8], num_workers=workers
    ),
    "a list of batches": lambda workers: DataLoader(
        range(11), batch_sampler=[[3, 1], [10, 2], [7, 5], [4, 9], [0, 6]], num_workers=workers
    ),
    "stream": lambda workers: DataLoader(Stream(11), batch_size=2, num_workers=workers),
    "drawing stream": lambda workers: DataLoader(ShuffledStream(11), batch_size=2),
}


def prepared(kind: str, processes: int, workers: int = 0, **options: Any) -> Any:
    plain = PLAIN[kind](workers)
    return prepare_data_loader(plain, num_processes=processes, process_index=processes - 1, **options)


def epoch_of(loader: Any) -> list[Any]:
    """The batches of an epoch and a random number drawn after each, as dropout would."""
    return [(torch.as_tensor(batch).tolist(), float(torch.rand(()))) for batch in loader]


def interrupted(loader: Any, steps: int) -> tuple[dict[str, Any], torch.Tensor, list[Any]]:
    """Two epochs; the state after `steps` batches of the second one, the generator then, and what came after."""
    epoch_of(loader)
    batches, saved, generator, rest = iter(loader), None, None, []
    for number, batch in enumerate(batches):
        drawn = float(torch.rand(()))
        if number >= steps:
            rest.append((torch.as_tensor(batch).tolist(), drawn))
        if number == steps - 1:
            saved, generator = loader.state_dict(), torch.get_rng_state()
    assert saved is not None
    assert generator is not None
    return saved, generator, [rest, epoch_of(loader)]


@pytest.mark.parametrize("kind", sorted(PLAIN))
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_resumed_loaders_go_on_alike_after_every_batch(
    kind: str, processes: int, seedable: bool, by_hand: bool
) -> None:
    options = {"use_seedable_sampler": seedable, "restore_position": not by_hand}
    total = len(list(prepared(kind, processes, **options)))
    for steps in range(1, total + 1):
        torch.manual_seed(steps)
        saved, generator, expected = interrupted(prepared(kind, processes, **options), steps)

        torch.manual_seed(1234)
        loader = prepared(kind, processes, **options)
        loader.load_state_dict(saved)
        torch.set_rng_state(generator)
        current = skip_first_batches(loader, steps) if by_hand else loader
        assert [epoch_of(current), epoch_of(loader)] == expected


@pytest.mark.parametrize("kind", ["shuffled", "persistent", "own generator", "stream", "custom batches"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_resumed_loaders_with_workers_go_on_alike(kind: str, by_hand: bool) -> None:
    for processes, steps in [(1, 2), (2, 1)]:
        saved, generator, expected = interrupted(prepared(kind, processes, 2, restore_position=not by_hand), steps)
        loader = prepared(kind, processes, 2, restore_position=not by_hand)
        loader.load_state_dict(saved)
        torch.set_rng_state(generator)
        current = skip_first_batches(loader, steps) if by_hand else loader
        assert [epoch_of(current), epoch_of(loader)] == expected


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "stream"])
def test_a_state_between_epochs_continues_with_the_next_one(kind: str) -> None:
    loader = prepared(kind, 2, restore_position=True)
    epoch_of(loader)
    saved, generator = loader.state_dict(), torch.get_rng_state()
    expected = [epoch_of(loader), epoch_of(loader)]
    other = prepared(kind, 2, restore_position=True)
    other.load_state_dict(saved)
    torch.set_rng_state(generator)
    assert [epoch_of(other), epoch_of(other)] == expected
    assert other.iteration == 3


def test_skip_first_batches_after_a_restored_position_skips_nothing_more() -> None:
    saved, _, expected = interrupted(prepared("shuffled", 1, restore_position=True), 2)
    loader = prepared("shuffled", 1, restore_position=True)
    loader.load_state_dict(saved)
    rest = [batch.tolist() for batch in skip_first_batches(loader, 2)]
    assert rest == [batch for batch, _ in expected[0]]
    assert [batch.tolist() for batch in loader] == [batch for batch, _ in expected[1]]


def test_without_restore_position_an_epoch_begins_at_its_beginning() -> None:
    torch.manual_seed(0)
    loader = prepared("shuffled", 1)
    whole = [batch.tolist() for batch in loader]
    torch.manual_seed(0)
    loader = prepared("shuffled", 1)
    next(iter(loader))
    other = prepared("shuffled", 1)
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == whole


def test_setting_another_epoch_forgets_the_position() -> None:
    saved, _, _ = interrupted(prepared("sequential", 1, restore_position=True), 2)
    for epoch, count in [(1, 4), (2, 6), (0, 6)]:
        loader = prepared("sequential", 1, restore_position=True)
        loader.load_state_dict(saved)
        loader.set_epoch(epoch)
        assert len(list(loader)) == count
        assert loader.iteration == epoch + 1


def test_a_state_loaded_and_saved_again_is_the_same() -> None:
    saved, _, _ = interrupted(prepared("sequential", 1, restore_position=True), 2)
    loader = prepared("sequential", 1, restore_position=True)
    loader.load_state_dict(saved)
    assert loader.state_dict() == saved


def test_a_second_interruption_in_the_resumed_epoch() -> None:
    torch.manual_seed(2)
    loader = prepared("shuffled", 2)
    whole = [batch.tolist() for batch in loader]
    torch.manual_seed(2)
    loader = prepared("shuffled", 2)
    next(iter(loader))
    second = prepared("shuffled", 2)
    second.load_state_dict(loader.state_dict())
    rest = iter(skip_first_batches(second, 1))
    assert next(rest).tolist() == whole[1]
    third = prepared("shuffled", 2, restore_position=True)
    third.load_state_dict(second.state_dict())
    assert [batch.tolist() for batch in third] == whole[2:]


def test_another_number_of_processes_continues_with_the_remaining_samples() -> None:
    def order(loaders: list[Any]) -> list[int]:
        return [index for step in zip(*loaders, strict=True) for batch in step for index in batch.tolist()]

    def make(processes: int) -> list[Any]:
        options: dict[str, Any] = {"use_seedable_sampler": True, "data_seed": 5, "restore_position": True}
        return [
            prepare_data_loader(
                DataLoader(range(48), batch_size=2, shuffle=True), num_processes=processes, process_index=r, **options
            )
            for r in range(processes)
        ]

    whole = order(make(1))
    first = make(4)
    running = [iter(loader) for loader in first]
    gone = [index for _ in range(2) for step in running for index in next(step).tolist()]
    saved = first[0].state_dict()
    for processes in (1, 2, 3):
        later = make(processes)
        for loader in later:
            loader.load_state_dict(saved)
        rest = order(later)
        assert gone + rest[: 48 - len(gone)] == whole
        assert order(later)[:48] == order(make_epoch_one(make(processes)))[:48]


class CountedStream(Stream):
    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("kind", [Stream, CountedStream, range])
@pytest.mark.parametrize("length", [13, 15, 16])
@pytest.mark.parametrize("processes", [2, 3])
def test_a_process_that_ended_before_others_has_no_batch_left(kind: Any, length: int, processes: int) -> None:
    def make(index: int) -> Any:
        return prepare_data_loader(
            DataLoader(kind(length), batch_size=2),
            num_processes=processes,
            process_index=index,
            even_batches=False,
            restore_position=True,
        )

    received = []
    for index in range(processes):
        loader = make(index)
        received += [sample for batch in loader for sample in batch.tolist() if sample < 100]
        loader.set_epoch(0)
        for _ in loader:
            state = loader.state_dict()
        again = make(index)
        again.load_state_dict(state)
        assert list(again) == []
        assert again.iteration == 1
    assert sorted(received) == list(range(length))


def make_epoch_one(loaders: list[Any]) -> list[Any]:
    for loader in loaders:
        loader.set_epoch(1)
    return loaders


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (lambda: DataLoader(range(11), batch_size=2), lambda: DataLoader(range(12), batch_size=2), "over 11 samples"),
        (
            lambda: DataLoader(range(11), batch_size=2, shuffle=True),
            lambda: DataLoader(range(11), batch_size=2),
            "saved with",
        ),
        (
            lambda: DataLoader(Stream(9), batch_size=2, num_workers=1),
            lambda: DataLoader(Stream(9), batch_size=3, num_workers=1),
            "steps of 2 samples",
        ),
    ],
)
def test_what_cannot_be_restored_exactly_is_refused(before: Any, after: Any, reason: str) -> None:
    loader: Any = prepare_data_loader(before(), restore_position=True)
    batches = iter(loader)
    next(batches)
    saved = loader.state_dict()
    other: Any = prepare_data_loader((after or before)(), restore_position=True)
    with pytest.raises(CheckpointError, match=reason):
        other.load_state_dict(saved)
    lenient: Any = prepare_data_loader((after or before)())
    lenient.load_state_dict(saved)
    assert lenient.iteration == 0


@pytest.mark.parametrize("skip", [0, 2, 9])
def test_plain_loaders_can_be_skipped_too(skip: int) -> None:
    for plain in (
        DataLoader(range(11), batch_size=2),
        DataLoader(range(11), batch_size=None),
        DataLoader(range(11), batch_sampler=Grouped(RandomSampler(range(11), generator=torch.Generator()))),
        DataLoader(Stream(11), batch_size=2),
        DataLoader(Stream(11), batch_size=2, num_workers=1),
    ):
        generator = getattr(getattr(plain.batch_sampler, "sampler", None), "generator", None)
        if generator is not None:
            generator.manual_seed(1)
        whole = [torch.as_tensor(batch).tolist() for batch in plain]
        if generator is not None:
            generator.manual_seed(1)
        skipped = skip_first_batches(plain, skip)
        assert [torch.as_tensor(batch).tolist() for batch in skipped] == whole[skip:]


def test_skipping_twice_adds_up() -> None:
    loader = prepared("sequential", 2)
    once = skip_first_batches(loader, 1)
    assert len(once) == len(loader) - 1
    assert [batch.tolist() for batch in skip_first_batches(once, 1)] == [batch.tolist() for batch in loader][2:]


def test_what_cannot_be_skipped_is_refused() -> None:
    with pytest.raises(UnknownKind):
        skip_first_batches([1, 2], 1)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="negative"):
        skip_first_batches(DataLoader(range(3)), -1)


def own_generator(seed: int, restores: bool) -> Any:
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(range(16), batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]
    return prepare_data_loader(loader, restore_position=restores)


@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_the_epoch_after_one_that_was_saved_at_its_last_batch(restores: bool, skips: bool) -> None:
    loader = own_generator(3, restores)
    for _ in loader:
        if loader.end_of_dataloader:
            saved = loader.state_dict()
    following = [[batch.tolist() for batch in loader] for _ in range(2)]

    again = own_generator(9, restores)
    again.load_state_dict(saved)
    if skips:
        assert list(skip_first_batches(again, 4)) == []
    for epoch, expected in enumerate(following, start=1):
        again.set_epoch(epoch)
        assert [batch.tolist() for batch in again] == expected


class Bare(IterableDataset[int]):
    """Says nothing of what a second epoch gives."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class ReadOnce(Stream):
    """Says that it gives an epoch again, and cannot."""

    def __init__(self) -> None:
        super().__init__(9)
        self.samples = (number for number in range(9))

    def __iter__(self) -> Iterator[int]:
        return self.samples


@pytest.mark.parametrize(
    ("make", "obstacle", "wish"),
    [
        (Bare, "neither set_epoch nor a generator", "restore_position"),
        (ReadOnce, "'samples', which can be read only once", "restore_position"),
        (ReadOnce, "'samples', which can be read only once", "use_stateful_dataloader"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")
def test_a_stream_that_cannot_be_continued_is_refused_by_prepare(make: Any, obstacle: str, wish: str) -> None:
    if wish == "use_stateful_dataloader":
        pytest.importorskip("torchdata")
    options: Any = {wish: True}
    with pytest.raises(Conflict, match=obstacle) as refused:
        prepare_data_loader(DataLoader(make(), batch_size=2), **options)
    assert f"{wish}=True" in refused.value.failure
    assert "set_epoch" in refused.value.remedy
    plain: Any = prepare_data_loader(DataLoader(make(), batch_size=2))
    assert len(list(plain)) == 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(range(11), batch_size=2, sampler=Unseeded()),
        lambda: DataLoader(range(11), batch_sampler=Grouped(Unseeded())),
    ],
)
def test_an_order_that_cannot_be_replayed_is_reported_by_prepare_and_refused_by_a_save_inside_an_epoch(
    make: Any,
) -> None:
    with pytest.warns(UserWarning, match=r"cannot be saved \(restore_position=True\): .* Give the sampler a generator"):
        loader: Any = prepare_data_loader(make(), restore_position=True)
    # Between epochs nothing has to be drawn again.
    saved = loader.state_dict()
    batches = iter(loader)
    next(batches)
    with pytest.raises(CheckpointError, match="neither a generator nor a state"):
        loader.state_dict()
    list(batches)
    assert loader.state_dict()["epoch"] == 1
    loader.load_state_dict(saved)
    lenient: Any = prepare_data_loader(make())
    next(iter(lenient))
    # What was saved without that wish is refused where it is restored.
    with pytest.raises(CheckpointError, match="neither a generator nor a state"):
        loader.load_state_dict(lenient.state_dict())
