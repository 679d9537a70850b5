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
from accel_state.errors import Conflict
from accel_testing.processes import Processes
from accel_testing.recording_transport import recording
from accel_torch import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    PackedDataset,
    ParallelismConfig,
    TokenBatches,
    TokenBatchSampler,
    TorchTensorParallelPlugin,
    gather,
)


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
    return collate(list(chain.from_iterable(sorted(set(item["index"].tolist())) for item in items)))


def loader_of(kind: str, count: int = 23) -> DataLoader[Any]:
    lengths = [length_of(index) for index in range(count)]
    options: dict[str, Any] = {"batch_size": 3, "collate_fn": collate}
    # Of the own streams, the processes have 5, 9, 12 and 1 batches, the last ones short.
    chosen: tuple[Any, dict[str, Any]] = {
        "map": (Samples(count), options | {"shuffle": True}),
        "workers": (Samples(13), options | {"num_workers": 1}),
        "few": (Samples(2), options),
        "custom": (Samples(22), {"batch_sampler": Custom(range(22), 3, False), "collate_fn": collate}),
        "tokens": (Samples(count), {"batch_sampler": TokenBatchSampler(lengths, 9), "collate_fn": collate}),
        "packed": (PackedDataset(IndexDicts(count), lengths, 9), {"collate_fn": collate_packed}),  # type: ignore[arg-type]
        "stream": (Stream(23), options),
        "token stream": (TokenBatches(Stream(23), length_of, 9, buffer=10), options | {"batch_size": None}),
        **{name: (OwnStream(counts), options) for name, counts in OWN_COUNTS.items()},
    }[kind]
    return DataLoader(chosen[0], **chosen[1])


OWN_COUNTS = {"own streams": [14, 25, 36, 2], "late streams": [0, 0, 4, 7], "empty streams": [2, 0, 3, 0]}

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
    errors: Tensor = (values * mask).sum(1) - batch["index"].to(dtype) / 10
    return errors.square()


def whole(tensor: Tensor) -> Tensor:
    full: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return full.detach().clone()


Case = tuple[str, str, int, torch.dtype, bool, bool]


AXES = {
    "tp": {"tp_size": 2},
    "tp of four": {"tp_size": 4},
    "fsdp2 x tp": {"dp_shard_size": 2, "tp_size": 2},
}


def accelerator_of(backend: str, steps: int = 1, **options: Any) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10)
    if backend in AXES:
        options["parallelism_config"] = ParallelismConfig(**AXES[backend])
        options["torch_tp_plugin"] = TorchTensorParallelPlugin(parallelize_plan={"0": "colwise", "2": "rowwise"})
    else:
        options["backend"] = backend
    return Accelerator(
        cpu=True,
        fsdp_plugin=plugin if "fsdp2" in backend else None,
        gradient_accumulation_steps=steps,
        dataloader_config=DataLoaderConfiguration(exact_epochs=True, use_seedable_sampler=True, data_seed=3),
        **options,
    )


def train(backend: str, kind: str, steps: int, dtype: torch.dtype, in_blocks: bool, clips: bool) -> dict[str, Any]:
    """For each step: the ids of this process's real samples by micro-batch, and the complete gradients."""
    accelerator = accelerator_of(backend, steps)
    plain = model_of(dtype)
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.05))
    loader: Any = accelerator.prepare(loader_of(kind))
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
    if counts := OWN_COUNTS.get(kind):
        return [100 * rank + place for rank in range(processes) for place in range(counts[rank])]
    return list(range({"workers": 13, "few": 2, "custom": 22}.get(kind, 23)))


def check(group: Processes, cases: list[Case], readers: int = 1) -> None:
    """Compare with one process; `readers` neighbours read the same samples."""
    for case, *results in zip(cases, *group.run(train_all, cases)[::readers], strict=True):
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
        tolerance = 1e-9 if dtype == torch.float64 else 1e-5
        for result in results:
            for (_, own), wanted in zip(result["steps"], gradients, strict=True):
                torch.testing.assert_close(own, wanted, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(result["weights"], weights, rtol=1e-4, atol=1e-4)


def train_all(cases: list[Case]) -> list[dict[str, Any]]:
    return [train(*case) for case in cases]


# How samples are divided does not depend on the backend. Two processes are the case of an even number once more.
RUNS = [
    *((1, "single"), (3, "fsdp2"), (4, "ddp")),
    *(pytest.param(*run, marks=pytest.mark.slow) for run in ((2, "ddp"), (2, "fsdp2"), (3, "ddp"), (4, "fsdp2"))),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "backend"), RUNS)
