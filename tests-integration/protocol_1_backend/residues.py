"""Files of a checkpoint that hold what each process has not sent yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_state.errors import CheckpointError

__all__ = ("read", "write")


def write(unsent: Mapping[str, Tensor], folder: Path, index: int, rank: int) -> None:
    """Write what one process has not sent yet of one model."""
    save_file({name: kept.contiguous() for name, kept in unsent.items()}, _path(folder, index, rank))


def read(folder: Path, index: int, rank: int) -> dict[str, Tensor]:
    """What `write` wrote.

    Raises:
        CheckpointError: the checkpoint was written by fewer processes, or by another backend.
    """
    path = _path(folder, index, rank)
    if not path.is_file():
        raise CheckpointError(
            f"Cannot load the unsent gradients of process {rank}.",
            f"There is no {path}.",
            "Resume with the backend and the number of processes that wrote the checkpoint.",
        )
    return load_file(path)


def _path(folder: Path, index: int, rank: int) -> Path:
    return folder / f"unsent_{index}_{rank}.safetensors"
