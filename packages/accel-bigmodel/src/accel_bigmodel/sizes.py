"""Computes the bytes of a module, its parts and its largest layer, without reading any data."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from accel_state.choices import CustomDtype
from accel_state.errors import SettingError
from accel_state.settings.integers import as_int

__all__ = (
    "Dtype",
    "Measured",
    "byte_counter",
    "compute_module_sizes",
    "convert_bytes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "get_max_layer_size",
    "measure",
    "torch_dtype",
)

Dtype: TypeAlias = "torch.dtype | CustomDtype | str"
"""A torch dtype, its name with or without "torch.", or one of the dtypes that are only used for sizes."""

_CUSTOM = {CustomDtype.FP8: 1.0, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B)\s*", re.IGNORECASE)


def convert_file_size_to_int(size: float | str) -> int:
    """Bytes of a size such as "5GB" or "200MiB"; a number is a number of bytes, rounded down.

    KB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB of 1024. A lower-case b after K, M, G or T counts bits.

    Raises:
        SettingError: the text is not a number followed by one of the units, or the number is negative or NaN.

    Example:
        >>> convert_file_size_to_int("1.5GB"), convert_file_size_to_int("8Mb"), convert_file_size_to_int("1KiB")
        (1500000000, 1000000, 1024)
    """
    whole = as_int(size)
    if whole is not None:
        size = whole
    if isinstance(size, int | float) and not isinstance(size, bool) and 0 <= size < math.inf:
        return int(size)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise SettingError(
            f"Cannot read the size {size!r}.",
            "It is neither a number of bytes nor a number with a unit.",
            'Write an integer, or text such as "5GB", "200MB" or "1.5GiB".',
        )
    number, unit = match.groups()
    count = int(float(number) * _UNITS[unit.upper()]) if "." in number else int(number) * _UNITS[unit.upper()]
    in_bits = unit.endswith("b") and "I" not in unit.upper()
    return count // 8 if in_bits else count


def convert_bytes(size: float) -> str:
    """A number of bytes as text, with units in powers of 1024.

    Example:
        >>> convert_bytes(1500), convert_bytes(12)
        ('1.46 KiB', '12 bytes')
    """
    if size < 1024:
        return f"{round(size, 2)} bytes"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024:
            return f"{round(size, 2)} {unit}"
    return f"{round(size / 1024, 2)} PiB"


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The torch dtype of a name such as "float16" or "torch.float16".

    Raises:
        SettingError: no dtype has that name.
    """
    resolved = getattr(torch, str(dtype).removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype):
        raise SettingError(
            f"Cannot use the dtype {dtype!r}.", "torch has no dtype with that name.", 'Give one such as "bfloat16".'
        )
    return resolved


def dtype_byte_size(dtype: Dtype | CustomDtype) -> float:
    """Bytes of one element: 4 for float32, 0.125 for bool and 0.5 for int4, which are counted as if packed.

    Raises:
        SettingError: no dtype has that name.

    Example:
        >>> dtype_byte_size(torch.float32), dtype_byte_size("bfloat16"), dtype_byte_size(CustomDtype.INT4)
        (4, 2, 0.5)
    """
    if isinstance(dtype, CustomDtype):
        return _CUSTOM[dtype]
    resolved = torch_dtype(dtype)
    return 1 / 8 if resolved == torch.bool else resolved.itemsize


def byte_counter(
    dtype: Dtype | None = None, special_dtypes: Mapping[str, Any] | None = None
) -> Callable[[str, Tensor], int]:
    """A function of name and tensor that returns the bytes of the tensor in `dtype`.

    At most its current size; integers and bools do not change; names in `special_dtypes` have their own dtypes.
    """
    special = {name: _element_bytes(own) for name, own in (special_dtypes or {}).items()}
    target = None if dtype is None else _element_bytes(dtype)
    element_bytes: dict[torch.dtype, float] = {}

    def count(name: str, tensor: Tensor) -> int:
        dtype_in_model = tensor.dtype
        element = element_bytes.get(dtype_in_model)
        if element is None:
            element = dtype_byte_size(dtype_in_model)
            if target is not None and (dtype_in_model.is_floating_point or dtype_in_model.is_complex):
                element = min(element, target)
            element_bytes[dtype_in_model] = element
        return int(tensor.numel() * (special.get(name, element) if special else element))

    return count


def _element_bytes(dtype: Dtype) -> float:
    return dtype_byte_size(dtype if isinstance(dtype, CustomDtype) else torch_dtype(dtype))


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of every tensor, of every module by its name, and of the whole model under "".

    A tied weight counts once, at its first name. Modules without tensors are omitted, and their size reads as 0.

    Args:
        dtype: count floating-point tensors as if they had this dtype, where that is smaller.
        special_dtypes: dtypes of single tensors, by full name.
        buffers_only: count only buffers.
    """
    return measure(model, byte_counter(dtype, special_dtypes), buffers_only=buffers_only).sizes


@dataclass
class Measured:
    """Sizes of one model from one walk.

    Args:
        sizes: bytes by name, "" for all.
        layers: bytes of each module that has tensors and no children.
        largest_block: bytes of the largest module of a class among `blocks`.
    """

    sizes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    layers: list[int] = field(default_factory=list)
    largest_block: int = 0

    def add(
        self, prefix: str, module: nn.Module, own_bytes: Callable[[str, nn.Module], int], blocks: Collection[str]
    ) -> int:
        """Add the sizes of a module and of all modules in it; return its bytes.

        Args:
            prefix: what its tensors' names begin with.
            module: the module.
            own_bytes: `f(prefix, module)` that adds the tensors of a module itself, and returns their bytes.
            blocks: class names for `largest_block`.
        """
        total = own_bytes(prefix, module)
        if total and not module._modules:
            self.layers.append(total)
        for name, child in module._modules.items():
            size = 0 if child is None else self.add(f"{prefix}{name}.", child, own_bytes, blocks)
            if size:
                self.sizes[prefix + name] = size
                total += size
                if blocks and size > self.largest_block and type(child).__name__ in blocks:
                    self.largest_block = size
        return total


def measure(
    model: nn.Module,
    count: Callable[[str, Tensor], int],
    blocks: Collection[str] = frozenset(),
    buffers_only: bool = False,
) -> Measured:
    """Compute the sizes in one walk over a model; `blocks` are class names for `largest_block`."""
    measured, seen = Measured(), set[int]()
    sizes = measured.sizes

    def own_bytes(prefix: str, module: nn.Module) -> int:
        total = 0
        tensors: list[tuple[str, Tensor | None]] = [] if buffers_only else list(module._parameters.items())
        for leaf, tensor in (*tensors, *module._buffers.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                sizes[prefix + leaf] = size = count(prefix + leaf, tensor)
                total += size
        return total

    total = measured.add("", model, own_bytes, blocks)
    if total:
        sizes[""] = total
    return measured


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]], module_sizes: Mapping[str, int], no_split_module_classes: Sequence[str] | None
) -> tuple[int, list[str]]:
    """Bytes and names of the largest layers: modules without children, or of a class that must not be split.

    Args:
        modules: names and modules (or tensors) to search, with their submodules.
        module_sizes: as `compute_module_sizes` returns them.
        no_split_module_classes: names of classes that count as one layer.
    """
    whole = frozenset(no_split_module_classes or ())
    largest, names = 0, list[str]()
    stack = list(reversed(modules))
    while stack:
        name, module = stack.pop()
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in whole:
            stack += [(f"{name}.{child}" if name else child, inner) for child, inner in reversed(children)]
            continue
        size = module_sizes[name]
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names
