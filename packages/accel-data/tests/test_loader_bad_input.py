"""Data and loaders that are not what they say: an error that names the process and the loader, on all processes."""

from __future__ import annotations

import multiprocessing.util
import os
import time
import warnings
from collections.abc import Iterator
from itertools import product
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SequentialSampler

from accel_data import drop_padding, prepare_data_loader, skip_first_batches
from accel_ops import gather, gather_object
from accel_state import GradientState, PartialState
from accel_state.errors import DataError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_testing.streams import Stream


class Samples(Dataset[int]):
    """Has so many samples, and may claim another number."""

    def __init__(self, length: int, claimed: int | None = None) -> None:
        self.length = length
        self.claimed = length if claimed is None else claimed

    def __len__(self) -> int:
        return self.claimed

    def __getitem__(self, index: int) -> int:
        if index >= self.length:
            raise IndexError(index)
        return index


class Sized(Stream):
    """A stream that claims a length."""

    def __init__(self, length: int, claimed: int) -> None:
        super().__init__(length)
        self.claimed = claimed

    def __len__(self) -> int:
        return self.claimed


class Claiming(Sampler[int]):
    """A sampler that gives other than it says."""

    def __init__(self, given: int, claimed: int) -> None:
        self.given = given
        self.claimed = claimed

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.given))

    def __len__(self) -> int:
        return self.claimed


class ClaimingBatches(BatchSampler):
    """A batch sampler that gives other than it says."""

    def __init__(self, given: int, claimed: int) -> None:
        super().__init__(SequentialSampler(range(given)), 2, False)
        self.claimed = claimed

    def __len__(self) -> int:
        return self.claimed


def refused(loader: Any) -> tuple[int, str]:
    """How many batches came before the error, and the error."""
    seen: list[Any] = []
    with pytest.raises(DataError) as caught:
        seen.extend(loader)
    assert not GradientState().in_dataloader
    return len(seen), str(caught.value)


EMPTY = {
    "indices": (lambda: DataLoader(Samples(0), batch_size=2), "loader over Samples"),
    "stream": (lambda: DataLoader(Stream(0), batch_size=2), "loader over Stream"),
    "sized stream": (lambda: DataLoader(Sized(0, 0), batch_size=2), "loader over Sized"),
    "worker of a stream": (lambda: DataLoader(Stream(0), batch_size=2, num_workers=1), "loader over Stream"),
    "single": (lambda: DataLoader(Samples(0), batch_size=None), "loader over Samples"),
}


@pytest.mark.parametrize("kind", sorted(EMPTY))
@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}, {"seed_samples": True}])
def test_data_without_a_sample(kind: str, options: dict[str, Any]) -> None:
    make, name = EMPTY[kind]
    with fresh():
        seen, text = refused(prepare_data_loader(make(), **options))
    assert seen == 0
    assert f"Process 0 of 1, {name} in epoch 0" in text
    assert "no sample" in text


def test_loaders_without_batches_are_empty() -> None:
    with fresh():
        for plain in (DataLoader(Samples(4), batch_size=2), DataLoader(Stream(4), batch_size=2)):
            loader: Any = prepare_data_loader(plain)
            assert list(skip_first_batches(loader, 5)) == []


def test_epochs_without_a_batch_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with fresh():
        loader = prepare_data_loader(DataLoader(Samples(3), batch_size=4, drop_last=True))
        assert [list(loader) for _ in range(3)] == [[], [], []]
    (record,) = caplog.records
    assert record.getMessage().startswith("Process 0 of 1, loader over Samples in epoch 0: it has no batches.")


def short(cases: list[tuple[str, int, dict[str, Any], bool]]) -> list[str]:
    PartialState(cpu=True)
    found = []
    for kind, length, options, drop_last in cases:
        data: Any = {"indices": Samples, "stream": Stream}[kind](length)
        plain = DataLoader(data, batch_size=2, drop_last=drop_last)
        found.append(refused(prepare_data_loader(plain, put_on_device=True, **options))[1])
    return found


def test_data_shorter_than_the_number_of_processes(two: Processes) -> None:
    uneven = {"even_batches": False, "dispatch_batches": False}
    cases = [
        ("indices", 0, {}, False),
        ("stream", 0, {}, False),
        ("stream", 0, uneven, False),
        ("indices", 1, uneven, False),
        ("stream", 1, uneven, False),
        ("indices", 1, {}, True),
        ("stream", 1, {"dispatch_batches": False}, True),
        ("indices", 1, {"dispatch_batches": True}, True),
    ]
    for rank, texts in enumerate(two.run(short, cases)):
        for (kind, length, _, _), text in zip(cases, texts, strict=True):
            assert f"Process {rank} of 2, loader over {'Samples' if kind == 'indices' else 'Stream'}" in text
            assert ("process 1 would have none" if length else "no sample") in text


