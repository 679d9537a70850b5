"""Samples of very different lengths: batches by tokens and packed items beside random batches, and planning."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

from bench.case import Call, Case, Scope, Work
from bench.turns import ROOT

PARAGRAPHS, SIZE = 512, 32

TRAINING: Final = (
    "Wall time of an epoch of `docs/tutorials/train_lines.py` over the same 512 paragraphs on two processes over gloo; "
    '"raw" is plain torch with DDP and random batches of 32, padded to the longest. A limit of 0.67 is 1.5 times as '
    "many real tokens in a second."
)
PLANNING: Final = (
    "Planning of an epoch for 8 processes by `TokenBatchSampler`: lognormal lengths with a median of 300 and a sigma "
    "of 1, at most 8,192 tokens in a batch."
)


@cache
def tutorial() -> Any:
    """The program of the tutorial, as a module."""
    spec = importlib.util.spec_from_file_location("train_lines", ROOT / "docs" / "tutorials" / "train_lines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_prepared(batches: str, scope: Scope) -> Call:
    """An epoch of batches by tokens or of packed items, every sample once."""
    import torch

    library, program = scope.library("accel_torch"), tutorial()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    configuration = library.DataLoaderConfiguration(exact_epochs=True)
    accelerator = library.Accelerator(cpu=True, dataloader_config=configuration)
    plain = program.GPT()
    model, optimizer, loader = accelerator.prepare(
        plain,
        torch.optim.AdamW(plain.parameters(), lr=3e-3),
        program.loader_of(batches, program.paragraphs(PARAGRAPHS), SIZE),
    )

    def epoch() -> None:
        for batch in loader:
            with accelerator.accumulate(model, weight=library.count_labels(batch)):
                accelerator.backward(program.loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()

    return epoch


def train_plain(scope: Scope) -> Call:
    """An epoch of random batches, padded to the longest, in plain torch."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    program = tutorial()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = DistributedDataParallel(program.GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    samples = program.paragraphs(PARAGRAPHS)
    loader: Any = DataLoader(samples, batch_size=SIZE, sampler=DistributedSampler(samples), collate_fn=program.padded)

    def epoch() -> None:
        for batch in loader:
            program.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def plan(count: int, scope: Scope) -> Call:
    """The first step of an epoch, for which all of them are planned."""
    import torch

    library = scope.library("accel_data")
    torch.manual_seed(0)
    drawn = torch.randn(count, dtype=torch.float64) + math.log(300)
    lengths = drawn.exp().long().clamp(1, 8192)
    return lambda: next(library.TokenBatchSampler(lengths, 8192).steps(8))


def _training(name: str, limit: float, side: Callable[[Scope], Call]) -> Case:
    work = Work(side, raw=train_plain, processes=2, rounds=3)
    return Case("ragged data", f"{name}, 2 processes", "wall ms per epoch", "ours/raw", limit, work, TRAINING)


CASES: Final = (
    _training("a GPT on batches by tokens", 0.67, partial(train_prepared, "tokens")),
    _training("a GPT on packed items", 0.625, partial(train_prepared, "packed")),
    *(
        Case(
            "ragged data",
            f"planning of {count:,} lengths",
            "CPU ms",
            "ours",
            3000.0 if count == 1_000_000 else None,
            Work(partial(plan, count)),
            PLANNING,
        )
        for count in (10_000, 100_000, 1_000_000)
    ),
)
