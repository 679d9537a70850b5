"""Batches limited by their tokens: alone in plain torch, and prepared for several processes."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel_data import TokenBatchSampler, prepare_data_loader
from accel_data.token_plan import plan_steps
from accel_state import PartialState
from accel_state.errors import DataError, SettingError
from accel_testing.processes import Processes
from accel_testing.profiling import count_calls

LIMIT = 8192


def lognormal(count: int, seed: int = 0) -> Tensor:
    """Lengths with a median of 300 and a sigma of 1."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, generator=generator, dtype=torch.float64) + math.log(300)
    return drawn.exp().long().clamp(1, LIMIT)


def tokens_in(lengths: Sequence[int], padded: bool) -> int:
    return len(lengths) * max(lengths) if padded else sum(lengths)


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def shards(sampler: TokenBatchSampler, count: int, processes: int, epochs: int = 1) -> list[list[list[list[int]]]]:
    """By process and epoch, the batches of prepared loaders."""
    result = []
    for index in range(processes):
        plain: Any = DataLoader(range(count), batch_sampler=sampler, collate_fn=as_list)  # type: ignore[arg-type]
        loader = prepare_data_loader(plain, num_processes=processes, process_index=index)
        result.append([list(loader) for _ in range(epochs)])
    return result


@pytest.mark.parametrize("padded", [True, False])
def test_alone_every_sample_is_in_one_batch_of_at_most_the_limit(padded: bool) -> None:
    lengths = lognormal(3000).tolist()
    sampler = TokenBatchSampler(lengths, LIMIT, padded=padded)
    loader: Any = DataLoader(range(3000), batch_sampler=sampler, collate_fn=as_list)  # type: ignore[arg-type]
    epochs = [list(loader) for _ in range(2)]
    for batches in epochs:
        assert len(batches) == len(sampler) == len(loader)
        assert sorted(chain.from_iterable(batches)) == list(range(3000))
        assert max(tokens_in([lengths[index] for index in batch], padded) for batch in batches) <= LIMIT
    assert epochs[0] != epochs[1]
    assert {frozenset(batch) for batch in epochs[0]} != {frozenset(batch) for batch in epochs[1]}


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda values: torch.tensor(values).numpy()])
def test_the_order_depends_on_seed_and_epoch_only(kind: Callable[[list[int]], Any]) -> None:
    lengths = lognormal(500).tolist()
    torch.manual_seed(1)
    first = TokenBatchSampler(lengths, LIMIT)
    first.set_epoch(3)
    torch.manual_seed(2)
    again = TokenBatchSampler(kind(lengths), LIMIT)
    again.set_epoch(3)
    batches = list(first)
    assert batches == list(again)
    other = TokenBatchSampler(lengths, LIMIT, seed=1)
    other.set_epoch(3)
    assert batches != list(other)
    assert list(TokenBatchSampler(lengths, LIMIT, shuffle=False)) == list(
        TokenBatchSampler(lengths, LIMIT, shuffle=False, seed=5)
    )


def test_unshuffled_steps_begin_with_the_most_tokens() -> None:
    lengths = lognormal(500).tolist()
    batches = list(TokenBatchSampler(lengths, LIMIT, shuffle=False, cost=len))
    assert [len(batch) for batch in batches] == sorted(map(len, batches), reverse=True)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("processes", [2, 3, 4, 16, 64])
def test_the_batches_of_a_step_cost_nearly_the_same(processes: int, padded: bool) -> None:
    count = 50 * processes * LIMIT // 495
    lengths = lognormal(count, processes).tolist()
    sampler = TokenBatchSampler(lengths, LIMIT, padded=padded)
    steps = list(sampler.steps(processes))
    assert len(steps) == sampler.steps_on(processes) >= 48
    assert sorted(chain.from_iterable(chain.from_iterable(steps))) == list(range(count))
    used = 0
    for step in steps:
        tokens = [tokens_in([lengths[index] for index in batch], padded) for batch in step]
        assert max(tokens) <= LIMIT
        assert max(tokens) * processes <= 1.05 * sum(tokens)
        used += sum(tokens)
    # Padding, of all tokens.
    assert 1 - sum(lengths) / used <= (0.05 if padded else 0)
    # No process always has the largest batch.
    largest = {max(range(processes), key=lambda index: len(step[index])) for step in steps}
    assert len(largest) > min(processes, 10) / 2