def filled(kind: str, dispatch: bool) -> list[list[int]]:
    PartialState(cpu=True)
    data: Any = Samples(1) if kind == "indices" else Stream(1)
    loader: Any = prepare_data_loader(DataLoader(data, batch_size=2), dispatch_batches=dispatch)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", ["indices", "stream"])
@pytest.mark.parametrize("dispatch", [False, True])
def test_too_few_samples_are_repeated_with_even_batches(two: Processes, kind: str, dispatch: bool) -> None:
    assert two.run(filled, kind, dispatch) == [[[0]] if dispatch else [[0, 0]]] * 2


WRONG = {
    "sampler, too many": lambda: DataLoader(range(20), batch_size=2, sampler=Claiming(16, 8)),
    "sampler, too few": lambda: DataLoader(range(20), batch_size=2, sampler=Claiming(8, 16)),
    "sampler, in the last step": lambda: DataLoader(range(20), batch_size=2, sampler=Claiming(12, 10)),
    "batches, too many": lambda: DataLoader(range(20), batch_sampler=ClaimingBatches(16, 4)),
    "batches, too few": lambda: DataLoader(range(20), batch_sampler=ClaimingBatches(8, 8)),
    "stream, too many": lambda: DataLoader(Sized(16, 8), batch_size=2),
    "stream, too few": lambda: DataLoader(Sized(8, 16), batch_size=2),
    "stream, in the last step": lambda: DataLoader(Sized(12, 10), batch_size=2),
}


def read(loader: Any) -> tuple[int, list[int], list[str]]:
    """The batches of an epoch, their samples as metrics keep them, and the warnings after the last batch."""
    kept: list[int] = []
    count = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            count += 1
            assert not caught
            kept += drop_padding(gather(batch), loader.progress.padding).tolist()
    assert loader.iteration == 1
    assert not GradientState().in_dataloader
    return count, kept, [str(warning.message) for warning in caught]


def wrong(kind: str, dispatch: bool) -> tuple[int, list[int], list[str], int]:
    PartialState(cpu=True)
    loader: Any = prepare_data_loader(WRONG[kind](), dispatch_batches=dispatch, put_on_device=True)
    return (*read(loader), loader.remainder)


@pytest.mark.parametrize("kind", sorted(WRONG))
def test_a_wrong_length_is_a_warning_after_an_epoch_of_all_samples(two: Processes, kind: str) -> None:
    steps = 2 if "few" in kind else 3 if "last" in kind else 4
    for dispatch in (False, True):
        for rank, (seen, kept, texts, remainder) in enumerate(two.run(wrong, kind, dispatch)):
            assert seen == steps
            assert kept == list(range({2: 8, 3: 12, 4: 16}[steps]))
            assert remainder in (0, -1)
            if "last" in kind or (dispatch and rank == 1):
                # The number of steps is right; only the process that reads knows what it should be.
                assert texts == []
                continue
            (text,) = texts
            assert f"Process {rank} of 2, loader over" in text
            assert "in epoch 0: it yielded" in text
            assert "len()" in text


@pytest.mark.parametrize("kind", sorted(WRONG))
def test_a_wrong_length_with_one_process(kind: str) -> None:
    with fresh():
        loader = prepare_data_loader(WRONG[kind]())
        count, kept, texts = read(loader)
    assert count == (4 if "few" in kind else 6 if "last" in kind else 8)
    assert kept == list(range(2 * count))
    assert len(texts) == 1


class Buckets(BatchSampler):
    """Batches of indices of equal length, with a short one at the end of each bucket, and the right length."""

    def __init__(self, sizes: tuple[int, ...], has_batch_size: bool) -> None:
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.batches = [
            list(range(first, min(first + 4, start + size)))
            for start, size in zip(starts, sizes, strict=True)
            for first in range(start, start + size, 4)
        ]
        self.drop_last = False
        if has_batch_size:
            self.batch_size = 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def bucketed(cases: list[tuple[tuple[int, ...], bool, bool, bool]]) -> list[tuple[list[list[int]], list[str], int]]:
    PartialState(cpu=True)
    found = []
    for sizes, has_batch_size, even, dispatch in cases:
        plain = DataLoader(range(sum(sizes)), batch_sampler=Buckets(sizes, has_batch_size))  # type: ignore[arg-type]
        loader: Any = prepare_data_loader(plain, dispatch_batches=dispatch, even_batches=even)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = [batch.tolist() for batch in loader]
        found.append((batches, [str(warning.message) for warning in caught], len(loader)))
    return found


