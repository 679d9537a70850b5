"""The checks that `accel test` runs on every process: processes, collectives, loaders and training.

Each check is a function; the first failure ends the run with its error. The main process prints the checks that passed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_ops import broadcast, gather, gather_object, pad_across_processes, reduce, set_seed, synchronize_rng_states
from accel_state.errors import CollectiveError
from accel_torch.accelerator import Accelerator

__all__ = ("main",)

_SAMPLES: Final = 48
_STEPS: Final = 6


def main() -> None:
    """Run all checks.

    Raises:
        CollectiveError: a check failed; the message names it.
    """
    accelerator = Accelerator()
    accelerator.print(
        f"{accelerator.num_processes} process(es), {accelerator.distributed_type.value}, on {accelerator.device.type}, "
        f"mixed precision {accelerator.mixed_precision}"
    )
    for check in _CHECKS:
        check(accelerator)
        accelerator.wait_for_everyone()
        accelerator.print(f"  works: {(check.__doc__ or '').splitlines()[0].rstrip('.')}")
    accelerator.print("All checks passed.")
    accelerator.end_training()


def _expect(holds: bool, what: str, accelerator: Accelerator) -> None:
    if not holds:
        raise CollectiveError(
            "`accel test` failed: training does not work on this machine.",
            f"On process {accelerator.process_index}, {what}.",
            "Compare `accel env` of all machines; `accel doctor --nodes` tests the network between them.",
        )


def _places(accelerator: Accelerator) -> None:
    """Every process has its own rank."""
    ranks = gather_object([accelerator.process_index])
    _expect(ranks == list(range(accelerator.num_processes)), f"the ranks are {ranks}", accelerator)
    mains = gather_object([accelerator.is_main_process])
    _expect(mains.count(True) == 1, f"{mains.count(True)} processes are the main process", accelerator)


def _collectives(accelerator: Accelerator) -> None:
    """Tensors are gathered, summed, broadcast and padded."""
    rank, count = accelerator.process_index, accelerator.num_processes
    mine = torch.full((2,), float(rank), device=accelerator.device)
    everybody = torch.arange(count, dtype=torch.float32, device=accelerator.device).repeat_interleave(2)
    _expect(torch.equal(gather(mine), everybody), "gather returned the processes in the wrong order", accelerator)
    summed = reduce(mine.clone(), "sum")
    _expect(bool((summed == count * (count - 1) / 2).all()), f"the sum of the ranks is {summed[0]}", accelerator)
    _expect(bool((broadcast(mine.clone()) == 0).all()), "broadcast did not send the main process's tensor", accelerator)
    padded = pad_across_processes(torch.ones(rank + 1, device=accelerator.device))
    _expect(len(padded) == count, f"padding {count} elements returned {len(padded)}", accelerator)


def _generators(accelerator: Accelerator) -> None:
    """Synchronised random-number generators draw the same numbers on all processes."""
    torch.manual_seed(accelerator.process_index)
    synchronize_rng_states(["torch"])
    drawn = gather(torch.rand(1).to(accelerator.device))
    _expect(bool((drawn == drawn[0]).all()), f"the processes drew {drawn.tolist()}", accelerator)


def _split(accelerator: Accelerator) -> None:
    """A list is split between the processes."""
    with accelerator.split_between_processes(list(range(accelerator.num_processes * 2 + 1))) as mine:
        parts = gather_object(list(mine))
    # Processes that read the same samples have the same shard.
    different = list(dict.fromkeys(parts))
    _expect(different == list(range(accelerator.num_processes * 2 + 1)), f"the shards are {parts}", accelerator)


def _loaders(accelerator: Accelerator) -> None:
    """A loader yields every sample once, even if the last batch is short."""
    data = TensorDataset(torch.arange(_SAMPLES + 1))
    loader = accelerator.prepare_data_loader(DataLoader(data, batch_size=4, shuffle=True))
    seen = torch.cat([accelerator.gather_for_metrics(batch[0]) for batch in loader])
    _expect(sorted(seen.tolist()) == list(range(_SAMPLES + 1)), f"{len(seen)} samples were read", accelerator)


def _training(accelerator: Accelerator) -> None:
    """Training on all processes gives the same weights as on one."""
    set_seed(7)
    inputs = torch.randn(_SAMPLES, 4)
    targets = inputs.sum(dim=1, keepdim=True)
    model = nn.Linear(4, 1)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    _train_alone(alone, inputs, targets)
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    count = _SAMPLES // accelerator.num_processes
    x, y = (tensor[mine][:count].to(accelerator.device) for tensor in (inputs, targets))
    for _ in range(_STEPS):
        loss = nn.functional.mse_loss(prepared(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if _SAMPLES % accelerator.num_processes == 0:
        exact = accelerator.mixed_precision == "no"
        trained = accelerator.get_state_dict(prepared)
        for name, weight in (trained or {}).items():
            close = torch.allclose(
                weight.float().cpu(), alone.state_dict()[name], rtol=1e-4 if exact else 0.1, atol=1e-5 if exact else 0.1
            )
            _expect(close, f"{name} differs from training on one process", accelerator)


def _train_alone(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(_STEPS):
        torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


_CHECKS: Final[tuple[Callable[[Accelerator], None], ...]] = (
    _places,
    _collectives,
    _generators,
    _split,
    _loaders,
    _training,
)

if __name__ == "__main__":
    main()