def test_other_costs_are_balanced_as_far_as_lengths_permit() -> None:
    lengths = lognormal(50_000).tolist()
    worst: dict[Any, float] = {}
    for cost in ("tokens", "attention"):
        sampler = TokenBatchSampler(lengths, LIMIT, padded=False, cost=cost)
        spreads = []
        for step in sampler.steps(8):
            squares = [sum(lengths[index] ** 2 for index in batch) for batch in step]
            spreads.append(max(squares) * 8 / sum(squares))
        worst[cost] = max(spreads)
    assert worst["attention"] < 1.2 < worst["tokens"]
    called: list[Sequence[int]] = []

    def constant(own: Sequence[int]) -> float:
        called.append(own)
        return 1.0

    TokenBatchSampler(lengths[:50], LIMIT, cost=constant).steps_on(2)
    assert sum(map(len, called)) == 50


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_prepared_loaders_take_equally_many_steps_without_repeated_samples(processes: int) -> None:
    lengths = lognormal(700).tolist()
    found = shards(TokenBatchSampler(lengths, LIMIT), 700, processes, epochs=2)
    for epoch in range(2):
        assert len({len(epochs[epoch]) for epochs in found}) == 1
        assert sorted(index for epochs in found for batch in epochs[epoch] for index in batch) == list(range(700))
    assert found[0][0] != found[0][1]


def test_few_samples_are_split_or_refused() -> None:
    sampler = TokenBatchSampler([4, 4, 4, 4, 4], 8)
    found = shards(sampler, 5, 4)
    assert [[len(batch) for batch in epochs[0]] for epochs in found] != [[2]] * 4
    assert sorted(index for epochs in found for batch in epochs[0] for index in batch) == list(range(5))
    with pytest.raises(DataError, match="fewer samples than places in the last step"):
        shards(TokenBatchSampler([8] * 5, 8), 5, 4)
    dropped = shards(TokenBatchSampler([8] * 5, 8, drop_last=True), 5, 4)
    assert [[len(batch) for batch in epochs[0]] for epochs in dropped] == [[1]] * 4
    for lengths in ([], [8] * 3):
        too_few = shards(TokenBatchSampler(lengths, 8, drop_last=True), len(lengths), 4)
        assert [epochs[0] for epochs in too_few] == [[]] * 4


def test_bad_arguments_are_named() -> None:
    with pytest.raises(SettingError, match="Sample 2 has a length of 9"):
        TokenBatchSampler([1, 8, 9], 8)
    with pytest.raises(SettingError, match="Sample 0 has a length of -1"):
        TokenBatchSampler([-1], 8)
    for limit in (0, 8.5, "8"):
        with pytest.raises(SettingError, match=f"max_tokens={limit!r}"):
            TokenBatchSampler([1], limit)  # type: ignore[arg-type]
    for lengths in ([1.5], [[1]], ["a"], None, (length for length in [1])):
        with pytest.raises(SettingError, match="one integer for each sample"):
            TokenBatchSampler(lengths, 8)
    with pytest.raises(SettingError, match="cost='token'"):
        TokenBatchSampler([1], 8, cost="token")  # type: ignore[arg-type]


def test_an_interrupted_sampler_continues() -> None:
    lengths = lognormal(700).tolist()
    whole = list(TokenBatchSampler(lengths, LIMIT))
    sampler = TokenBatchSampler(lengths, LIMIT)
    batches = iter(sampler)
    begun = [next(batches) for _ in range(20)]
    other = TokenBatchSampler(lengths, LIMIT)
    other.load_state_dict(sampler.state_dict())
    rest = list(other)
    assert begun + rest == whole
    assert len(list(other)) == len(whole)