def test_a_bucketing_batch_sampler_is_not_accused(two: Processes) -> None:
    sizes = [(6, 4), (5, 5, 5), (3, 8), (8, 3), (4, 6, 2), (7,)]
    cases = list(product(sizes, (True, False), (True, False), (True, False)))
    for case, *found in zip(cases, *two.run(bucketed, cases), strict=True):
        seen = {sample for batches, _, _ in found for batch in batches for sample in batch}
        assert seen == set(range(sum(case[0]))), case
        assert [texts for _, texts, _ in found] == [[], []], case
        assert [length for *_, length in found] == [len(batches) for batches, *_ in found], case
        if case[2]:
            assert len({len(batches) for batches, *_ in found}) == 1, case


def test_a_length_that_dataloader_workers_divide_in_their_own_way_is_not_compared() -> None:
    with fresh():
        loader = prepare_data_loader(DataLoader(Sized(8, 16), batch_size=2, num_workers=2))
        assert len(list(loader)) == 8


def beyond(workers: int, dispatch: bool) -> str:
    rank = PartialState(cpu=True).process_index
    plain = DataLoader(Samples(5, claimed=16), batch_size=2, num_workers=workers)
    text = refused(prepare_data_loader(plain, dispatch_batches=dispatch, put_on_device=True))[1]
    assert f"Process {rank} of 2, loader over Samples in epoch 0" in text
    return text


def test_an_index_beyond_the_data_set_is_an_error_on_every_process(two: Processes) -> None:
    for workers, dispatch in product((0, 1), (False, True)):
        first, second = two.run(beyond, workers, dispatch)
        assert "An index of the sampler is not in the data set" in first
        assert ("could not read it" if dispatch else "not in the data set") in second


class Dying(Samples):
    def __getitem__(self, index: int) -> int:
        if index == 3:
            os._exit(1)
        return index


def dying(dispatch: bool) -> str:
    rank = PartialState(cpu=True).process_index
    plain = DataLoader(Dying(16), batch_size=2, num_workers=1)
    loader = prepare_data_loader(plain, dispatch_batches=dispatch, put_on_device=True)
    if not dispatch and rank == 0:
        assert len(list(loader)) == 4
        return ""
    text = refused(loader)[1]
    assert f"Process {rank} of 2, loader over Dying" in text
    return text


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_dataloader_worker_that_dies_is_an_error_on_every_process(two: Processes, dispatch: bool) -> None:
    first, second = two.run(dying, dispatch)
    assert "A DataLoader worker died" in (first if dispatch else second)
    assert not dispatch or "could not read it" in second


class KnownWorker(DataLoader[int]):
    """Keeps its only worker, since the process may have other children."""

    worker: ClassVar[Any]

    def __iter__(self) -> Any:
        batches: Any = super().__iter__()
        (KnownWorker.worker,) = batches._workers
        return batches

    @staticmethod
    def await_death() -> None:
        """Wait until the worker has ended, and leave its exit code to torch."""
        os.waitid(os.P_PID, KnownWorker.worker.pid, os.WEXITED | os.WNOWAIT)


