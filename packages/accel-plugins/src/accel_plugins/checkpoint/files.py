"""The files in a checkpoint folder: their names, and functions to list and flush them.

The index counts objects of one kind from 0 in the order of `prepare`; index 0 has no suffix, unless stated.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel_bigmodel.weight_files.names import weights_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = (
    "FSDP_MODEL_NAME",
    "MANIFEST_NAME",
    "OPTIMIZER_NAME",
    "RNG_STATE_NAME",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "STEP_GUARD_NAME",
    "FlushedWhileWritten",
    "average_name",
    "custom_name",
    "extra_state_name",
    "fsync_path",
    "gradients_name",
    "is_ours",
    "loader_name",
    "optimizer_name",
    "random_states_name",
    "scheduler_name",
    "sharded_model_name",
    "shards_name",
    "shards_of",
    "walk",
    "weights_name",
    "whole_matrices_name",
)

OPTIMIZER_NAME: Final = "optimizer"
SCHEDULER_NAME: Final = "scheduler"
SAMPLER_NAME: Final = "sampler"
SCALER_NAME: Final = "scaler.pt"
STEP_GUARD_NAME: Final = "step_guard.pkl"
RNG_STATE_NAME: Final = "random_states"
FSDP_MODEL_NAME: Final = "pytorch_model_fsdp"
MANIFEST_NAME: Final = "checkpoint_manifest.json"
"""Files that exist only in checkpoints of this library, not in those of the original library."""


def _numbered(stem: str, index: int, suffix: str) -> str:
    return f"{stem}_{index}{suffix}" if index else f"{stem}{suffix}"


def optimizer_name(index: int) -> str:
    """`optimizer.bin`, `optimizer_1.bin`, ..."""
    return _numbered(OPTIMIZER_NAME, index, ".bin")


def scheduler_name(index: int) -> str:
    """`scheduler.bin`, `scheduler_1.bin`, ..."""
    return _numbered(SCHEDULER_NAME, index, ".bin")


def loader_name(index: int, rank: int = 0) -> str:
    """`dl_state_dict.bin`, `dl_state_dict_1.bin`, ...; each process after the first has a separate file."""
    return _numbered("dl_state_dict", index, f"_rank{rank}.bin" if rank else ".bin")


def random_states_name(rank: int) -> str:
    """`random_states_<rank>.pkl`."""
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def extra_state_name(rank: int) -> str:
    """`extra_state_<rank>.pkl`: the extra state of a process's strategy."""
    return f"extra_state_{rank}.pkl"


def gradients_name(rank: int) -> str:
    """`gradients_<rank>.safetensors`: the gradients of a process in an unfinished accumulation window."""
    return f"gradients_{rank}.safetensors"


def sharded_model_name(index: int) -> str:
    """`pytorch_model_fsdp.bin`, `pytorch_model_fsdp_1.bin`, ...: full weights of a model that trains sharded."""
    return _numbered(FSDP_MODEL_NAME, index, ".bin")


def shards_name(stem: str, index: int) -> str:
    """`pytorch_model_fsdp_0`, `optimizer_0`, ...: folders of shards; index 0 has a suffix."""
    return f"{stem}_{index}"


def shards_of(folder: Path, rank: int) -> list[Path]:
    """The files that one process wrote into the folders of shards of a checkpoint."""
    return sorted(folder.glob(f"*/__{rank}_*.distcp"))


def average_name(index: int) -> str:
    """`average_<index>`: the folder of a moving average, with the files of a model; index 0 has a suffix."""
    return f"average_{index}"


def whole_matrices_name(index: int) -> str:
    """`whole_matrices_<index>`: the states of an optimizer's whole matrices, a file per owner; index 0 has a suffix."""
    return f"whole_matrices_{index}"


def custom_name(index: int) -> str:
    """`custom_checkpoint_<index>.pkl`; index 0 has a suffix."""
    return f"custom_checkpoint_{index}.pkl"


_OWN_FILE_NAME: Final = re.compile(
    r"(model|pytorch_model)(_\d+)?(-\d{5,}-of-\d{5,})?\.(safetensors|bin)(\.index\.json)?"
    r"|(optimizer|scheduler|sampler)(_\d+)?\.bin"
    r"|optimizer(_\d+)?(_rank\d+)?\.bin|optimizer_\d+"
    r"|pytorch_model_fsdp(_\d+)?(_rank\d+)?(\.bin)?"
    r"|dl_state_dict(_\d+)?(_rank\d+)?\.bin"
    r"|scaler\.pt|step_guard\.pkl|gradients_\d+\.safetensors|(random_states|extra_state)_\d+\.pkl|custom_checkpoint_\d+\.pkl"
    r"|(average|whole_matrices)_\d+"
    rf"|{re.escape(MANIFEST_NAME)}"
)


def is_ours(name: str) -> bool:
    """Whether a file or folder directly inside a checkpoint has a name that saving uses.

    Example:
        >>> is_ours("optimizer_2.bin"), is_ours("notes.txt")
        (True, False)
    """
    return _OWN_FILE_NAME.fullmatch(name) is not None


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, in order."""
    for root, directories, names in os.walk(folder):
        directories.sort()
        yield from (Path(root, name) for name in sorted(names))


_WRITEBACK_BYTES: Final = 1 << 24
"""Bytes of a file after which writeback to disk is started."""
_SYNC_FILE_RANGE_WRITE: Final = 2


class FlushedWhileWritten(FileIO):
    """A file with early writeback: the disk writes during sequential writing; `fsync_path` waits for the rest.

    Without this, the kernel starts writeback after seconds, or at the fsync.
    """

    _submitted = _written = 0

    def write(self, data: Buffer) -> int:
        """Write bytes, and return how many."""
        count = super().write(data)
        self._written += count
        if self._written - self._submitted >= _WRITEBACK_BYTES and (call := _sync_file_range()) is not None:
            # Errors here are ignored, because the later fsync reports them.
            call(self.fileno(), self._submitted, self._written - self._submitted, _SYNC_FILE_RANGE_WRITE)
            self._submitted = self._written
        return count


@cache
def _sync_file_range() -> Any | None:
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


_UNFLUSHABLE_FOLDER_ERRNOS: Final = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP)
"""Errors of file systems that cannot flush folders, such as SMB shares; they write entries immediately."""


def fsync_path(path: Path) -> None:
    """Flush a file to disk, or the entries of a folder if the system can open and flush folders."""
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _UNFLUSHABLE_FOLDER_ERRNOS):
            raise
    finally:
        os.close(descriptor)