def resumed(lengths: list[int], worlds: Sequence[tuple[int, int]], padded: bool, **options: Any) -> list[int]:
    """The ids that are read when the number of processes changes after a number of steps, in one epoch."""
    ids: list[int] = []
    state: Any = None
    for processes, steps in worlds:
        states = []
        for index in range(processes):
            sampler = TokenBatchSampler(lengths, 1024, padded=padded)
            plain: Any = DataLoader(range(len(lengths)), batch_sampler=sampler, collate_fn=as_list)  # type: ignore[arg-type]
            loader: Any = prepare_data_loader(
                plain, num_processes=processes, process_index=index, restore_position=True, **options
            )
            if state is not None:
                loader.load_state_dict(state)
            for number, batch in enumerate(loader, 1):
                ids += [] if loader.is_stand_in else batch
                if number == steps:
                    states.append(loader._state())
                    break
        state = states[0] if states else None
    return ids


@pytest.mark.parametrize("exact_epochs", [False, True])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("worlds", [[(4, 5), (2, 7), (3, 0)], [(2, 3), (2, 4), (4, 1), (1, 0)]])
def test_a_run_resumes_on_other_numbers_of_processes(
    worlds: list[tuple[int, int]], padded: bool, exact_epochs: bool
) -> None:
    lengths = lognormal(300).clamp(max=1024).tolist()
    assert sorted(resumed(lengths, worlds, padded, exact_epochs=exact_epochs)) == list(range(300))


def ids_of_epochs(count: int) -> list[list[int]]:
    state = PartialState(cpu=True)
    torch.manual_seed(state.process_index)
    sampler = TokenBatchSampler(lognormal(count), LIMIT)
    loader: Any = prepare_data_loader(
        DataLoader(range(count), batch_sampler=sampler, collate_fn=as_list, num_workers=2)  # type: ignore[arg-type]
    )
    return [list(chain.from_iterable(loader)) for _ in range(2)]


def test_real_processes_with_workers_share_an_epoch(two: Processes) -> None:
    for epoch in zip(*two.run(ids_of_epochs, 400), strict=True):
        assert sorted(chain.from_iterable(epoch)) == list(range(400))


@pytest.mark.parametrize("padded", [True, False])
def test_planning_grows_linearly(padded: bool) -> None:
    def plan(count: int) -> Callable[[], object]:
        lengths = lognormal(count)
        return lambda: next(TokenBatchSampler(lengths, LIMIT, padded=padded).steps(8))

    plan(100)()
    small, large = count_calls(plan(20_000)), count_calls(plan(80_000))
    assert small < large <= 4.5 * small
    peaks = []
    for count in (20_000, 80_000):
        work = plan(count)
        tracemalloc.start()
        try:
            work()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[0] < peaks[1] <= 4.5 * peaks[0]


def test_an_epoch_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        planned.append(1)
        return plan_steps(*args, **options)

    monkeypatch.setattr("accel_data.token_batches.plan_steps", counted)
    sampler = TokenBatchSampler(lognormal(300), LIMIT)
    loader: Any = prepare_data_loader(
        DataLoader(range(300), batch_sampler=sampler, collate_fn=as_list),  # type: ignore[arg-type]
        num_processes=2,
        process_index=1,
    )
    for _ in range(2):
        assert len(loader) == len(list(loader))
    assert len(planned) == 1


_PEAK = """
import math, sys, torch
from accel_data import TokenBatchSampler
lengths = (torch.randn(1_000_000, dtype=torch.float64) + math.log(300)).exp().long().clamp(1, 8192)
# The peak of getrusage includes that of the process which started this one.
def peak(): return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
next(TokenBatchSampler(lengths[:1000], 8192, padded=sys.argv[1] == "True").steps(8))
before = peak()
next(TokenBatchSampler(lengths, 8192, padded=sys.argv[1] == "True").steps(8))
print((peak() - before) / 1e6)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process alone")
@pytest.mark.parametrize("padded", [True, False])
def test_planning_a_million_lengths_takes_less_than_200_megabytes(padded: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(padded)], capture_output=True, text=True, timeout=120, check=True
    )
    assert 0 < float(done.stdout) < 200
