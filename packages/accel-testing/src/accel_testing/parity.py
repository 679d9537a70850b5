"""Compare training on several processes with one process, in a test."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_state.errors import SettingError
from accel_torch.check_parity import train_function
from accel_torch.check_parity.command import ParityPlan, ParityReport, check

__all__ = ("check_parity",)


def check_parity(
    step: Callable[[Any, Any], object],
    batches: Sequence[Any],
    *,
    processes: int = 2,
    backend: str = "",
    axes: Mapping[str, int] | None = None,
    mixed_precision: str = "",
    launch: Sequence[str] = (),
    timeout: float = 600.0,
) -> ParityReport:
    """Check that a training function computes the same under a plan as in one process; see `accel check-parity`.

    The function runs in new processes on the CPU: first in those of the plan, then in one process.

    Args:
        step: called with an Accelerator and a prepared loader. It creates a model, prepares it, and makes one optimizer
            step for each batch. It must be a top-level function of a module, because it is loaded from its file.
        batches: global batches: pytrees of tensors of shape (batch size, ...), all of one batch size. Each process
            receives its shard of each.
        processes: the number of processes of the plan.
        backend, axes, mixed_precision, launch, timeout: see `accel_torch.check_parity.command.ParityPlan`.

    Returns:
        The report. `report.verdict` is "equal", "differs" or "not verified".

    Raises:
        SettingError: `step` was not defined in a file, `batches` is empty, or a batch has another size.

    Example:
        >>> def train(accelerator, loader):
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Linear(8, 2)
        ...     model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ...     for inputs, targets in loader:
        ...         loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        ...         accelerator.backward(loss)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> report = check_parity(train, batches, backend="fsdp2")
        >>> assert report.verdict == "equal", report
    """
    import torch

    name = getattr(step, "__qualname__", "<lambda>")
    file = inspect.getsourcefile(step)
    if file is None or "<" in name:
        raise SettingError(
            f"Cannot check the function {name}.",
            "It is not a top-level function of a module, so new processes cannot load it from its file.",
            "Define it with def at the top of a module.",
        )
    sizes = {train_function._samples_of(batch) for batch in batches}
    if len(sizes) != 1:
        raise SettingError(
            f"Cannot check with batches of {sorted(sizes) or 'no'} samples.",
            "The check splits each batch into equal shards.",
            "Give at least one batch, and batches of one size.",
        )
    plan = ParityPlan(processes, backend, dict(axes or {}), mixed_precision, tuple(launch), timeout)
    with tempfile.TemporaryDirectory(prefix="accel-check-parity-") as folder:
        given = Path(folder, "batches.pt")
        torch.save(list(batches), given)
        script = [train_function.__file__, str(given), str(Path(file).resolve()), name]
        return check(script, plan, len(batches), source=str(Path(file).resolve()))
