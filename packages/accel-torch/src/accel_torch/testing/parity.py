"""Comparing several processes with one, in a test."""

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
    """Whether a function that trains computes under a plan what it computes in one process; see `accel check-parity`.

    It is called in new processes, on the CPU: in those of the plan, and alone.

    Args:
        step: called with an Accelerator and a prepared loader; makes a model, prepares it, and takes one optimizer step
            for each batch of the loader. A function of a module, which is loaded again from its file.
        batches: global batches: nested tensors whose first dimension is that of the samples, all of one size. A process
            is given its slice of each.
        processes: of the plan.
        backend, axes, mixed_precision, launch, timeout: see `accel_torch.check_parity.command.ParityPlan`.

    Returns:
        What differs. `report.verdict` is "equal", "differs" or "not verified".

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
            "New processes load it by its name from its file, and it is not a top-level function of a module.",
            "Define it with def at the top of a module.",
        )
    sizes = {train_function._samples_of(batch) for batch in batches}
    if len(sizes) != 1:
        raise SettingError(
            f"Cannot check with batches of {sorted(sizes) or 'no'} samples.",
            "The check cuts each batch into equal slices.",
            "Give at least one batch, and batches of one size.",
        )
    plan = ParityPlan(processes, backend, dict(axes or {}), mixed_precision, tuple(launch), timeout)
    with tempfile.TemporaryDirectory(prefix="accel-check-parity-") as folder:
        given = Path(folder, "batches.pt")
        torch.save(list(batches), given)
        script = [train_function.__file__, str(given), str(Path(file).resolve()), name]
        return check(script, plan, len(batches), source=str(Path(file).resolve()))
