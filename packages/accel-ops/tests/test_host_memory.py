"""Large tensors of processes of one machine: read from shared memory, or sent where a process cannot share."""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_ops import broadcast, gather, host_memory, reduce
from accel_ops.checked_call import LARGE
from accel_state import PartialState
from accel_state.errors import ShapeMismatch
from accel_testing.processes import Processes
from accel_testing.recording_transport import recording

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is shared on Linux")

MORE = LARGE // 4 + 1
BEYOND_THE_HEADER = 20_000
OPERATIONS = ("sum", "mean", "product", "max", "min")


@pytest.fixture(scope="module", params=[2, 3])
def group(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with Processes(request.param, timeout=250) as group:
        yield group


@contextmanager
def unable(rank: int | None) -> Iterator[None]:
    """Let the process of a rank, or none, fail to open the memory of others."""
    opened = host_memory._opened
    if PartialState().process_index == rank:
        host_memory._opened = lambda offer, host: -1
    try:
        yield
    finally:
        host_memory._opened = opened


def data_of(rank: int, call: int) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(1000 * call + rank)
    size = MORE + 7 * call
    return {
        "large": torch.randn(size, generator=drawn),
        "wide": torch.randn(600, MORE // 300, generator=drawn, dtype=torch.float64).t(),
        "bytes": torch.randint(256, (4 * size,), generator=drawn, dtype=torch.uint8),
        "truths": torch.randint(2, (4 * size,), generator=drawn).bool(),
        "short": torch.randint(-9, 9, (2 * size,), generator=drawn, dtype=torch.int16),
        "small": [torch.randn(BEYOND_THE_HEADER, generator=drawn), torch.arange(3) + rank],
    }


def leaves(data: dict[str, Any]) -> list[torch.Tensor]:
    return [data["large"], data["wide"], data["bytes"], data["truths"], data["short"], *data["small"]]


def floats(data: dict[str, Any]) -> list[torch.Tensor]:
    return [data["large"], data["wide"], data["small"][0]]


def all_calls_are_right(unable_rank: int | None) -> list[str]:
    """Run every operation some times, at random paces; returns the collectives of the last round."""
    state = PartialState(cpu=True)
    rank, ranks = state.process_index, range(state.num_processes)
    pace = random.Random(rank)
    with unable(unable_rank), recording() as records:
        for call in range(5):
            records.clear()
            own, all_data = data_of(rank, call), [data_of(other, call) for other in ranks]
            gathered = gather(own)
            time.sleep(pace.random() / 50)
            expected = [torch.cat(rows) for rows in zip(*map(leaves, all_data), strict=True)]
            assert all(map(torch.equal, leaves(gathered), expected))
            alone = gather(own, dst=1)
            assert (alone is None) == (rank != 1)
            assert alone is None or all(map(torch.equal, leaves(alone), expected))
            for operation in OPERATIONS:
                reduced = reduce(floats(own), operation)
                time.sleep(pace.random() / 50)
                for found, rows in zip(reduced, zip(*map(floats, all_data), strict=True), strict=True):
                    torch.testing.assert_close(found, in_one_process(operation, torch.stack(rows)))
                assert len({row.numpy().tobytes() for row in gather(reduced[0][None])}) == 1
            totals = reduce([own["short"], own["bytes"], own["truths"]], "sum")
            rows = [[data["short"], data["bytes"], data["truths"]] for data in all_data]
            assert torch.equal(totals[0], sum(row[0] for row in rows))
            assert torch.equal(totals[1], sum(row[1] for row in rows))
            assert torch.equal(totals[2], torch.stack([row[2] for row in rows]).any(0))
            sent = broadcast(own, src=call % len(ranks))
            time.sleep(pace.random() / 50)
            assert all(map(torch.equal, leaves(sent), leaves(all_data[call % len(ranks)])))
    return [record.operation for record in records]


def in_one_process(operation: str, rows: torch.Tensor) -> torch.Tensor:
    by_name: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.sum,
        "mean": torch.mean,
        "product": torch.prod,
        "max": torch.amax,
        "min": torch.amin,
    }
    return by_name[operation](rows, 0)


@pytest.mark.parametrize("rank", [None, 1])
def test_large_tensors_arrive_whole_through_memory_and_where_a_process_cannot_share(
    group: Processes, rank: int | None
) -> None:
    for operations in group.run(all_calls_are_right, rank):
        assert ({"all_gather"} == set(operations)) == (rank is None)


def extremes() -> list[list[bool]]:
    rank = PartialState(cpu=True).process_index
    values = torch.zeros(MORE)
    values[rank] = torch.nan
    return [reduce(values, operation)[:3].isnan().tolist() for operation in ("max", "min")]


def test_extremes_of_large_tensors_are_nan_where_any_process_has_nan(two: Processes) -> None:
    assert two.run(extremes) == [[[True, True, False]] * 2] * 2


def mismatched() -> tuple[list[str], list[float]]:
    rank, errors = PartialState(cpu=True).process_index, []
    for sizes in ((MORE, MORE), (MORE, MORE + 1), (MORE, 5), (MORE, MORE), (5, MORE), (MORE, MORE)):
        try:
            found = gather(torch.full((sizes[rank],), float(rank)))
        except ShapeMismatch as error:
            errors.append(error.failure)
    return errors, found.unique().tolist()


def test_the_call_after_one_with_different_shapes_works(two: Processes) -> None:
    for errors, found in two.run(mismatched):
        assert len(errors) == 3
        assert all("different shapes" in error for error in errors)
        assert found == [0.0, 1.0]


def beyond_a_slot() -> list[str]:
    state = PartialState(cpu=True)
    data = torch.full((host_memory._SLOT_BYTES // 4 + 1,), float(state.process_index))
    with recording() as records:
        found = broadcast(data, src=1)
    assert found.unique().tolist() == [1.0]
    return [record.operation for record in records]


def test_tensors_that_are_larger_than_the_memory_are_sent(two: Processes) -> None:
    for operations in two.run(beyond_a_slot):
        assert operations[-1] == "broadcast"


def in_inference_mode() -> list[float]:
    rank = PartialState(cpu=True).process_index
    with torch.inference_mode():
        gather(torch.ones(MORE))
        data = torch.full((MORE,), float(rank))
    broadcast(data, src=1)
    return [*data.unique().tolist(), *gather(data).unique().tolist()]


def test_memory_that_was_mapped_in_inference_mode_serves_outside_of_it(two: Processes) -> None:
    assert two.run(in_inference_mode) == [[1.0, 1.0]] * 2


def offers_of_others() -> list[int]:
    found = []
    with open("/dev/null", "rb") as device:
        read, write = os.pipe()
        # A device, a pipe, a file of another size, and none.
        short = os.memfd_create("short")
        for file in (device.fileno(), read, short, 1 << 20):
            offer = host_memory._Offer("here", os.getpid(), file, "00" * 16)
            found += [host_memory._opened(offer, "here"), host_memory._opened(offer, "there")]
        os.close(short)
        os.close(read)
        os.close(write)
    return found


def test_a_file_without_the_token_is_not_mapped() -> None:
    before = os.listdir("/proc/self/fd")
    assert offers_of_others() == [-1] * 8
    assert os.listdir("/proc/self/fd") == before


def without_addresses() -> list[str]:
    state = PartialState(cpu=True)
    mapped = host_memory.mmap.mmap
    if state.process_index == 1:

        def fail(*arguments: Any) -> Any:
            raise OSError("Cannot allocate memory")

        host_memory.mmap.mmap = fail
    try:
        with recording() as records:
            for _ in range(2):
                records.clear()
                assert gather(torch.ones(MORE)).sum() == MORE * state.num_processes
    finally:
        host_memory.mmap.mmap = mapped
    return [record.operation for record in records]


def test_a_process_that_cannot_map_the_memory_lets_all_send(two: Processes) -> None:
    assert two.run(without_addresses) == [["all_gather"] * 2] * 2


def without_memory() -> list[list[str]]:
    state, seen = PartialState(cpu=True), []
    rank, real = state.process_index, host_memory.os.posix_fallocate

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with recording() as records:
        gather(torch.ones(MORE))
        for size in (MORE, 4 * MORE, 4 * MORE):
            records.clear()
            # The memory of a larger call is missing in one process, until there is some again.
            host_memory.os.posix_fallocate = fail if rank == 1 and len(seen) == 1 else real
            try:
                found = gather(torch.full((size,), float(rank)))
                reduced = reduce(torch.full((size,), float(rank)), "sum")
            finally:
                host_memory.os.posix_fallocate = real
            assert found.view(state.num_processes, -1).unique(dim=1).flatten().tolist() == [0.0, 1.0]
            assert reduced.unique().tolist() == [1.0]
            seen.append([record.operation for record in records])
    return seen


def test_tensors_are_sent_while_a_process_has_no_memory_for_them(two: Processes) -> None:
    shared = ["all_gather"] * 2
    assert two.run(without_memory) == [[shared, ["all_gather", "all_gather", "all_gather", "all_reduce"], shared]] * 2


def in_a_thread_of_each_group() -> list[list[float]]:
    """Two threads of each process use groups of the same processes, whose calls are on their way at once."""
    state = PartialState(cpu=True)
    groups = [torch.distributed.new_group(list(range(state.num_processes))) for _ in range(2)]
    found: list[list[float]] = [[], []]

    def work(number: int) -> None:
        for call in range(10):
            mine = torch.full((MORE + call,), float(10 * number + state.process_index + 100 * call))
            found[number] += gather(mine, group=groups[number]).unique().tolist()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_with_groups_of_their_own_share_different_memory(two: Processes) -> None:
    expected = [
        [float(10 * number + rank + 100 * call) for call in range(10) for rank in range(2)] for number in range(2)
    ]
    assert two.run(in_a_thread_of_each_group) == [expected] * 2


def conjugates() -> list[bool]:
    rank = PartialState(cpu=True).process_index
    values = torch.complex(torch.arange(MORE) * 1.0, torch.full((MORE,), rank + 1.0))
    found = gather([values.conj(), values.conj().imag])
    expected = torch.cat([torch.complex(values.real, torch.full((MORE,), -(other + 1.0))) for other in range(2)])
    return [torch.equal(found[0], expected), torch.equal(found[1], expected.imag)]


def test_conjugate_and_negative_views_arrive_as_their_values(two: Processes) -> None:
    assert two.run(conjugates) == [[True, True]] * 2


def after_an_interrupt() -> list[Any]:
    """One process is interrupted while it reads; the call after that is refused, and the others are whole."""
    rank, results = PartialState(cpu=True).process_index, []
    read = host_memory.HostMemory.read
    for call in range(6):

        def interrupted(memory: Any, whose: int, slot: int, like: Any) -> Any:
            if whose != rank:
                raise KeyboardInterrupt
            return read(memory, whose, slot, like)

        host_memory.HostMemory.read = interrupted if rank == 1 and call % 3 == 1 else read
        try:
            results.append(gather(torch.full((MORE,), float(10 * call + rank))).unique().tolist())
        except (KeyboardInterrupt, ShapeMismatch) as error:
            results.append(type(error).__name__)
        finally:
            host_memory.HostMemory.read = read
    return results


def test_an_interrupt_while_a_process_reads_spoils_no_later_call(two: Processes) -> None:
    whole = [[10.0 * call, 10.0 * call + 1] for call in range(6)]
    refused = ["ShapeMismatch" if call % 3 == 2 else values for call, values in enumerate(whole)]
    interrupted = ["KeyboardInterrupt" if call % 3 == 1 else values for call, values in enumerate(refused)]
    assert two.run(after_an_interrupt) == [refused, interrupted]


def descriptors() -> list[str]:
    PartialState(cpu=True)
    before = set(os.listdir("/proc/self/fd"))
    gather(torch.ones(MORE))
    links = (Path("/proc/self/fd", name) for name in set(os.listdir("/proc/self/fd")) - before)
    return [name for link in links if link.is_symlink() and "memfd" in (name := os.readlink(link))]


def test_a_mapped_file_has_one_descriptor_and_that_of_the_process_one_more(two: Processes) -> None:
    assert list(map(len, two.run(descriptors))) == [3, 3]
