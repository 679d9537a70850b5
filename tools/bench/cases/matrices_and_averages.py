"""Optimizers that need whole matrices, and averages of weights, on sharded models."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from bench.case import Call, Case, Scope, Work
from bench.cases.training import mesh

MATRICES, WIDTH, AVERAGED = 12, 1024, 20

WHOLE: Final = (
    "Muon: wall time of `optimizer.step()` alone, for 12 matrices of 1,024 x 1,024 that `fully_shard` shards over two "
    'processes over gloo. "raw" gathers each gradient on both processes, and both orthogonalise every matrix.'
)
AVERAGE: Final = (
    "Averages: CPU time of an update of the average of the same sharded model, in rounds of 20; "
    '"raw" is `torch._foreach_lerp_` on the shards.'
)


def matrices() -> Any:
    """A model of square matrices, equal on all processes."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES)))


def sharded_matrices() -> Any:
    """The model in shards, each with a gradient."""
    import torch
    from torch.distributed.fsdp import fully_shard

    model = matrices()
    for layer in model:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def step_whole_matrices(scope: Scope) -> Call:
    """Each matrix is orthogonalised by its owner."""
    import torch

    library = scope.library("accel_torch")
    optimizer = torch.optim.Muon(sharded_matrices().parameters(), lr=1e-4)
    library.WholeMatrices(optimizer)
    return optimizer.step


def step_gathered_matrices(scope: Scope) -> Call:
    """Each process gathers every gradient, and steps every matrix."""
    import torch

    model, whole = sharded_matrices(), matrices()
    optimizer: Any = torch.optim.Muon(whole.parameters(), lr=1e-4)

    def step() -> None:
        for shards, parameter in zip(model.parameters(), whole.parameters(), strict=True):
            parameter.grad = shards.grad.full_tensor()
        optimizer.step()

    return step


def update_average(scope: Scope) -> Call:
    """A moving average of a prepared model."""
    library = scope.library("accel_torch")
    accelerator = library.Accelerator(cpu=True, fsdp_plugin=library.FullyShardedDataParallelPlugin(2))
    model = accelerator.prepare(matrices())
    average = library.ModelAverage(model, decay=0.99, automatic=False)

    # An average does not keep its model.
    def update(_kept: Any = (accelerator, model)) -> None:
        for _ in range(AVERAGED):
            average.update()

    return update


def lerp_shards(scope: Scope) -> Call:
    """The same arithmetic on the shards."""
    import torch

    shards = [parameter.to_local().detach() for parameter in sharded_matrices().parameters()]
    averages = [shard.clone() for shard in shards]

    def update() -> None:
        for _ in range(AVERAGED):
            torch._foreach_lerp_(averages, shards, 0.01)  # pyright: ignore[reportPrivateImportUsage]

    return update


MATRIX_STEPS: Final = Work(step_whole_matrices, raw=step_gathered_matrices, processes=2)
UPDATES: Final = Work(update_average, raw=lerp_shards, processes=2)

SHARDED: Final = partial(Case, "matrices and averages", figure="ours/raw")

CASES: Final = (
    SHARDED("Muon step of 12 sharded matrices, 2 processes", "wall ms", limit=0.7, work=MATRIX_STEPS, method=WHOLE),
    SHARDED(
        "update of a sharded average, 2 processes", "CPU us", limit=1.2, work=UPDATES, method=AVERAGE, per=AVERAGED
    ),
)
