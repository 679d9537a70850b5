"""How much memory each device may give to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from accel_bigmodel.byte_counts import convert_file_size_to_int
from accel_bigmodel.sizes import Dtype, byte_counter, measure
from accel_state.devices.select import best_family, family_of
from accel_state.errors import SettingError

__all__ = ("HOST", "OFFLOADED", "Budget", "get_balanced_memory", "get_max_memory")

Budget: TypeAlias = "Mapping[int | str, float | str]"
"""Device (index of an accelerator, "cpu", "disk") to bytes, or text such as "10GB"."""

HOST = "cpu"
OFFLOADED = (HOST, "disk")
"""Devices of a device map that are not accelerators, in the order in which they fill up."""


def get_max_memory(max_memory: Budget | None = None) -> dict[int | str, int]:
    """Bytes by device: what is given, in the order accelerators, cpu, disk; or what is free now when nothing is given.

    Text in a dict given is replaced there by the bytes it means: transformers goes on with the dict it gave.

    Raises:
        SettingError: a device that is neither an index, "cpu" nor "disk", or a size that is none.

    Example:
        >>> get_max_memory({"cpu": "1GB", 0: "2GB"})
        {0: 2000000000, 'cpu': 1000000000}
    """
    if max_memory is None:
        family, host = best_family(), family_of(HOST)
        free: dict[int | str, int] = {} if family is host else {i: family.free_memory(i) for i in range(family.count())}
        return {**free, HOST: host.free_memory()}
    sizes = {device: convert_file_size_to_int(size) for device, size in max_memory.items()}
    unknown = [device for device in sizes if not _is_index(device) and device not in OFFLOADED]
    if unknown:
        raise SettingError(
            f"A memory budget for the device {unknown[0]!r} was given.",
            "Budgets are given by the index of an accelerator, for 'cpu' and for 'disk'.",
            'Write max_memory={0: "10GB", "cpu": "30GB"}.',
        )
    if isinstance(max_memory, dict):
        max_memory.update(sizes)
    return {device: sizes[device] for device in sorted(sizes, key=_order)}


def _is_index(device: Any) -> bool:
    return isinstance(device, int) and not isinstance(device, bool) and device >= 0


def _order(device: int | str) -> tuple[int, int]:
    return (0, device) if isinstance(device, int) else (1, OFFLOADED.index(device))


def get_balanced_memory(
    model: nn.Module,
    max_memory: Budget | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Budgets under which `infer_auto_device_map` spreads a model evenly over the accelerators.

    Each but the last is held to its share plus room for five quarters of a block (the largest that stays whole, or a
    layer of mean size if that is more), because blocks do not divide evenly.

    Args:
        max_memory: upper bounds; what is free now when None.
        no_split_module_classes: names of classes that stay in one piece.
        dtype: count floating-point weights in this dtype.
        special_dtypes: dtypes of single weights, by full name.
        low_zero: keep the first accelerator as empty as the others allow, for what generation needs there.
    """
    budget = get_max_memory(max_memory)
    indices = [device for device in budget if _is_index(device) and budget[device] > 0]
    if len(indices) < 2:
        return budget
    found = measure(model, byte_counter(dtype, special_dtypes), frozenset(no_split_module_classes or ()))
    total = found.sizes[""]
    layer = sum(found.layers) // max(len(found.layers), 1)
    share = total // (len(indices) - 1 if low_zero else len(indices)) + int(1.25 * max(found.largest_block, layer))
    for device in indices[:-1]:
        budget[device] = min(budget[device], share)
    if low_zero:
        others = sum(budget[device] for device in indices[1:])
        budget[indices[0]] = min(budget[indices[0]], max(0, total - others))
    return budget