def test_gradients_are_those_of_one_process(
    processes: Callable[[int], Processes], count: int, backend: str, kind: str
) -> None:
    if kind == "late streams" and count < 3:
        pytest.skip("no process has data")
    double = torch.float64
    check(
        processes(count),
        [
            (backend, kind, 1, double, False, False),
            (backend, kind, 3, double, True, False),
            (backend, kind, 2, double, True, True),
            (backend, kind, 2, torch.float32, True, False),
        ],
    )


@pytest.mark.parametrize(
    ("backend", "count"), [("tp", 2), pytest.param("tp of four", 4, marks=pytest.mark.slow), ("fsdp2 x tp", 4)]
)
def test_processes_of_a_tensor_parallel_group_count_each_sample_once(
    backend: str, count: int, processes: Callable[[int], Processes]
) -> None:
    ways = [(1, False, False), (2, True, True)]
    # Alone in its group of readers, a stream is not divided.
    kinds = [kind for kind in KINDS if kind not in (OWN_COUNTS if backend.startswith("tp") else ("late streams",))]
    cases = [(backend, kind, steps, torch.float64, block, clips) for kind in kinds for steps, block, clips in ways]
    check(processes(count), cases, 4 if backend == "tp of four" else 2)


class Draws(nn.Module):
    """A model with buffers, random draws, and outputs that are infinite for some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.layer(self.norm(nn.functional.dropout(x, 0.5)))
        return values


def steps_with_stand_ins(backend: str, folder: str) -> list[dict[str, Any]]:
    """What stand-ins leave behind: for each step of streams with 2, 0 and 3 batches."""
    accelerator = accelerator_of(backend)
    torch.manual_seed(accelerator.process_index)
    plain = Draws()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    stream = OwnStream([2, 0, 3])
    loader: Any = accelerator.prepare(DataLoader(stream, batch_size=1))
    found: list[dict[str, Any]] = []

    def state() -> list[Tensor]:
        return [torch.get_rng_state(), *(whole(buffer).float() for buffer in plain.buffers())]

    saved: list[Tensor] = []
    for batch in loader:
        if found:
            found[-1]["after"] = state()
        before, is_stand_in = state(), loader.is_stand_in
        outputs = model(torch.full((4, 3), float(batch[0])) + torch.randn(4, 3))
        inside = state()
        loss = outputs.mean() * (torch.inf if is_stand_in else 1)
        accelerator.backward(loss)
        gradients = [whole(parameter.grad) for parameter in model.parameters()]  # type: ignore[arg-type]
        if len(found) == 1:
            accelerator.save_state(folder)
            saved = state()
        optimizer.step()
        optimizer.zero_grad()
        found.append({"before": before, "inside": inside, "stand_in": is_stand_in, "gradients": gradients})
    found[-1]["after"] = state()
    found[1]["saved"] = saved
    return found


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_stand_ins_leave_nothing_behind(three: Processes, backend: str, tmp_path: Any) -> None:
    results = three.run(steps_with_stand_ins, backend, str(tmp_path / "checkpoint"))
    assert [[step["stand_in"] for step in result] for result in results] == [
        [False, False, True],
        [True, True, True],
        [False, False, False],
    ]
    for rank, result in enumerate(results):
        for step in result:
            assert all(gradient.isfinite().all() for gradient in step["gradients"])
            assert not torch.equal(step["before"][0], step["inside"][0])
            if step["stand_in"]:
                assert torch.equal(step["before"][0], step["after"][0])
        if rank == 1:
            assert torch.equal(result[1]["saved"][0], result[1]["before"][0])
            if backend == "fsdp2":
                # Its buffers never saw a sample.
                torch.testing.assert_close(result[-1]["after"][1:], result[0]["before"][1:])
    if backend == "ddp":
        # All go on with the statistics of a process with data.
        for step in (results[0][-1], results[1][-1]):
            torch.testing.assert_close(step["after"][1:], results[2][-1]["after"][1:])
        assert int(results[0][-1]["after"][3]) == 3


class Communicates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = gather(self.layer(x))
        return values


def refusals() -> list[str]:
    texts = []
    accelerator = accelerator_of("ddp")
    with pytest.raises(Conflict) as caught:
        accelerator.prepare(nn.Sequential(nn.SyncBatchNorm(3)))
    texts.append(str(caught.value))
    plain: Any = DataLoader(torch.ones(6, 3), batch_size=2)  # type: ignore[arg-type]
    model, loader = accelerator.prepare(Communicates(), plain)
    with pytest.raises(Conflict) as caught:
        model(next(iter(loader)))
    texts.append(str(caught.value))
    return texts


def test_forwards_that_communicate_are_refused(two: Processes) -> None:
    for norm, forward in two.run(refusals):
        assert "The module '0' of Sequential is a SyncBatchNorm" in norm
        assert "calls a collective, which would mix the stand-ins" in forward
    with pytest.raises(Conflict, match="Cannot combine exact_epochs=True"):
        DataLoaderConfiguration(exact_epochs=True, dispatch_batches=True)


def weighted(kind: str) -> tuple[list[int], list[Tensor]]:
    """Ids of real samples, and gradients of one window in which samples weigh as much as their length."""
    accelerator = accelerator_of("ddp", 4)
    plain = model_of(torch.float64)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    loader: Any = accelerator.prepare(loader_of(kind))
    ids: list[int] = []
    for batch in loader:
        ids += [] if loader.is_stand_in else batch["index"].tolist()
        weights = batch["length"]
        with accelerator.accumulate(model, weight=weights.sum(), loss_reduction="sum"):
            accelerator.backward((losses(model, batch, torch.float64) * weights).sum())
            if accelerator.sync_gradients:
                accelerator.unscale_gradients()
                return ids, [whole(parameter.grad) for parameter in model.parameters()]  # type: ignore[arg-type]
            optimizer.step()
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["custom", "own streams", "empty streams"])
def test_weights_of_a_script_are_zero_for_stand_ins(two: Processes, kind: str) -> None:
    results = two.run(weighted, kind)
    model = model_of(torch.float64)
    batch = collate([index for ids, _ in results for index in ids])
    weights = batch["length"]
    (losses(model, batch, torch.float64) @ weights.double() / weights.sum()).backward()  # type: ignore[no-untyped-call]
    for _, gradients in results:
        wanted = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-9)


def beside_an_open_iterator(steps: int) -> list[tuple[list[int], list[Tensor]]]:
    """Ids and gradients of each step, while an iterator over other data is advanced by hand."""
    accelerator = accelerator_of("ddp", steps)
    plain = model_of(torch.float64)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.0))
    loader, validation = accelerator.prepare(loader_of("map"), loader_of("custom"))
    held = iter(validation)
    answers: list[tuple[list[int], list[Tensor]]] = []
    ids: list[int] = []
    for batch in loader:
        if ids or answers:
            next(held)
        with accelerator.accumulate(model):
            ids += [] if loader.is_stand_in else batch["index"].tolist()
            accelerator.backward(losses(model, batch, torch.float64).mean())
            if accelerator.sync_gradients:
                accelerator.unscale_gradients()
                answers.append((ids, [whole(parameter.grad) for parameter in model.parameters()]))
                ids = []
            optimizer.step()
            optimizer.zero_grad()
    return answers


@pytest.mark.parametrize("steps", [2, 3])
def test_an_open_iterator_over_other_data_does_not_weight_the_batches(two: Processes, steps: int) -> None:
    model = model_of(torch.float64)
    for (first, gradients), (second, others) in zip(*two.run(beside_an_open_iterator, steps), strict=True):
        model.zero_grad()
        losses(model, collate(first + second), torch.float64).mean().backward()  # type: ignore[no-untyped-call]
        wanted = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(others, wanted, rtol=1e-9, atol=1e-9)


def exchanges(kind: str) -> int:
    """The collectives of the library in an epoch after the first."""
    accelerator = accelerator_of("ddp", 2)
    plain = model_of(torch.float64)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    loader: Any = accelerator.prepare(loader_of(kind))
    for epoch in range(2):
        with recording() as records:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(losses(model, batch, torch.float64).mean())
                    optimizer.step()
                    optimizer.zero_grad()
        if epoch:
            return len(records)
    raise AssertionError


@pytest.mark.parametrize("kind", ["map", "tokens", "packed"])
def test_map_style_data_need_no_collective(two: Processes, kind: str) -> None:
    assert two.run(exchanges, kind) == [0, 0]


def test_streams_need_one_small_collective_for_each_step(two: Processes) -> None:
    # 9 steps, and one that finds all streams at their end; the first broadcast of a generator's state is not needed.
    assert two.run(exchanges, "own streams") == [10, 10]


def uneven_metrics() -> list[Any]:
    accelerator = accelerator_of("ddp")
    loader: Any = accelerator.prepare(DataLoader(torch.arange(7), batch_size=3))  # type: ignore[arg-type]
    return [
        (
            accelerator.gather_for_metrics({"rows": batch[:, None].repeat(1, 2), "mean": batch.float().mean()}),
            accelerator.gather_for_metrics([f"{value}" for value in batch.tolist()]),
        )
        for batch in loader
    ]


def test_metrics_of_uneven_batches_count_each_sample_once(three: Processes) -> None:
    # 3, 3 and 1 samples.
    for ((tensors, texts),) in three.run(uneven_metrics):
        assert tensors["rows"].tolist() == [[value] * 2 for value in range(7)]
        assert tensors["mean"].tolist() == [1.0, 4.0, 6.0]
        assert texts == [f"{value}" for value in range(7)]


def half_precision() -> tuple[list[int], list[Tensor]]:
    accelerator = accelerator_of("ddp", mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    plain = model_of(torch.float32)
    model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    loader: Any = accelerator.prepare(loader_of("empty streams"))
    batch = next(iter(loader))
    ids = [] if loader.is_stand_in else batch["index"].tolist()
    accelerator.backward(losses(model, batch, torch.float32).mean())
    accelerator.unscale_gradients()
    return ids, [whole(parameter.grad) for parameter in model.parameters()]  # type: ignore[arg-type]


def test_a_gradient_scaler_works(two: Processes) -> None:
    results = two.run(half_precision)
    (wanted,), _ = reference([[index for ids, _ in results for index in ids]], torch.float32, False)
    for _, gradients in results:
        torch.testing.assert_close(gradients, wanted, rtol=2e-2, atol=2e-2)


def part_of_an_epoch(kind: str, backend: str, folder: str, number: int) -> tuple[list[int], list[Tensor], list[int]]:
    """Some steps of the first epoch, between `load_state` and `save_state`, or its rest: ids, weights, next epoch."""
    configuration = DataLoaderConfiguration(
        exact_epochs=kind != "tokens, even", use_seedable_sampler=True, data_seed=3, restore_position=True
    )
    plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10)
    accelerator = Accelerator(
        cpu=True,
        backend=backend,
        fsdp_plugin=plugin if backend == "fsdp2" else None,
        dataloader_config=configuration,
    )
    plain = model_of(torch.float64)
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.05), loader_of(kind.split(",")[0], 61)
    )
    if number:
        # Random states belong to the processes that drew them.
        accelerator.load_state(f"{folder}/{number - 1}", allow_missing=("random_states",))
    ids: list[int] = []
    for steps, batch in enumerate(loader, 1):
        ids += [] if loader.is_stand_in else batch["index"].tolist()
        accelerator.backward(losses(model, batch, torch.float64).mean())
        optimizer.step()
        optimizer.zero_grad()
        if number < 2 and steps == 2:
            accelerator.save_state(f"{folder}/{number}")
            break
    weights = [whole(parameter) for parameter in model.parameters()]
    # The next epoch begins at its beginning.
    following = [] if number < 2 else [index for batch in loader for index in batch["index"].tolist()]
    return ids, weights, following


@pytest.mark.parametrize("kind", ["map", "tokens", "tokens, even", "packed"])
@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_a_run_goes_on_with_the_samples_that_are_left_on_four_then_two_then_three_processes(
    processes: Callable[[int], Processes], kind: str, backend: str, tmp_path: Any
) -> None:
    seen: list[int] = []
    for number, count in enumerate((4, 2, 3)):
        results = processes(count).run(part_of_an_epoch, kind, backend, str(tmp_path), number)
        seen += chain.from_iterable(ids for ids, _, _ in results)
        for _, weights, _ in results:
            torch.testing.assert_close(weights, results[0][1])
        assert len(seen) == len(set(seen))
        assert number == 2 or len(seen) < 61
    assert sorted(seen) == list(range(61))
    assert sorted(set(chain.from_iterable(following for _, _, following in results))) == list(range(61))
