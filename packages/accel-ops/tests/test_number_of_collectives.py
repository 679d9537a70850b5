"""How many collectives one call starts, and how many bytes they carry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_ops import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    scatter,
    synchronize_rng_states,
)
from accel_ops.checked_call import PACKED_BYTES
from accel_ops.reduction import REDUCED_PACKED_BYTES
from accel_state import PartialState
from accel_state.protocol.header import HEADER_BYTES, eager_header_bytes
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_testing.recording_transport import recording

HEADER = ("all_gather", eager_header_bytes(2))
MANY_SMALL = 3 * 48_000


def small() -> dict[str, torch.Tensor]:
    return {f"leaf{index}": torch.ones(8, 16) for index in range(64)}


def beyond_the_header() -> list[torch.Tensor]:
    return [torch.ones(12_000) for _ in range(3)]


def large(count: int) -> list[torch.Tensor]:
    return [torch.ones(PACKED_BYTES // 4 + 1) for _ in range(count)]


def mixed() -> dict[str, Any]:
    return {
        "small": small(),
        "beyond": beyond_the_header(),
        "large": large(2),
        "numbers": torch.ones(2, dtype=torch.int64),
    }


def four_dtypes(of_each: int = 1) -> list[torch.Tensor]:
    dtypes = (torch.float32, torch.float64, torch.half, torch.complex64)
    return [torch.ones(12_000, dtype=dtype) for dtype in dtypes for _ in range(of_each)]


def records_of(name: str) -> list[tuple[str, int]]:
    """What a call starts."""
    PartialState(cpu=True)
    with recording() as records:
        CALLS[name]()
    return [(record.operation, record.nbytes) for record in records]


PACKED = 64 * 512 + MANY_SMALL
CALLS: dict[str, Any] = {
    "gather small": lambda: gather(small()),
    "gather four dtypes": lambda: gather([torch.ones(3, dtype=d) for d in (torch.bool, torch.half, torch.int64)]),
    "gather nothing": lambda: gather({}),
    "gather beyond the header": lambda: gather(beyond_the_header()),
    "gather large": lambda: gather(large(3)),
    "gather at the limit": lambda: gather(torch.ones(PACKED_BYTES // 4)),
    "gather mixed": lambda: gather(mixed()),
    "gather to one": lambda: gather(mixed(), dst=1),
    "reduce small": lambda: reduce(small()),
    "reduce beyond the header": lambda: reduce(beyond_the_header()),
    "reduce mixed": lambda: reduce(mixed(), "sum"),
    "reduce large": lambda: reduce(large(3)),
    "reduce beyond the limit": lambda: reduce([torch.ones(REDUCED_PACKED_BYTES // 4 + extra) for extra in range(4)]),
    "reduce four dtypes beyond the header": lambda: reduce(four_dtypes()),
    "broadcast small": lambda: broadcast(small()),
    "broadcast mixed": lambda: broadcast(mixed()),
    "pad": lambda: pad_across_processes(mixed()),
    "gather objects": lambda: gather_object(["x" * 10_000]),
    "gather long objects": lambda: gather_object(["x" * 100_000]),
    "broadcast objects": lambda: broadcast_object_list(["x" * 10_000]),
    "broadcast long objects": lambda: broadcast_object_list(["x" * 100_000]),
    "scatter": lambda: scatter(mixed()["small"]),
    "synchronise generators": lambda: synchronize_rng_states(["torch", "numpy", "python"]),
}

EXPECTED = {
    "gather small": ["all_gather"],
    "gather four dtypes": ["all_gather"],
    "gather nothing": ["all_gather"],
    "gather beyond the header": ["all_gather"] * 2,
    "gather large": ["all_gather"] * 4,
    "gather at the limit": ["all_gather"] * 2,
    "gather mixed": ["all_gather"] * 4,
    "gather to one": ["all_gather", "gather", "gather", "gather"],
    "reduce small": ["all_gather"],
    "reduce beyond the header": ["all_gather", "all_reduce"],
    "reduce mixed": ["all_gather"] * 2,
    "reduce large": ["all_gather", "all_reduce"],
    "reduce beyond the limit": ["all_gather"] + ["all_reduce"] * 4,
    "reduce four dtypes beyond the header": ["all_gather"] * 2,
    "broadcast small": ["all_gather"],
    "broadcast mixed": ["all_gather"] + ["broadcast"] * 3,
    "pad": ["all_gather"],
    "gather objects": ["all_gather"],
    "gather long objects": ["all_gather"] * 2,
    "broadcast objects": ["all_gather"],
    "broadcast long objects": ["all_gather", "broadcast"],
    "scatter": ["all_gather", "scatter"],
    "synchronise generators": ["all_gather"],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_starts_no_more_collectives_than_it_needs(two: Processes, name: str) -> None:
    for records in two.run(records_of, name):
        assert [operation for operation, _ in records] == EXPECTED[name]
        assert records[0] == HEADER


def test_the_bytes_sent_are_those_of_the_data(two: Processes) -> None:
    for records in two.run(records_of, "gather mixed"):
        *each, packed = [nbytes for _, nbytes in records[1:]]
        assert each == [PACKED_BYTES + 4] * 2
        assert PACKED + 16 <= packed <= PACKED + 2 * 16
    for records in two.run(records_of, "gather beyond the header"):
        assert records[1][1] == MANY_SMALL


def reduced_beyond_8_mib() -> list[str]:
    """Reduce many small tensors of four dtypes, too many for every process to add up those of all."""
    PartialState(cpu=True)
    data = four_dtypes(of_each=20)
    assert sum(tensor.nbytes for tensor in data) > 4 * 2**20
    with recording() as records:
        sums = reduce(data, "sum")
    assert all(torch.equal(total, tensor * 2) for total, tensor in zip(sums, data, strict=True))
    assert [total.dtype for total in sums] == [tensor.dtype for tensor in data]
    return [record.operation for record in records]


def test_reduce_of_large_rows_starts_one_all_reduce_a_dtype(two: Processes) -> None:
    assert two.run(reduced_beyond_8_mib) == [["all_gather"] + ["all_reduce"] * 4] * 2


def test_the_second_call_starts_the_same_collectives_as_the_first(two: Processes) -> None:
    for first, second in two.run(first_and_second):
        assert first == second == [HEADER]


def first_and_second() -> tuple[Any, Any]:
    PartialState(cpu=True)
    found = []
    for _ in range(2):
        with recording() as records:
            gather(small())
        found.append([tuple(record) for record in records])
    return found[0], found[1]


def fits_exactly(extra: int) -> int:
    PartialState(cpu=True)
    with recording() as records:
        gather(torch.ones(eager_header_bytes(2) - HEADER_BYTES + extra, dtype=torch.uint8))
    return len(records)


def test_the_eager_header_is_used_to_its_last_byte(two: Processes) -> None:
    assert two.run(fits_exactly, 0) == [1, 1]
    assert two.run(fits_exactly, 1) == [2, 2]


def alone() -> int:
    PartialState(cpu=True)
    with recording() as records:
        data = small()
        assert gather(data) is data
        assert broadcast(data) is data
        assert reduce(data) is data
        assert scatter(data) is data
        assert gather_object([1]) == [1]
        pad_across_processes(data)
    return len(records)


def test_one_process_starts_no_collectives_and_copies_nothing() -> None:
    with fresh():
        assert alone() == 0


def calls_of_1024() -> list[Any]:
    torch.distributed.init_process_group("fake", rank=3, world_size=1024, store=FakeStore())
    PartialState(cpu=True)
    with recording() as records:
        gather(small())
        gather([torch.ones(100)])
        reduce([torch.ones(100)], "sum")
        gather(large(2))
    return records


def test_a_world_of_1024_has_headers_of_1_kib_and_the_same_number_of_collectives() -> None:
    """What a rank receives in each call is 1 MiB of eager headers."""
    assert eager_header_bytes(1024) == 1024
    with fresh():
        records = calls_of_1024()
    header = ("all_gather", 1024)
    packed = ("all_gather", 64 * 8 * 16 * 4)
    each = ("all_gather", PACKED_BYTES + 4)
    assert records == [header, packed, header, header, header, each, each]
