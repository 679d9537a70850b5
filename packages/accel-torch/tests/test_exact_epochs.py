"""Exact epochs: every sample counts once, and gradients are those of one process with all samples of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_state import PartialState
from accel_testing.processes import Processes
from accel_torch import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    PackedDataset,
    TokenBatches,
    TokenBatchSampler,
)


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def group(request: pytest.FixtureRequest, processes: Callable[[int], Processes]) -> Processes:
    return processes(request.param)


def sample(index: int) -> dict[str, Tensor]:
    """A sample of its own length, with values that depend on its index."""
    generator = torch.Generator().manual_seed(index)
    length = 1 + index * 7 % 5
    return {
        "x": torch.randn(length, 3, generator=generator, dtype=torch.float64),
        "index": torch.tensor(index),
        "length": torch.tensor(length),
    }


def length_of(index: int) -> int:
    return 1 + index * 7 % 5


class Samples(torch.utils.data.Dataset[int]):
    """Indices of samples; the collate function makes the samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class OwnStream(IterableDataset[int]):
    """A stream of which each process has a shard of its own length."""

    def __init__(self, counts: Sequence[int], rank: int | None = None) -> None:
        self.counts, self.rank = counts, rank

    def split_by_node(self, rank: int, world: int) -> OwnStream:
        return OwnStream(self.counts, rank)

    def set_epoch(self, epoch: int) -> None:
        """The same samples in each epoch."""

    def __iter__(self) -> Iterator[int]:
        ranks = range(PartialState().num_processes) if self.rank is None else [self.rank]
        for rank in ranks:
            yield from range(100 * rank, 100 * rank + self.counts[rank])


class Custom(BatchSampler):
    """A batch sampler that is not torch's."""


class Stream(IterableDataset[int]):
    """A stream that every process reads."""

    def __init__(self, count: int) -> None:
        self.count = count

    def set_epoch(self, epoch: int) -> None:
        """The same samples in each epoch."""

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)


def collate(indices: list[int]) -> dict[str, Tensor]:
    samples = [sample(int(index)) for index in indices]
    longest = max(len(one["x"]) for one in samples)
    x = torch.stack([nn.functional.pad(one["x"], (0, 0, 0, longest - len(one["x"]))) for one in samples])
    lengths = torch.stack([one["length"] for one in samples])
    return {"x": x, "index": torch.tensor(indices), "length": lengths}


class IndexDicts(Samples):
    """Samples as dicts of tensors, for packing."""

    def __getitem__(self, index: int) -> Any:
        return {"index": torch.full((length_of(index),), index)}


