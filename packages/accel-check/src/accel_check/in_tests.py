"""The checks of a training function, for tests: its processes are new, whatever the process of the tests has done."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from accel_check.check_resume import Outcome
from accel_check.comparison import ParityFinding
from accel_check.report import CODES, ParityReport
from accel_state.errors import SettingError

__all__ = ("parity", "resume")

_COMMAND_SCRIPT: Final = Path(__file__).with_name("started.py")
_TRAINING_SCRIPT: Final = Path(__file__).with_name("train_function.py")


def parity(
    train: Callable[[Any, Any], object],
    batches: Sequence[Any],
    *,
    processes: int = 2,
    backend: str = "",
    axes: Mapping[str, int] | None = None,
    mixed_precision: str = "",
    launch: Sequence[str] = (),
    timeout: float = 600.0,
) -> ParityReport:
    """Check that a training function computes the same in several processes as in one; see `accel check-parity`.

    Args:
        train: called with an Accelerator and a prepared loader. It creates a model, prepares it, and makes one
            optimizer step for each batch. It must be a top-level function of a module, which is loaded from its file.
        batches: global batches: pytrees of tensors of shape (batch size, ...), all of one batch size. Each process
            receives its shard of each.
        processes: the number of processes.
        backend: name of the backend, as `accel backends` lists it.
        axes: sizes of mesh axes by name, such as {"dp_shard": 2, "tp": 2}.
        mixed_precision: "fp16" or "bf16" for both runs.
        launch: further options of `accel launch`.
        timeout: seconds after which a run is stopped.

    Returns:
        The report. `report.verdict` is "equal", "differs" or "not verified".

    Raises:
        SettingError: `train` was not defined in a file, `batches` is empty, a batch has another size, or an option is
            invalid.

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
        >>> report = parity(train, batches, backend="fsdp2")
        >>> assert report.verdict == "equal", report
    """
    options = ["--processes", str(processes), "--steps", str(len(batches)), "--timeout", str(timeout)]
    options += ["--backend", backend] if backend else []
    options += ["--axes", ",".join(f"{name}={size}" for name, size in axes.items())] if axes else []
    options += ["--mixed_precision", mixed_precision] if mixed_precision else []
    options += [f"--launch={subprocess.list2cmdline(launch)}"] if launch else []
    (line,) = _lines("check-parity", options, train, batches)
    report = json.loads(line)
    findings = []
    for one in report["findings"]:
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in one.items()}
        findings.append(ParityFinding(**fields))
    fields = {key: value for key, value in report.items() if key not in ("findings", "parameter", "module")}
    return ParityReport(**fields, findings=findings)


def resume(
    train: Callable[[Any, Any], object],
    batches: Sequence[Any],
    *,
    at: Sequence[int] = (1,),
    steps: int = 1,
    processes: Sequence[int] = (1,),
    backend: str = "",
    launch: Sequence[str] = (),
    timeout: float = 600.0,
) -> list[Outcome]:
    """Check that a training function continues exactly from its checkpoints; see `accel check-resume`.

    The check saves after the steps `at`, and loads before the first batch.

    Args:
        train: see `parity`.
        batches: see `parity`; more than the last step of `at`.
        at: optimizer steps after which to save and resume.
        steps: steps to compare after each checkpoint.
        processes: world sizes: the first is that of the uninterrupted run, each is that of a resumed run.
        backend, launch, timeout: see `parity`.

    Returns:
        An outcome for each resumed run; its `verdict` is "equal", "differs" or "not verified".

    Raises:
        SettingError: see `parity`.

    Example:
        >>> for outcome in resume(train, batches, at=(2,), processes=(2,)):
        ...     assert outcome.verdict == "equal", outcome
    """
    options = ["--at", ",".join(map(str, at)), "--steps", str(steps), "--timeout", str(timeout)]
    options += ["--processes", ",".join(map(str, processes))]
    options += ["--backend", backend] if backend else []
    options += [f"--launch={subprocess.list2cmdline(launch)}"] if launch else []
    return [Outcome(**json.loads(line)) for line in _lines("check-resume", options, train, batches)]


def _lines(command: str, options: Sequence[str], train: Callable[[Any, Any], object], batches: Sequence[Any]) -> Any:
    """The lines that a command prints about a function."""
    import torch

    from accel_check.train_function import samples_of

    name = getattr(train, "__qualname__", "<lambda>")
    file = inspect.getsourcefile(train)
    if file is None or "<" in name:
        raise SettingError(
            f"Cannot check the function {name}.",
            "It is not a top-level function of a module, so new processes cannot load it from its file.",
            "Define it with def at the top of a module.",
        )
    sizes = {samples_of(batch) for batch in batches}
    if len(sizes) != 1:
        raise SettingError(
            f"Cannot check with batches of {sorted(sizes) or 'no'} samples.",
            "The check splits each batch into equal shards.",
            "Give at least one batch, and batches of one size.",
        )
    with tempfile.TemporaryDirectory(prefix="accel-check-") as folder:
        batches_file = Path(folder, "batches.pt")
        torch.save(list(batches), batches_file)
        words = [sys.executable, str(_COMMAND_SCRIPT), command, "--json", *options]
        words += [str(_TRAINING_SCRIPT), str(batches_file), str(Path(file).resolve()), name]
        done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode not in CODES.values():
        raise SettingError(
            f"Cannot check the function {name}.", done.stderr.strip()[-2000:], "Correct the arguments of the check."
        )
    return done.stdout.splitlines()