class AwaitedDeath(KnownWorker):
    """Returns its iterator after its worker died."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        self.await_death()
        return batches


def dead_before_the_first_read() -> str:
    PartialState(cpu=True)
    loader = prepare_data_loader(AwaitedDeath(Dying(16), num_workers=1, prefetch_factor=4), dispatch_batches=True)
    return refused(loader)[1]


def test_a_dataloader_worker_that_dies_before_the_first_read(two: Processes) -> None:
    first, second = two.run(dead_before_the_first_read)
    assert "Process 0 of 2, loader over Dying" in first
    assert "A DataLoader worker died" in first
    assert "could not read it" in second


def dead_during_a_step() -> tuple[list[int], str]:
    rank = PartialState(cpu=True).process_index
    loader: Any = prepare_data_loader(KnownWorker(Samples(32), num_workers=1), dispatch_batches=True)
    seen: list[int] = []
    try:
        for batch in loader:
            if rank == 0 and not seen:
                KnownWorker.worker.kill()
                KnownWorker.await_death()
            seen += gather_object([int(batch)])
    except DataError as error:
        return seen, str(error)
    raise AssertionError("The loader ended without an error.")


def test_a_dataloader_worker_that_dies_during_a_step_is_an_error_of_a_later_read(two: Processes) -> None:
    (seen, first), (also_seen, second) = two.run(dead_during_a_step)
    # The main process had read two steps, and the batches of a third.
    assert seen == also_seen == list(range(6))
    assert "A DataLoader worker died" in first
    assert "could not read it" in second


class Unreachable(Samples):
    """Its worker removes the sockets over which the main process fetches tensors, as at its end.

    It ends when the main process has noticed that.
    """

    def __init__(self, length: int, mark: Path) -> None:
        super().__init__(length)
        self.mark = mark
        self.refused = mark.with_name("refused")

    def __getitem__(self, index: int) -> int:
        # The first call makes the folder, before another thread of the worker opens a socket in it for the first batch.
        folder = Path(multiprocessing.util.get_temp_dir())
        if index == 3:
            while not (sockets := list(folder.glob("listener-*"))):
                time.sleep(0.01)
            for socket in sockets:
                socket.unlink()
            self.mark.touch()
            while not self.refused.exists():
                time.sleep(0.01)
            os._exit(1)
        return index


class AwaitedMark(DataLoader[int]):
    """Returns its iterator after its worker has become unreachable, and tells the worker when a read has failed."""

    def __iter__(self) -> Any:
        batches, unreachable = super().__iter__(), self.dataset
        assert isinstance(unreachable, Unreachable)
        while not unreachable.mark.exists():
            time.sleep(0.01)
        return telling_of_a_broken_connection(batches, unreachable.refused)


def telling_of_a_broken_connection(batches: Iterator[int], refused: Path) -> Iterator[int]:
    try:
        yield from batches
    except (EOFError, OSError):
        refused.touch()
        raise


def dies_after_its_connection(mark: Path) -> tuple[str, list[int]]:
    PartialState(cpu=True)
    loader = prepare_data_loader(
        AwaitedMark(Unreachable(16, mark), num_workers=1, prefetch_factor=4), dispatch_batches=True
    )
    text = refused(loader)[1]
    # Nothing is left over for another loader.
    other: Any = prepare_data_loader(DataLoader(Samples(4), num_workers=1), dispatch_batches=True)
    return text, [int(batch) for batch in other]


def test_a_dataloader_worker_whose_connection_breaks_before_it_has_ended(two: Processes, tmp_path: Path) -> None:
    (first, own), (second, others) = two.run(dies_after_its_connection, tmp_path / "mark")
    assert "A DataLoader worker died" in first
    assert "exited unexpectedly" in first
    assert "could not read it" in second
    assert (own, others) == ([0, 2], [1, 3])


class Stuck(Samples):
    def __getitem__(self, index: int) -> int:
        import threading

        threading.Event().wait()
        return index


def test_a_dataloader_worker_that_does_not_answer() -> None:
    with fresh():
        loader = prepare_data_loader(DataLoader(Stuck(4), num_workers=1, timeout=1))
        assert "did not answer" in refused(loader)[1]


def differing(name: str) -> str:
    rank = PartialState(cpu=True).process_index
    size, drop_last = (6 if name == "batch_size" and rank else 4), name == "drop_last" and rank == 1
    plain = DataLoader(Stream(24), batch_size=size, drop_last=drop_last)
    split = name == "split_batches" and rank == 1
    loader: Any = prepare_data_loader(plain, dispatch_batches=True, split_batches=split)
    if name == "skip_batches":
        loader = skip_first_batches(loader, rank)
    text = refused(loader)[1]
    assert f"Process {rank} of 2, loader over Stream" in text
    return text


@pytest.mark.parametrize("name", ["batch_size", "split_batches", "drop_last", "skip_batches"])
def test_an_error_names_the_processes_that_disagree(two: Processes, name: str) -> None:
    for text in two.run(differing, name):
        assert f"Process 0 has {name}=" in text
        assert f"process 1 has {name}=" in text


def dummies() -> list[int]:
    rank = PartialState(cpu=True).process_index
    plain = DataLoader(Samples(0 if rank else 10), batch_size=2)
    loader: Any = prepare_data_loader(plain, dispatch_batches=True)
    assert loader.end_of_dataloader is False
    remainders = [loader.remainder for _ in loader]
    assert remainders == [2] * 3
    return [rank]


def test_only_the_main_process_needs_the_data_when_it_reads_for_all(two: Processes) -> None:
    assert two.run(dummies) == [[0], [1]]


class Remote(Samples):
    """Reads each sample over a connection whose other end is closed, as a proxy of a manager that has ended."""

    def __getitem__(self, index: int) -> int:
        here, there = Pipe()
        there.close()
        here.send_bytes(bytes(1))
        return index


def test_a_broken_connection_of_the_data_set_is_not_taken_for_a_worker() -> None:
    with fresh(), pytest.raises(BrokenPipeError):
        list(prepare_data_loader(DataLoader(Remote(4), batch_size=2)))