def collate_packed(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return collate(list(chain.from_iterable(item["index"].unique().tolist() for item in items)))


def loader_of(kind: str) -> DataLoader[Any]:
    lengths = [length_of(index) for index in range(23)]
    match kind:
        case "map":
            return DataLoader(Samples(23), batch_size=3, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
        case "workers":
            return DataLoader(Samples(13), batch_size=3, collate_fn=collate, num_workers=1)  # type: ignore[arg-type]
        case "few":
            return DataLoader(Samples(2), batch_size=3, collate_fn=collate)  # type: ignore[arg-type]
        case "custom":
            sampler = Custom(range(22), 3, False)
            return DataLoader(Samples(22), batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
        case "tokens":
            tokens = TokenBatchSampler(lengths, 9)
            return DataLoader(Samples(23), batch_sampler=tokens, collate_fn=collate)  # type: ignore[arg-type]
        case "packed":
            packed = PackedDataset(IndexDicts(23), lengths, 9)  # type: ignore[arg-type]
            return DataLoader(packed, batch_size=1, collate_fn=collate_packed)  # type: ignore[arg-type]
        case "stream":
            return DataLoader(Stream(23), batch_size=3, collate_fn=collate)  # type: ignore[arg-type]
        case "token stream":
            stream = TokenBatches(Stream(23), length_of, 9, buffer=10)
            return DataLoader(stream, batch_size=None, collate_fn=collate)  # type: ignore[arg-type]
        case "own streams":
            # Batches of 3 samples: 5, 9, 12 and 1 of them, the last ones short.
            return DataLoader(OwnStream([14, 25, 36, 2]), batch_size=3, collate_fn=collate)  # type: ignore[arg-type]
        case "late streams":
            return DataLoader(OwnStream([0, 0, 4, 7]), batch_size=3, collate_fn=collate)  # type: ignore[arg-type]
        case _:
            return DataLoader(OwnStream([2, 0, 3, 0]), batch_size=3, collate_fn=collate)  # type: ignore[arg-type]


KINDS = (
    "map",
    "workers",
    "few",
    "custom",
    "tokens",
    "packed",
    "stream",
    "token stream",
    "own streams",
    "late streams",
    "empty streams",
)


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def losses(model: nn.Module, batch: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The loss of each sample: (samples,)."""
    values = model(batch["x"].to(dtype)).squeeze(-1)
    mask = torch.arange(values.shape[1]) < batch["length"][:, None]
    return ((values * mask).sum(1) - batch["index"].to(dtype) / 10) ** 2


def whole(tensor: Tensor) -> Tensor:
    full: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return full.detach().clone()


Case = tuple[str, str, int, torch.dtype, bool, bool]


def accelerator_of(backend: str, steps: int = 1, **options: Any) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10)
    return Accelerator(
        cpu=True,
        backend=backend,
        fsdp_plugin=plugin if backend == "fsdp2" else None,
        gradient_accumulation_steps=steps,
        dataloader_config=DataLoaderConfiguration(exact_epochs=True, use_seedable_sampler=True, data_seed=3),
        **options,
    )


def train(backend: str, kind: str, steps: int, dtype: torch.dtype, in_blocks: bool, clips: bool) -> dict[str, Any]:
    """For each step: the ids of this process's real samples by micro-batch, and the complete gradients."""
    accelerator = accelerator_of(backend, steps)
    plain = model_of(dtype)
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.05))
    loader = accelerator.prepare(loader_of(kind))
    found: list[tuple[list[int], list[Tensor]]] = []
    metric: list[int] = []
    ids: list[int] = []
    for _ in range(2):
        for batch in loader:
            ids += [] if loader.is_stand_in else batch["index"].tolist()
            if in_blocks:
                with accelerator.accumulate(model):
                    accelerator.backward(losses(model, batch, dtype).mean())
                    if accelerator.sync_gradients and clips:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    elif accelerator.sync_gradients:
                        accelerator.unscale_gradients()
            else:
                accelerator.backward(losses(model, batch, dtype).mean())
            metric += accelerator.gather_for_metrics(batch["index"]).tolist()
            if accelerator.sync_gradients:
                found.append((ids, [whole(parameter.grad) for parameter in model.parameters()]))  # type: ignore[arg-type]
                ids = []
            optimizer.step()
            optimizer.zero_grad()
    return {"steps": found, "weights": [whole(one) for one in model.parameters()], "metric": metric}


def reference(steps: list[list[int]], dtype: torch.dtype, clips: bool) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Gradients and final weights of plain torch with all samples of a step in one batch."""
    model = model_of(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    gradients = []
    for ids in steps:
        losses(model, collate(ids), dtype).mean().backward()  # type: ignore[no-untyped-call]
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        gradients.append([whole(parameter.grad) for parameter in model.parameters()])  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    return gradients, [whole(one) for one in model.parameters()]


def expected_ids(kind: str, processes: int) -> list[int]:
    if kind.endswith("streams"):
        counts = {"own streams": [14, 25, 36, 2], "late streams": [0, 0, 4, 7], "empty streams": [2, 0, 3, 0]}[kind]
        return [100 * rank + place for rank in range(processes) for place in range(counts[rank])]
    return list(range({"workers": 13, "few": 2, "custom": 22}.get(kind, 23)))


def check(group: Processes, cases: list[Case]) -> None:
    for case, *results in zip(cases, *group.run(train_all, cases), strict=True):
        _, kind, _, dtype, _, clips = case
        assert len({len(result["steps"]) for result in results}) == 1, case
        steps = [
            list(chain.from_iterable(ids for ids, _ in step))
            for step in zip(*(r["steps"] for r in results), strict=True)
        ]
        everything = sorted(chain.from_iterable(steps))
        assert everything == sorted(2 * expected_ids(kind, len(results))), case
        assert all(sorted(result["metric"]) == everything for result in results), case
        gradients, weights = reference(steps, dtype, clips)
        tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
        for result in results:
            for (_, own), wanted in zip(result["steps"], gradients, strict=True):
                torch.testing.assert_close(own, wanted, **tolerance)
            torch.testing.assert_close(result["weights"], weights, rtol=1e-4, atol=1e-4)


def train_all(cases: list[Case]) -> list[dict[str, Any]]:
    return [train(*case) for case in cases]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_gradients_are_those_of_one_process(group: Processes, backend: str, kind: str) -> None:
    if kind == "late streams" and group.count < 3:
        pytest.skip("no process has data")
    backend = "single" if group.count == 1 else backend
    double = torch.float64
    check(
        group,
        [
            (backend, kind, 1, double, False, False),
            (backend, kind, 1, double, True, True),
            (backend, kind, 3, double, True, False),
            (backend, kind, 2, double, True, True),
            (backend, kind, 2, torch.float32, True, False),
            (backend, kind, 1, torch.float32, False, False),
        ],
    )
