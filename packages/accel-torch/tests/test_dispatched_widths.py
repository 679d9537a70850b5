"""Dispatched batches whose samples have a different width in each batch, as a collate function pads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from accel_data import DataLoaderConfiguration
from accel_testing.processes import Processes
from accel_torch import Accelerator

pytestmark = pytest.mark.usefixtures("fresh_state")


def texts(widths: list[int]) -> list[torch.Tensor]:
    """Texts of some widths; each has its number, from 1, in all places."""
    return [torch.full((width,), number) for number, width in enumerate(widths, 1)]


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True)


def nested(samples: list[torch.Tensor]) -> dict[str, Any]:
    text = padded(samples)
    lengths = torch.tensor([len(sample) for sample in samples])
    return {"x": (text, [text > 0]), "length": lengths, "names": [f"text {sample[0].item()}" for sample in samples]}


COLLATES: dict[str, Callable[[list[torch.Tensor]], Any]] = {"tensors": padded, "nested": nested}


def numbers(batch: Any) -> torch.Tensor:
    text = batch["x"][0] if isinstance(batch, dict) else batch
    if isinstance(batch, dict):
        assert batch["x"][1][0].shape == text.shape
        assert batch["length"].tolist() == [int((row > 0).sum()) for row in text]
        assert batch["names"] == [f"text {row[0].item()}" for row in text]
    return text[:, 0].contiguous()


def dispatched(
    cases: list[tuple[list[int], int, bool, str, bool]],
) -> list[tuple[list[int], list[tuple[int, ...]]]]:
    """For each case the gathered numbers of samples, and the shapes of this process's batches."""
    seen = []
    for widths, size, split, collate, stream in cases:
        configuration = DataLoaderConfiguration(dispatch_batches=True, split_batches=split)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        samples: Any = Stream(texts(widths)) if stream else texts(widths)
        loader = accelerator.prepare(DataLoader(samples, batch_size=size, collate_fn=COLLATES[collate]))
        found: list[int] = []
        shapes: list[tuple[int, ...]] = []
        for batch in loader:
            rows = numbers(batch)
            found += accelerator.gather_for_metrics(rows).tolist()
            shapes.append(tuple((batch["x"][0] if isinstance(batch, dict) else batch).shape))
        seen.append((found, shapes))
    return seen


WIDTHS = [
    [3, 3, 5, 5, 2],
    [3, 3, 5, 5, 2, 2, 7],
    [1, 2, 3, 4, 5, 6, 7, 8, 9],
    [4, 4, 4, 4, 2, 3],
    [2],
    [3, 3, 3, 3, 3],
]


@pytest.mark.parametrize("collate", COLLATES)
@pytest.mark.parametrize("world", ["one", "two", "three"])
def test_each_sample_is_seen_once(world: str, collate: str, request: pytest.FixtureRequest) -> None:
    processes: Processes = request.getfixturevalue(world)
    count = {"one": 1, "two": 2, "three": 3}[world]
    cases = [
        (widths, size, False, collate, stream) for widths in WIDTHS for size in (1, 2, 4) for stream in (False, True)
    ]
    cases += [(widths, size * count, True, collate, False) for widths in WIDTHS for size in (1, 2)]
    for ranks in zip(*processes.run(dispatched, cases), cases, strict=True):
        *results, (widths, _, _, _, _) = ranks
        case = ranks[-1]
        for found, shapes in results:
            assert sorted(found) == list(range(1, len(widths) + 1)), case
            assert [rows for rows, *_ in shapes] == [rows for rows, *_ in results[0][1]], case


def test_an_incomplete_step_is_completed_from_itself(three: Processes) -> None:
    # In the second step there are two batches for three processes, the last one with a sample less.
    cases = [([2, 2, 3, 3, 4, 4, 5, 5, 6], 2, False, "tensors", False)]
    for rank, ((found, shapes),) in enumerate(three.run(dispatched, cases)):
        assert found == list(range(1, 10))
        assert shapes == [(2, 2 + rank), (2, (5, 6, 6)[rank])]


def unequal_sizes(sampler: list[list[int]]) -> tuple[list[int], list[int]]:
    """The gathered numbers of samples, and the sizes of this process's batches."""
    configuration = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    loader = accelerator.prepare(DataLoader(texts([2, 3, 3, 4, 4, 4]), batch_sampler=sampler, collate_fn=padded))
    found: list[int] = []
    sizes = []
    for batch in loader:
        sizes.append(len(batch))
        found += accelerator.gather_for_metrics(numbers(batch)).tolist()
    return found, sizes


@pytest.mark.parametrize("sampler", [[[0], [1, 2]], [[0], [1, 2], [3, 4], [5]], [[0, 1], [2, 3, 4], [5]]])
def test_batches_of_different_sizes_and_widths_are_completed(two: Processes, sampler: list[list[int]]) -> None:
    samples = sum(map(len, sampler))
    (first, sizes), (second, others) = two.run(unequal_sizes, sampler)
    assert first == second == list(range(1, samples + 1))
    assert sizes == others


def resumed_in_the_middle() -> list[int]:
    configuration = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    loader = accelerator.prepare(DataLoader(texts([2, 2, 3, 3, 4]), batch_size=2, collate_fn=padded))
    rest = accelerator.skip_first_batches(loader, 1)
    return [number for batch in rest for number in accelerator.gather_for_metrics(numbers(batch)).tolist()]


def test_the_rest_of_an_epoch_is_completed_too(two: Processes) -> None:
    assert two.run(resumed_in_the_middle) == [[5]] * 2
