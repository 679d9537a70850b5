"""Looking into pickles that an engine reads by itself, without running anything they bring."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Final

from accel_state.errors import CheckpointError

__all__ = ("check_metadata",)

_MODULES: Final = frozenset({"torch.distributed.checkpoint.metadata"})
_NAMES: Final = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch.distributed.checkpoint.filesystem", "SerializationFormat"),
        ("torch.distributed.checkpoint.planner", "WriteItemType"),
        ("collections", "OrderedDict"),
        ("builtins", "set"),
        ("builtins", "dict"),
        ("builtins", "list"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        # Where Python 3.13 has them.
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "WindowsPath"),
    }
)


class _Metadata(pickle.Unpickler):
    """Knows the classes that describe tensors and where they lie, and no others but those of `further`."""

    further: frozenset[tuple[str, str]] = frozenset()

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and name in _dtype_names()
        if (module in _MODULES and "." not in name) or (module, name) in _NAMES | self.further or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _dtype_names() -> frozenset[str]:
    import torch

    return frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))


def check_metadata(path: Path, further: frozenset[tuple[str, str]] = frozenset()) -> None:
    """Refuse a `.metadata` of `torch.distributed.checkpoint` that holds more than descriptions of tensors.

    Args:
        path: the file.
        further: (module, name) of other classes by which an engine describes its tensors.

    Raises:
        CheckpointError: it does, or it is missing or damaged.
    """
    try:
        with open(path, "rb") as file:
            reader = _Metadata(file)
            reader.further = further
            reader.load()
    except FileNotFoundError:
        raise CheckpointError(
            f"The shards in {path.parent} were to be loaded.",
            f"{path.name} is not there.",
            "The folder is incomplete: load an older checkpoint.",
        ) from None
    except Exception as error:  # a damaged pickle can make its reader raise anything
        raise CheckpointError(
            f"The shards in {path.parent} were to be loaded.",
            f"{path.name} is damaged or holds more than descriptions of tensors: {error}",
            "Load an older checkpoint, one that you trust.",
        ) from error
