"""Shards of models and optimizers in one file per process, which only as many processes in the same order can read.

The folders of shards in `weights` load anywhere; these files are for scripts that ask for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.files import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accel_plugins.manifest import Part
from accel_state import current
from accel_state.errors import CheckpointError

__all__ = ("read", "write")

_STEMS = {Part.MODEL: FSDP_MODEL_NAME, Part.OPTIMIZER: OPTIMIZER_NAME}


def write(part: Part, state: dict[str, Any], folder: Path, index: int) -> None:
    """Write the shards of this process: `pytorch_model_fsdp_0_rank1.bin`, `optimizer_0_rank1.bin`, ...

    Raises:
        CheckpointError: the disk refuses.
    """
    pickled.write(state, folder / _name(part, index, current.process().rank))


def read(part: Part, folder: Path, index: int) -> dict[str, Any]:
    """What `write` has written in this process.

    Raises:
        CheckpointError: another number of processes wrote the files, or that of this process is damaged.
    """
    process = current.process()
    found = len(list(folder.glob(_name(part, index, "[0-9]*"))))
    if found not in (0, process.world_size):
        raise CheckpointError(
            f"Cannot read {part.value} {index} from {folder}, one file per process.",
            f"{found} processes wrote it, and there are {process.world_size}.",
            "Start as many processes, or save with use_dcp=True, which loads on any number.",
        )
    state: dict[str, Any] = pickled.read(folder / _name(part, index, process.rank))
    return state


def _name(part: Part, index: int, rank: int | str) -> str:
    return f"{_STEMS[part]}_{index}_rank{rank}.bin"
